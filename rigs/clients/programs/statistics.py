"""OTT, tinygp and Dynamax: transport, processes, state spaces."""

import jax
import jax.numpy as jnp

from ..data import mean_square, normal
from ..record import client


@client("ott-jax", linear=True)
def ott_sinkhorn(key):
    """The Sinkhorn divergence between clouds of learned features."""
    from ott.geometry import pointcloud
    from ott.tools import sinkhorn_divergence

    keys = jax.random.split(key, 3)

    def loss(params, x, y):
        features = jnp.tanh(x @ params)
        value, _ = sinkhorn_divergence.sinkhorn_divergence(
            pointcloud.PointCloud, features, y, epsilon=0.5
        )
        return value, features

    return (
        loss,
        normal(keys[0], 4, 8) / 2,
        (normal(keys[1], 16, 4), normal(keys[2], 16, 8)),
    )


@client("ott-jax", note="Its one product is of a single output.")
def ott_soft_sort(key):
    """Ranks with a derivative."""
    from ott.tools import soft_sort

    keys = jax.random.split(key)

    def loss(params, x):
        scores = (x @ params)[:, 0]
        ranks = soft_sort.ranks(scores, epsilon=0.05)
        return mean_square(ranks - jnp.arange(16.0)) / 100, ranks

    return loss, normal(keys[0], 8, 1), (normal(keys[1], 16, 8),)


INDEFINITE = (
    "tinygp's own distance, L1, gives Matern's kernel a matrix that is not positive "
    "definite in two dimensions: -0.097 is its smallest eigenvalue in float32, which "
    "`diag=0.1` hardly mends; rounding weights and inputs by hand fails as well"
)


@client(
    "tinygp",
    linear=True,
    faults=dict.fromkeys(("current", "delayed", "mxfp8", "nvfp4"), INDEFINITE),
)
def tinygp_deep_kernel(key):
    """A Gaussian process on learned features."""
    import tinygp

    return deep_kernel(key, tinygp.kernels.Matern32())


@client("tinygp", linear=True)
def tinygp_euclidean_kernel(key):
    """The same with a distance that makes its matrix positive definite."""
    import tinygp

    distance = tinygp.kernels.distance.L2Distance()
    return deep_kernel(key, tinygp.kernels.Matern32(distance=distance))


def deep_kernel(key, stationary):
    """The log probability of a process by a kernel of learned features."""
    import tinygp

    keys = jax.random.split(key, 3)

    def loss(params, x):
        kernel = tinygp.transforms.Transform(
            lambda x: jnp.tanh(x @ params["w"]) @ params["v"],
            jnp.exp(params["amplitude"]) * stationary,
        )
        process = tinygp.GaussianProcess(kernel, x, diag=0.1)
        return -process.log_probability(jnp.sin(x[:, 0])) / x.shape[0], ()

    params = {
        "w": normal(keys[0], 4, 32) / 2,
        "v": normal(keys[1], 32, 2) / 6,
        "amplitude": jnp.float32(0.0),
    }
    return loss, params, (normal(keys[2], 24, 4),)


@client("dynamax")
def dynamax_kalman_filter(key):
    """The marginal likelihood of a linear Gaussian state space model."""
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    keys = jax.random.split(key)
    model = LinearGaussianSSM(state_dim=4, emission_dim=3)
    params, _ = model.initialize(keys[0])

    def loss(params, emissions):
        found = jax.vmap(lambda y: model.marginal_log_prob(params, y))(emissions)
        return -jnp.mean(found) / 12, found

    return loss, params, (normal(keys[1], 4, 12, 3),)
