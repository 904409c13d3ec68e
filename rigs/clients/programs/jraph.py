"""Jraph: networks on graphs."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels, normal
from ..record import client

NODES, EDGES = 24, 64


def graph(key):
    """A random graph of one component."""
    import jraph

    keys = jax.random.split(key, 4)
    return jraph.GraphsTuple(
        nodes=normal(keys[0], NODES, 16),
        edges=normal(keys[1], EDGES, 8),
        senders=labels(keys[2], EDGES, classes=NODES),
        receivers=labels(keys[3], EDGES, classes=NODES),
        n_node=jnp.array([NODES]),
        n_edge=jnp.array([EDGES]),
        globals=jnp.ones((1, 4)),
    )


@client(linear=True)
def jraph_graph_network(key):
    import haiku as hk
    import jraph

    keys = jax.random.split(key, 3)

    def update(size):
        def mlp(*xs):
            return hk.nets.MLP([32, size])(jnp.concatenate(xs, -1))

        return mlp

    def forward(graph):
        return jraph.GraphNetwork(
            lambda e, s, r, g: update(8)(e, s, r, g),
            lambda n, s, r, g: update(16)(n, s, r, g),
            lambda n, e, g: update(4)(n, e, g),
        )(graph)

    function = hk.without_apply_rng(hk.transform(forward))
    data = graph(keys[0])

    def loss(params, graph, y):
        out = function.apply(params, graph)
        return cross_entropy(out.nodes, y) + jnp.sum(out.globals**2), out

    return loss, function.init(keys[1], data), (data, labels(keys[2], 24, classes=16))


@client(linear=True)
def jraph_attention(key):
    """A convolution and an attention over neighbours, with weights of a user's own."""
    import jraph

    keys = jax.random.split(key, 5)
    params = {
        "in": normal(keys[0], 16, 32) / 4,
        "query": normal(keys[1], 32, 32) / 6,
        "logit": normal(keys[2], 64, 1) / 8,
        "out": normal(keys[3], 32, 8) / 6,
    }

    def loss(params, graph, y):
        graph = jraph.GraphConvolution(lambda n: n @ params["in"], add_self_edges=True)(
            graph
        )
        attend = jraph.GAT(
            lambda n: n @ params["query"],
            lambda s, r, e: jax.nn.leaky_relu(
                jnp.concatenate([s, r], -1) @ params["logit"]
            ),
        )
        logits = attend(graph).nodes @ params["out"]
        return cross_entropy(logits, y), logits

    data = graph(keys[4])._replace(edges=None)
    return loss, params, (data, labels(keys[4], NODES, classes=8))
