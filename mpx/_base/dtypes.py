"""Names and facts of dtypes, and the half precision datatype of explicit functions.

*Half precision* is float16 or bfloat16, *full precision* float32, *low precision* 8
bits and fewer. Only this module converts strings to dtypes.

The half precision datatype has a default for the whole process
(`set_half_precision_datatype`, like `jax.config.update`) and a value for one thread
(`half_precision`). Both are part of the cache key of `jax.jit`: a change retraces
compiled functions.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .jax_compat import set_for_all_threads
from .typing import DTypeLike

# Python floats: import makes no array, and they do not promote half-precision arrays.
FLOAT16_MAX: float = float(ml_dtypes.finfo(np.float16).max)
"""The largest finite float16, $(2 - 2^{-10}) \\cdot 2^{15} = 65504$, a Python float."""
BFLOAT16_MAX: float = float(ml_dtypes.finfo(jnp.bfloat16).max)
"""The largest finite bfloat16, $(2 - 2^{-7}) \\cdot 2^{127}$, a Python float."""

HALF = (np.dtype(np.float16), np.dtype(jnp.bfloat16))

# JMP's short names; NumPy reads "f16" as a 16-byte float.
_SHORT_NAMES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "full": "float32",
}

# A cast to one of these would drop the scale without which the values are meaningless
# (float8_e8m0fnu is itself a scale; 4-bit formats turn NaN into a number).
_NOT_A_TARGET = ("float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")

_half_precision = jax.make_user_context(default_value="float16")


def float_dtype(dtype: DTypeLike, caller: str) -> np.dtype:
    """Reads a floating dtype that a user gave, by name or as a dtype.

    Args:
        dtype: "float16", "f16", "bf16", "half", `jnp.float16`, ...
        caller: The public call to name in an error.

    Returns:
        The dtype, which for "half" is the present `half_precision_datatype()`.

    Raises:
        ValueError: No such dtype exists, or it is float64 and that is not enabled.
        TypeError: It exists and is not a floating dtype that values can be cast to.
    """
    if isinstance(dtype, str) and dtype == "half":
        return half_precision_datatype()
    name = _SHORT_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        if name is None:  # numpy reads None as float64
            raise TypeError
        found = jnp.dtype(name)
    except TypeError:
        raise ValueError(
            f"{caller} needs a dtype; got {dtype!r}. Use one of "
            f"{', '.join(float_dtype_names())} (short: {', '.join(_SHORT_NAMES)}, "
            "half)."
        ) from None
    if not jnp.issubdtype(found, jnp.floating) or found.name in _NOT_A_TARGET:
        raise TypeError(
            f"{caller} needs a floating dtype, one of "
            f"{', '.join(float_dtype_names())}; got {found.name}. Cast other leaves "
            "with `jax.tree.map`."
        )
    if found == np.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"{caller} got float64, but JAX would silently make it float32. Enable "
            'it first: `jax.config.update("jax_enable_x64", True)`.'
        )
    return found


def float_dtype_names() -> list[str]:
    """Lists the floating dtypes that values can be cast to."""
    wide = ["float64", "float32", "bfloat16", "float16"]
    low = sorted(name for name in dir(jnp) if name.startswith("float8_"))
    return wide + [name for name in low if name not in _NOT_A_TARGET]


def is_half(dtype: np.dtype) -> bool:
    """Returns whether a dtype is float16 or bfloat16."""
    return dtype in HALF


def full_precision_of(dtype: np.dtype) -> np.dtype:
    """Returns the dtype to apply scales in: at least float32, complex for complex."""
    is_wide = dtype == np.float64 or jnp.issubdtype(dtype, jnp.complexfloating)
    return dtype if is_wide else np.dtype(np.float32)


def dtype_of_gradient(dtype: np.dtype, asked: np.dtype | None) -> np.dtype:
    """Returns the dtype of a weight's gradient; complex ones keep theirs."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return full_precision_of(dtype) if asked is None or is_complex else asked


def half_precision_datatype() -> np.dtype:
    """Returns the dtype that "half precision" currently means.

    This is the value of the innermost `half_precision` of this thread, or else the
    process's default: float16 unless `set_half_precision_datatype` changed it.

    Returns:
        `jnp.dtype("float16")` or `jnp.dtype("bfloat16")`.

    Examples:
        >>> import mpx
        >>> mpx.half_precision_datatype()
        dtype('float16')
    """
    return jnp.dtype(_half_precision.value)


def set_half_precision_datatype(datatype: DTypeLike) -> None:
    """Sets the process's default half precision datatype.

    It applies to every thread outside its own `half_precision`. Functions that were
    compiled before are traced again. This is the only global setting of mpx; it exists
    because the MPX paper has it.

    Args:
        datatype: "float16", "bfloat16" or the dtype.

    Raises:
        ValueError: It is anything else.
        RuntimeError: JAX is older than 0.10.1, which does not support it.

    Examples:
        >>> import mpx
        >>> mpx.set_half_precision_datatype("bfloat16")
        >>> mpx.half_precision_datatype()
        dtype(bfloat16)
        >>> mpx.set_half_precision_datatype("float16")
    """
    name = _half_name(datatype, "`mpx.set_half_precision_datatype(datatype)`")
    set_for_all_threads(_half_precision, name)


@contextlib.contextmanager
def half_precision(dtype: DTypeLike) -> Iterator[None]:
    """Sets the half precision datatype for one thread and the body of a `with`.

    Nests; the inner one wins. Other threads never see it. It acts where code is
    *traced*: inside a jitted function it applies to the operations traced in its body;
    around a call of a jitted function it selects another compiled version.

    Args:
        dtype: "float16", "bfloat16" or the dtype.

    Raises:
        ValueError: It is anything else.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> with mpx.half_precision("bfloat16"):
        ...     mpx.cast_to_half_precision(jnp.ones(2)).dtype
        dtype(bfloat16)
    """
    with _half_precision(_half_name(dtype, "`mpx.half_precision(dtype)`")):
        yield


def _half_name(dtype: DTypeLike, caller: str) -> str:
    try:
        found = float_dtype(dtype, caller)
    except (TypeError, ValueError):
        found = None
    if found is None or not is_half(found):
        raise ValueError(
            f"{caller} needs float16 or bfloat16; got {dtype!r}. For full precision "
            "call the function without mpx, or set `use_mixed_precision=False`."
        )
    return found.name
