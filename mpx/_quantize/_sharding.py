"""Products over a mesh of explicit axes, where types say how arrays are sharded.

Gradients of weights contract axes that are sharded, and blocks are cut and joined: for
neither have types a rule. Inside of a product the axes are automatic, where the
compiler finds shardings; only the result's is said.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


def in_automatic_axes(
    f: Callable[..., Array],
    plain: Callable[[], Array],
    out_sharding: object,
    besides: object,
    *operands: Array,
) -> Array:
    """Calls `f(besides, *operands)` without types of shardings inside.

    Args:
        f: The quantized product.
        plain: The same product of half precision.
        out_sharding: The sharding of the result; None: what `plain` has.
        besides: What it gets beside the operands: any tree of arrays.
        *operands: The operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # nobody set one, and the types of the operands say it
        meshes = (jax.typeof(x).sharding.mesh for x in operands)
        said = next((one for one in meshes if one.explicit_axes), None)
        if said is not None:
            with jax.sharding.use_abstract_mesh(said):
                return in_automatic_axes(f, plain, out_sharding, besides, *operands)
    if not mesh.explicit_axes:
        return f(besides, *operands)
    if out_sharding is None:
        # Not `eval_shape`, which says None where types leave some axes open.
        found = jax.make_jaxpr(plain)().out_avals[0].sharding
        if found.mesh.empty:  # the operands are of no mesh
            return f(besides, *operands)
        out_sharding = found
    auto_axes: Any = jax.sharding.auto_axes
    return auto_axes(f, out_sharding=out_sharding)(besides, *operands)
