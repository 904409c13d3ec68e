"""What several tests of autocast are run on."""

import jax
import pytest


@pytest.fixture
def inputs(getkey):
    """A weight and a batch."""
    return jax.random.normal(getkey(), (8, 8)) / 3, jax.random.normal(getkey(), (4, 8))
