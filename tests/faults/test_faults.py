"""Kills, a soak and damage, in short; `python -m tests.faults` runs them at length."""

import itertools

import jax
import numpy as np
import pytest

from examples.runs.checkpoint import Checkpoints
from examples.runs.digest import digests
from tests.examples.cases import late_failures  # noqa: F401
from tests.helpers import slow_but

from ..helpers import in_two_processes
from . import damage, kills, soak
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


def test_the_checks_of_faults_can_fail(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"a,b\r\n1,2\r\n3")
    assert kills.begins_as(tmp_path / "metrics.csv", b"a,b\r\n1,2\r\n4,5\r\n")
    assert not kills.begins_as(tmp_path / "metrics.csv", b"a,b\r\n1,3\r\n4,5\r\n")
    assert soak.calls_the_host("ROOT custom-call, target=xla_ffi_python_cpu_callback")
    assert int(soak.faults_in(200).sum()) > 4
    outcome = damage.Outcome("state/weight/0.0", None, is_intact=False)
    assert outcome.is_silent
    assert not damage.Outcome("state/weight/0.0", "it is damaged", True).is_named
    assert not damage.same({"a": np.float32(0.0)}, {"a": np.float32(-0.0)})


@pytest.mark.slow
def test_a_nan_on_one_device_of_one_process_skips_the_step_on_all():
    """Every piece of weights and moments, on both, is what it was, bit for bit."""
    module = "tests.faults.two_processes"
    for found in in_two_processes("-m", module, devices=2):
        assert set(found) == set(PRECISIONS)
        for precision, outcome in found.items():
            good, bad = [[True], False], [[False], True]  # decision, nothing changed
            assert outcome == {"steps": [good, bad, bad, good], "skipped": 2}, precision


# Flax and Optax need JAX's own promotion.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return damage.Saved(tmp_path_factory.mktemp("saved"))


@pytest.mark.usefixtures("late_failures")
@pytest.mark.parametrize(
    ("count", "kind"),
    slow_but([], itertools.product([6, 20], [damage.flips, damage.cuts])),
)
def test_no_damage_is_silent_and_each_error_names_the_file(saved, kind, count):
    outcomes = list(kind(saved, count))
    assert not [o.file for o in outcomes if o.is_silent]
    assert not [(o.file, o.error) for o in outcomes if not o.is_named]
    assert sum(o.error is not None for o in outcomes) > count / 2
    assert saved.read(saved.files()[0]).error is None  # all is as it was


def test_a_digest_is_of_the_bits_and_not_of_the_layout():
    x = jax.random.normal(jax.random.key(0), (8, 24))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    half, eight = x.astype("bfloat16"), x.astype("float8_e4m3fn")
    tree = {"x": x, "half": half, "eight": eight, "flags": x > 0, "empty": x[:0]}
    tree["count"] = np.uint32(7)
    plain = digests(tree)
    assert digests({**tree, "x": jax.device_put(x, place)}) == plain
    changed = {"x": x.at[3, 5].set(-x[3, 5]), "flags": ~tree["flags"]}
    changed["half"] = half[::-1]  # the same numbers elsewhere
    changed["eight"] = eight.T.reshape(8, 24)
    changed["count"] = np.uint32(8)
    found = digests({**tree, **changed})
    assert {name for name in plain if plain[name] != found[name]} == set(changed)


@pytest.mark.parametrize("devices", slow_but([], [4, 1]))
def test_values_are_equal_on_another_number_of_devices(saved, devices):
    """Saved over eight devices; also back to eight again."""
    other = damage.Saved(saved.folder.parent / f"on-{devices}", devices)
    for at, like, count in ((saved, other, devices), (other, saved, 8)):
        with Checkpoints(at.folder, damage.CONFIG, "delayed") as checkpoints:
            found, _ = checkpoints.restore(like.state)
        assert all(len(x.sharding.device_set) == count for x in jax.tree.leaves(found))
        assert damage.same(found, saved.state)
