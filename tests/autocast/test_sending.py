"""What autocast made goes to other processes: Ray, Dask, joblib, submitit."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In a process of its own: the types that tests check cannot be pickled.
PROGRAM = """
import copy, pickle
import cloudpickle
import jax.numpy as jnp
import mpx


def made():
    def loss(weights, x):
        return jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])
    return loss


rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, parameter="*"))
weights, x = [jnp.ones((16, 16)), jnp.ones((16, 4))], jnp.ones((8, 16))
for options in ({}, {"recipe": mpx.Float8CurrentScaling()}, {"rules": rules}):
    func = mpx.autocast(made(), **options)
    expected, scaling = func(weights, x), mpx.init_scaling(func, weights, x)
    for one in (func, mpx.inference(func, scaling), copy.deepcopy(func)):
        assert pickle.loads(cloudpickle.dumps(one))(weights, x) == expected
    gradient = pickle.loads(cloudpickle.dumps(mpx.filter_grad(func, scaling)))
    assert gradient(weights, x).finite
"""


@pytest.mark.slow
def test_what_autocast_made_is_pickled_by_value():
    """Without what has been rewritten, which is found again where it is needed."""
    pytest.importorskip("cloudpickle")
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
