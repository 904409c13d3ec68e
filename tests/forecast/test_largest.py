"""The largest batch, and the batch from which a precision pays."""

import pytest

from mpx._forecast._largest import largest_batch, pays_from


@pytest.mark.parametrize("start", [1, 8, 96, 100, 5000])
@pytest.mark.parametrize("most", [0, 1, 7, 97, 1000, 30_000])
def test_within_five_percent(start, most):
    asked = []

    def memory(batch):
        asked.append(batch)
        return 1000 + 10 * batch

    limit = 1000 + 10 * most
    found = largest_batch(memory, limit, start, memory(start))
    assert most / 1.05 - 1 <= found <= most
    assert len(asked) <= 11


def test_steps_in_memory():
    def memory(batch):
        return 1000 + 4096 * (batch // 64)

    found = largest_batch(memory, 100_000, 8, memory(8))
    assert memory(found) <= 100_000 < memory(int(found * 1.05) + 1)


def test_a_unit():
    found = largest_batch(lambda batch: batch, 1003, 8, 8, unit=8)
    assert found % 8 == 0
    assert 1003 / 1.05 - 8 <= found <= 1003


def test_programs_that_the_compiler_refuses():
    def memory(batch):
        return batch if batch <= 100 else None

    assert 95 <= largest_batch(memory, 10_000, 200, None) <= 100


def test_where_it_pays():
    base = {8: 10.0, 16: 18.0}  # 2 + b
    assert pays_from({8: 8.0, 16: 12.0}, base) == 5  # 4 + b / 2
    assert pays_from({8: 5.0, 16: 9.0}, base) == 1
    assert pays_from({8: 12.0, 16: 22.0}, base) is None
    assert pays_from({8: 5.0}, base) is None
