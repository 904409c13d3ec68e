"""Kills and a soak, in short; `python -m tests.faults` runs them at length."""

import pytest

from ..helpers import in_two_processes
from . import kills, soak
from .two_processes import PRECISIONS

# Flax and Optax need JAX's own promotion.
pytestmark = pytest.mark.third_party


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path):
    found = kills.killed(tmp_path, 1)
    assert len(found.positions) == found.resumed_equal == 1
    assert found.ends_equal


@pytest.mark.slow
def test_bad_steps_leave_nothing_behind():
    found = soak.soak(200, pieces=2)
    assert found.faults == found.skipped > 4
    assert found.is_equal and found.scale_is_right
    assert found.traces == 1 and not found.calls_the_host
    assert found.arrays[0] >= found.arrays[1]  # of other tests, too


def test_the_checks_can_fail(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"a,b\r\n1,2\r\n3")
    assert kills.begins_as(tmp_path / "metrics.csv", b"a,b\r\n1,2\r\n4,5\r\n")
    assert not kills.begins_as(tmp_path / "metrics.csv", b"a,b\r\n1,3\r\n4,5\r\n")
    assert soak.calls_the_host("ROOT custom-call, target=xla_ffi_python_cpu_callback")
    assert int(soak.faults_in(200).sum()) > 4


@pytest.mark.slow
def test_a_nan_on_one_device_of_one_process_skips_the_step_on_all():
    """Every piece of weights and moments, on both, is what it was, bit for bit."""
    module = "tests.faults.two_processes"
    for found in in_two_processes("-m", module, devices=2):
        assert set(found) == set(PRECISIONS)
        for precision, outcome in found.items():
            good, bad = [[True], False], [[False], True]  # decision, nothing changed
            assert outcome == {"steps": [good, bad, bad, good], "skipped": 2}, precision
