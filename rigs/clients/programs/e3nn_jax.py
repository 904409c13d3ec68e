"""e3nn-jax: equivariant networks."""

import jax

from ..data import mean_square, normal
from ..record import client


@client(linear=True)
def e3nn_message_passing(key):
    """Spherical harmonics, tensor products and linear layers over irreps."""
    import e3nn_jax as e3nn
    import flax.linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, positions):
            edges = positions[:, None] - positions[None]
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", edges, True)
            messages = e3nn.tensor_product(x[:, None], harmonics)
            messages = e3nn.flax.Linear("8x0e + 8x1o")(messages)
            y = e3nn.sum(messages, axis=1) / positions.shape[0]
            y = e3nn.scalar_activation(
                e3nn.flax.Linear("16x0e + 8x1o")(y), [jax.nn.silu, None]
            )
            return e3nn.flax.Linear("0e")(e3nn.flax.Linear("8x0e + 4x1o")(y))

    keys = jax.random.split(key, 3)
    positions = normal(keys[0], 8, 3)
    x = e3nn.IrrepsArray("8x0e", normal(keys[1], 8, 8))
    model = Layer()

    def loss(params, x, positions):
        energy = model.apply(params, x, positions).array
        return mean_square(energy - 1), energy

    return loss, model.init(keys[2], x, positions), (x, positions)


@client(linear=True)
def e3nn_gate(key):
    """A gated nonlinearity between fully connected tensor products."""
    import e3nn_jax as e3nn

    keys = jax.random.split(key, 3)
    import haiku as hk

    def forward(x, y):
        z = e3nn.haiku.Linear("16x0e + 8x0e + 8x1o")(e3nn.tensor_product(x, y))
        z = e3nn.gate(z)
        return e3nn.haiku.Linear("4x0e + 2x1o")(z).array

    function = hk.without_apply_rng(hk.transform(forward))
    x = e3nn.IrrepsArray("8x0e + 8x1o", normal(keys[0], 16, 32))
    y = e3nn.IrrepsArray("0e + 1o", normal(keys[1], 16, 4))

    def loss(params, x, y):
        z = function.apply(params, x, y)
        return mean_square(z - 1), z

    return loss, function.init(keys[2], x, y), (x, y)
