"""What each of two processes names of a fault on one device of one of them.

Run as `python -m tests.tools.blame.two_processes INDEX ADDRESS`; prints JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

ROWS, WIDTH = 8, 16


def named(mesh, is_by_hand):
    """The report of a division by zero in the rows of the last device but one."""

    def layer(w, x, f):
        with jax.named_scope("plant"):
            return jnp.tanh(x @ w) / f

    def local(w, x, f):
        return jax.lax.scan(lambda h, w: (layer(w, h, f), None), x, w)[0]

    def loss(w, x, f):
        run = local
        if is_by_hand:
            specs = (P(), P("d"), P("d"))
            run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("d"))
        return jnp.mean(jnp.square(run(w, x, f).astype(jnp.float32)))

    def spread(x, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

    random = np.random.default_rng(0)
    w = spread(random.normal(size=(3, WIDTH, WIDTH)).astype(np.float32), P())
    x = spread(random.normal(size=(ROWS, WIDTH)).astype(np.float32), P("d"))
    f = np.ones((ROWS, 1), np.float32)
    f[-2] = 0
    scaling = jax.tree.map(lambda a: spread(np.asarray(a), P()), mpx.NoLossScaling())
    report = mpx.blame(mpx.autocast(loss), scaling)(w, x, spread(f, P("d")))
    first = report.first
    places = first.inside, first.devices, report.rows
    return [first.primitive, first.scope, *map(list, places), report.verdict.value]


def main() -> None:
    index, address = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(address, 2, index)
    mesh = jax.make_mesh((jax.device_count(),), ("d",), (AxisType.Auto,))
    print(json.dumps([named(mesh, is_by_hand) for is_by_hand in (False, True)]))


if __name__ == "__main__":
    main()
