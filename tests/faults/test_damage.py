"""A damaged checkpoint is an error that names the file, or is read bit for bit."""

import gc
import itertools
import sys
import time

import jax
import numpy as np
import pytest

from examples.runs.digest import digests
from tests.helpers import slow_but

from . import damage

# Flax and Optax need JAX's own promotion.
pytestmark = pytest.mark.third_party


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return damage.Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def late_failures(monkeypatch):
    """Reads that Orbax leaves behind when one of them fails, and does not wait for."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    yield
    time.sleep(0.5)
    gc.collect()


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


def test_the_check_sees_silent_damage():
    outcome = damage.Outcome("state/weight/0.0", None, is_intact=False)
    assert outcome.is_silent
    assert not damage.Outcome("state/weight/0.0", "it is damaged", True).is_named
    assert not damage.same({"a": np.float32(0.0)}, {"a": np.float32(-0.0)})


def test_a_digest_is_of_the_bits_and_not_of_the_layout():
    x = jax.random.normal(jax.random.key(0), (8, 24))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    spec = jax.sharding.PartitionSpec("a", "b")
    tree = {
        "x": x,
        "half": x.astype("bfloat16"),
        "eight": x.astype("float8_e4m3fn"),
        "flags": x > 0,
        "count": np.uint32(7),
        "empty": x[:0],
    }
    divided = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    plain = digests(tree)
    assert digests({**tree, "x": divided}) == plain
    changed = {
        "x": x.at[3, 5].set(-x[3, 5]),
        "half": tree["half"][::-1],  # the same numbers elsewhere
        "eight": tree["eight"].T.reshape(8, 24),
        "flags": ~tree["flags"],
        "count": np.uint32(8),
    }
    found = digests({**tree, **changed})
    assert {name for name in plain if plain[name] != found[name]} == set(changed)


@pytest.mark.parametrize("devices", slow_but([], [4, 1]))
def test_values_are_equal_on_another_number_of_devices(saved, devices):
    """Saved over eight devices; also back to eight again."""
    other = damage.Saved(saved.folder.parent / f"on-{devices}", devices)
    fewer, _ = _restored(saved, other.state)
    assert all(len(x.sharding.device_set) == devices for x in jax.tree.leaves(fewer))
    assert damage.same(fewer, saved.state)
    again, _ = _restored(other, saved.state)
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(again))
    assert damage.same(again, saved.state)


def _restored(saved, like):
    from examples.runs.checkpoint import Checkpoints

    with Checkpoints(saved.folder, damage.CONFIG, "delayed") as checkpoints:
        return checkpoints.restore(like)
