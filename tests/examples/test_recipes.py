"""A very small GPT in low precision: it learns as in float32, but for a little.

The real comparison, over seeds, is `python -m benchmarks recipes`.
"""

import jax
import pytest

from examples.gpt import Config, ModelConfig, load_data, train
from examples.runs import make_mesh

# Flax and Optax need JAX's own promotion.
pytestmark = pytest.mark.third_party

CONFIG = Config(
    steps=40,
    batch_size=16,
    warmup_steps=5,
    checkpoint_every=40,
    test_texts=128,
    model=ModelConfig(context=16, width=32, hidden=64, blocks=1, heads=2),
)


def trained(precision):
    """The training losses, and the loss on held-out texts."""
    one = make_mesh(devices=jax.devices()[:1])
    result, rows = train(CONFIG, precision, load_data(CONFIG), mesh=one)
    return [row.loss for row in rows], result.test_loss


@pytest.fixture(scope="module")
def full():
    return trained("float32")


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [
        pytest.param("current", 0.005, marks=pytest.mark.exhaustive),
        pytest.param("nvfp4", 0.015, marks=pytest.mark.exhaustive),
    ],
)
def test_it_learns_as_in_full_precision(full, recipe, limit):
    losses, final = trained(recipe)
    assert losses[-1] < 0.7 * losses[0]
    assert losses != full[0]  # something was quantized
    assert abs(final / full[1] - 1) < limit
