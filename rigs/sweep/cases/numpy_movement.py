"""Functions of `jax.numpy` that move data: shapes, pieces, reads and writes."""

import jax.numpy as jnp
import numpy as np

from rigs.sweep.cases.table import Table

_TABLE = Table("numpy", jnp)
_add, _call, _each = _TABLE.add, _TABLE.call, _TABLE.each
_MANY = np.where(np.arange(5000) % 1000 == 0, np.arange(5000) // 1000, 0)
_ORDER = np.random.default_rng(0).permutation(16)
_ROWS = np.random.default_rng(1).integers(0, 4, (64, 16))

_add("ravel transpose matrix_transpose squeeze flip fliplr flipud", "integers")
_add("atleast_1d atleast_2d atleast_3d rot90", "integers")
_call("permute_dims", lambda a: jnp.permute_dims(a, (1, 0)), "integers")
_call("reshape", lambda a: jnp.reshape(a, (16, 64)), "integers")
_call("swapaxes", lambda a: jnp.swapaxes(a, 0, 1), "integers")
_call("moveaxis", lambda a: jnp.moveaxis(a, 0, 1), "integers")
_call("rollaxis", lambda a: jnp.rollaxis(a, 1), "integers")
_call("roll", lambda a: jnp.roll(a, 3, -1), "integers")
_call("roll", lambda a: a - jnp.roll(a, 1, -1), "cancelling")
_call("expand_dims", lambda a: jnp.expand_dims(a, 1), "integers")
_call("broadcast_to", lambda a: jnp.broadcast_to(a[:1], (4096, 16)), "reads integers")
_call(
    "broadcast_arrays",
    lambda a: jnp.broadcast_arrays(a[0], jnp.zeros((4096, 16))),
    "reads",
)
_call("tile", lambda a: jnp.tile(a, (600, 1)), "reads")
_call("tile", lambda a: jnp.tile(a, (1, 2)), "integers")
_call("repeat", lambda a: jnp.repeat(a, 600, axis=0), "reads")
_call(
    "repeat",
    lambda a: jnp.repeat(
        a, jnp.array([4090, 1, 1, 1, 1, 1, 1, 0]), axis=0, total_repeat_length=4096
    ),
    "reads",
    variant="counts",
)
_call("resize", lambda a: jnp.resize(a, (4096, 16)), "reads")
for _mode in ("edge", "constant", "mean", "maximum"):
    _call(
        "pad",
        lambda a, mode=_mode: jnp.pad(a[:2], ((0, 4000), (0, 0)), mode),
        "reads",
        variant=_mode,
    )
for _mode in ("wrap", "reflect", "symmetric"):  # one operation for each turn
    _call(
        "pad",
        lambda a, mode=_mode: jnp.pad(a[:2], ((0, 60), (0, 0)), mode),
        "reads",
        variant=_mode,
    )
_call(
    "pad",
    lambda a: jnp.pad(a[:2], ((0, 800), (0, 0)), "wrap"),
    "reads",
    variant="wrap_often",
)
for _mode in ("linear_ramp", "median", "minimum"):
    _call("pad", lambda a, mode=_mode: jnp.pad(a, 2, mode), "cancelling", variant=_mode)
_each(
    "concatenate concat stack vstack hstack dstack column_stack",
    lambda f, a, b: f([a, b]),
    "integers cancelling",
    arity=2,
)
_call("append", lambda a, b: jnp.append(a, b, -1), "integers", arity=2)
_call("block", lambda a, b: jnp.block([[a, b], [b, a]]), "integers", arity=2)
_call("insert", lambda a: jnp.insert(a, 3, 0.1, axis=1), "integers")
_call("delete", lambda a: jnp.delete(a, 3, axis=1), "integers")
_call("split", lambda a: jnp.split(a, 2, -1), "integers")
_call("array_split", lambda a: jnp.array_split(a, 3, -1), "integers")
_call("hsplit", lambda a: jnp.hsplit(a, 2), "integers")
_call("vsplit", lambda a: jnp.vsplit(a, 2), "integers")
_call("dsplit", lambda a: jnp.dsplit(a.reshape(8, 8, 16), 2), "integers")
_call("unstack", lambda a: jnp.unstack(a[:4]), "integers")
_call("meshgrid", lambda a, b: jnp.meshgrid(a[0], b[0]), "integers", arity=2)

_call("take", lambda a: jnp.take(a, _MANY, axis=0), "reads")
_call("take", lambda a: jnp.take(a, _ORDER, axis=1), "integers")
_call("take", lambda a: jnp.take(a, _MANY, 0, mode="clip"), "reads", variant="clip")
_call("take", lambda a: jnp.tanh(a[_MANY]), "reads", variant="index")
_call("take", lambda a: jnp.tanh(a * 2)[_MANY] * 0.5, "reads", variant="between")
_call(
    "take_along_axis",
    lambda a: jnp.take_along_axis(a[:4], jnp.asarray(_MANY)[:, None], 0),
    "reads",
)
_call("take_along_axis", lambda a: jnp.take_along_axis(a, _ROWS, 1), "integers")
_call(
    "choose",
    lambda a, b: jnp.choose(_ROWS % 2, [a, b], mode="clip"),
    "integers",
    arity=2,
)
_call("compress", lambda a: jnp.compress(_ORDER > 7, a, axis=1, size=8), "integers")
_call("extract", lambda a: jnp.extract(_ROWS > 1, a, size=512), "integers")
_call("put", lambda a, b: jnp.put(a, _ORDER, b[0], inplace=False), "integers", arity=2)
_call(
    "put_along_axis",
    lambda a, b: jnp.put_along_axis(a, _ROWS[:, :1], b[:, :1], 1, inplace=False),
    "integers",
    arity=2,
)
_call(
    "place",
    lambda a, b: jnp.place(a, _ROWS > 1, b[0], inplace=False),
    "integers",
    arity=2,
)
_call("fill_diagonal", lambda a: jnp.fill_diagonal(a, 0.1, inplace=False), "integers")
_call("diag", lambda a: jnp.diag(a[0]), "integers")
_call("diagonal", lambda a: jnp.diagonal(a), "integers")
_call("diagflat", lambda a: jnp.diagflat(a[0]), "integers")
_add("triu tril", "integers")
_add("trace", "cancelling plain")
_call("tri", lambda a: a * jnp.tri(64, 16), "integers")
_call("kron", lambda a, b: jnp.kron(a[:4], b[:2]), "plain cancelling", arity=2)
_call("outer", lambda a, b: jnp.outer(a[0], b[0]), "plain integers", arity=2)
_call("vander", lambda a: jnp.vander(a[0], 4), "near plain")
_call("linspace", lambda a, b: jnp.linspace(a[0], b[0], 9), "cancelling", arity=2)
_call("logspace", lambda a, b: jnp.logspace(a[0], b[0], 9), "near plain", arity=2)
_call(
    "geomspace",
    lambda a, b: jnp.geomspace(a[0], b[0], 9),
    "near wide",
    arity=2,
    domain="positive",
)
_call("full_like", lambda a: jnp.full_like(a, a[0, 0]), "integers plain")
_call("full", lambda a: jnp.full((64, 16), a[0]), "integers")
_call("fromfunction", lambda a: jnp.fromfunction(lambda i: a[0] * i, (16,)), "plain")
_call("ix_", lambda a: a[jnp.ix_(_ORDER[:4], _ORDER)], "integers")
_call("unwrap", lambda a: jnp.unwrap(4 * a), "plain")
_call("sort_complex", lambda a: jnp.sort_complex(a[0]), "cancelling")

CASES = _TABLE.cases
