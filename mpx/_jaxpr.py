"""Reading jaxprs: facts about equations that more than one transform needs."""

from typing import Any

import jax


def is_plain_jit(equation: Any) -> bool:
    """Whether a jit equation says no more than "compile this".

    With shardings, layouts or donated inputs of its own, emitting its body in place
    would lose them.
    """
    params = equation.params
    shardings = (*params["in_shardings"], *params["out_shardings"])
    layouts = (*params["in_layouts"], *params["out_layouts"])
    return (
        not any(isinstance(s, jax.sharding.Sharding) for s in shardings)
        and all(layout is None for layout in layouts)
        and not any(params["donated_invars"])
    )
