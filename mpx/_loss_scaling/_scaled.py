"""`scaled`: a function whose result is multiplied by the scale."""

from collections.abc import Callable

from jaxtyping import PyTree

from .._errors import describe
from .._wraps import wraps
from ._base import AbstractLossScaling


def scaled(
    func: Callable[..., PyTree], scaling: AbstractLossScaling, has_aux: bool = False
) -> Callable[..., PyTree]:
    """Wraps a function to multiply its result by the loss scale.

    Args:
        func: A function that returns a value or a PyTree of values.
        scaling: The loss scaling to multiply by.
        has_aux: `func` returns `(value, aux)`, of which only `value` is scaled.

    Returns:
        The function; half-precision values are returned as float32, see
        `AbstractLossScaling.scale`.

    Raises:
        TypeError: `scaling` is not a loss scaling or `func` is not callable; or, at the
            call, `has_aux` is True and `func` did not return a pair.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> float(mpx.scaled(jnp.sum, mpx.StaticLossScaling(8.0))(jnp.ones(2)))
        16.0
    """
    if not isinstance(scaling, AbstractLossScaling):
        raise TypeError(
            "`scaling` of `mpx.scaled(func, scaling)` must be a loss scaling; got "
            f"{describe(scaling)}. Wrap a number: `mpx.StaticLossScaling(number)`."
        )
    if not callable(func):
        raise TypeError(
            "`func` of `mpx.scaled(func, scaling)` must be a function; got "
            f"{describe(func)}. To scale a value: `scaling.scale(value)`."
        )

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if not has_aux:
            return scaling.scale(func(*args, **kwargs))
        result = func(*args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "With `has_aux=True` the function passed to `mpx.scaled` must "
                f"return `(value, aux)`; got {describe(result)}."
            )
        return scaling.scale(result[0]), result[1]

    return wrapper
