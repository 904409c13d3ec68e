"""Policies: the dtypes of parameters, computation and outputs.

A policy has only dtypes; autocast's rules decide the precision of an *operation*. Names
and the text grammar are JMP's, so a policy can be written in a configuration file or on
a command line. Three more dtypes are for the gradients that a step returns and for
communication between devices.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._base.dtypes import float_dtype
from .._base.typing import DTypeLike
from ._cast import cast_leaves

_KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    "grad": "grad_dtype",
    "reduce": "reduce_dtype",
    "gather": "gather_dtype",
}
_OPTIONAL = ("grad_dtype", "reduce_dtype", "gather_dtype")


@dataclasses.dataclass(frozen=True)
class Wire:
    """The dtypes of a training step's communication between devices.

    Attributes:
        reduce_dtype: The dtype in which gradients are summed over devices.
        gather_dtype: The dtype in which sharded weights are communicated; None: the
            compute dtype, or the one that a product quantizes to.
        is_explicit: Whether the dtype of sums was set by the user. If so, it is an
            error if it cannot be used.
        is_alone: Whether each device runs the traced function alone, with separate
            amaxes.
    """

    reduce_dtype: np.dtype
    gather_dtype: np.dtype | None = None
    is_explicit: bool = False
    is_alone: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Policy:
    """The dtypes of parameters, computation, outputs, gradients and communication.

    Policies are immutable and hashable; equal dtypes make equal policies, however they
    are spelled. `get_policy` reads `str(policy)` back.

    The last three are read by the gradient functions (`mpx.filter_grad(..., policy=)`),
    in the explicit style, for autocast functions and for recipes. On one device there
    is no communication, so only `grad_dtype` matters.

    Args:
        param_dtype: The dtype of parameters, a floating dtype or its name.
        compute_dtype: The dtype of computation.
        output_dtype: The dtype of outputs.
        grad_dtype: The dtype in which gradients are returned, and summed over
            micro-batches: float32 (the default; float64 for float64 weights), float64
            or bfloat16. It must have the range of float32, because gradients that
            overflow it would become infinite after the step was found finite.
        reduce_dtype: The dtype in which gradients are summed over devices. By default
            float32 wherever the program shows that there are several: its arrays are on
            a mesh, one is set (`jax.set_mesh`), or `jax.shard_map` is active.
            Convolutions are excluded, because float32 results make them slow.
        gather_dtype: The dtype in which sharded weights are communicated to where they
            are used. By default the compute dtype, and 8 bits under current and delayed
            scaling. float32 communicates them unchanged; it cannot be narrower than the
            compute dtype.

    Raises:
        ValueError: A dtype does not exist, is float64 and not enabled in JAX, or is not
            allowed for gradients or communicated weights.
        TypeError: A dtype is not floating.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> policy = mpx.Policy("float32", "bfloat16", "float32")
        >>> policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype
        dtype(bfloat16)
        >>> str(policy)
        'params=float32,compute=bfloat16,output=float32'
        >>> str(mpx.Policy("float32", "half", "float32", reduce_dtype="float32"))
        'params=float32,compute=float16,output=float32,reduce=float32'
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    # Arguments without a field: `dataclasses.fields` are JMP's three.
    grad_dtype: dataclasses.InitVar[DTypeLike | None] = dataclasses.field(
        default=None, kw_only=True
    )
    reduce_dtype: dataclasses.InitVar[DTypeLike | None] = dataclasses.field(
        default=None, kw_only=True
    )
    gather_dtype: dataclasses.InitVar[DTypeLike | None] = dataclasses.field(
        default=None, kw_only=True
    )

    def __post_init__(self, *travelling: DTypeLike | None) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = float_dtype(getattr(self, name), f"`{name}` of `mpx.Policy`")
            object.__setattr__(self, name, dtype)
        for name, value in zip(_OPTIONAL, travelling, strict=True):
            dtype = None
            if value is not None:
                dtype = float_dtype(value, f"`{name}` of `mpx.Policy`")
                _refuse_small(name, dtype, np.dtype(self.compute_dtype))
            object.__setattr__(self, name, dtype)

    @property
    def _grad_dtype(self) -> np.dtype | None:
        """The dtype of returned gradients; None: full precision."""
        return getattr(self, "grad_dtype", None)

    @property
    def _wire(self) -> Wire | None:
        """The dtypes of communication; None if none is set."""
        reduce_dtype = getattr(self, "reduce_dtype", None)
        gather_dtype = getattr(self, "gather_dtype", None)
        if reduce_dtype is None and gather_dtype is None:
            return None
        summed = reduce_dtype or np.dtype(np.float32)
        return Wire(summed, gather_dtype, reduce_dtype is not None)

    @property
    def _dtypes(self) -> tuple[Any, ...]:
        """All six dtypes."""
        names = (field.name for field in dataclasses.fields(self))
        return tuple(getattr(self, name) for name in (*names, *_OPTIONAL))

    def __eq__(self, other: object) -> bool:
        """Returns whether another policy has the same dtypes."""
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._dtypes == getattr(other, "_dtypes", None)

    def __hash__(self) -> int:
        """Returns a hash of the dtypes."""
        return hash(self._dtypes)

    def __repr__(self) -> str:
        """Returns the policy as Python code."""
        names = [field.name for field in dataclasses.fields(self)]
        names += [name for name in _OPTIONAL if getattr(self, name) is not None]
        fields = (f"{name}={np.dtype(getattr(self, name)).name!r}" for name in names)
        return f"Policy({', '.join(fields)})"

    def cast_to_param(self, x: PyTree) -> PyTree:
        """Casts float leaves to the dtype of parameters; see `cast_tree`."""
        return cast_leaves(x, np.dtype(self.param_dtype), None)

    def cast_to_compute(self, x: PyTree) -> PyTree:
        """Casts float leaves to the dtype of computation; see `cast_tree`."""
        return cast_leaves(x, np.dtype(self.compute_dtype), None)

    def cast_to_output(self, x: PyTree) -> PyTree:
        """Casts float leaves to the dtype of outputs; see `cast_tree`."""
        return cast_leaves(x, np.dtype(self.output_dtype), None)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns a copy with another dtype for outputs.

        Args:
            output_dtype: The dtype of outputs, a floating dtype or its name.

        Returns:
            The new policy; this one is unchanged.

        Raises:
            ValueError: The dtype does not exist, or is float64 and not enabled in JAX.
            TypeError: The dtype is not floating.
        """
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        keys = ("params", "compute", "output", "grad", "reduce", "gather")
        return ",".join(
            f"{key}={np.dtype(dtype).name}"
            for key, dtype in zip(keys, self._dtypes, strict=True)
            if dtype is not None
        )


def _refuse_small(name: str, dtype: np.dtype, compute: np.dtype) -> None:
    """Raises if gradients or weights cannot have or be sent in this dtype."""
    finfo = jnp.finfo(dtype)
    if name == "grad_dtype" and finfo.maxexp < jnp.finfo(jnp.float32).maxexp:
        raise ValueError(
            "`grad_dtype` of `mpx.Policy` must have the range of float32, because "
            f"gradients are unscaled; got {dtype.name}. Use float32 or bfloat16."
        )
    if name != "grad_dtype" and dtype not in (compute, np.dtype(np.float32)):
        raise ValueError(
            f"`{name}` of `mpx.Policy` must be the compute dtype, {compute.name}, or "
            f"float32; got {dtype.name}. Gradients are not summed in 8 bits."
        )


def get_policy(text: str) -> Policy:
    """Reads a policy from text, in JMP's grammar.

    The text is either one dtype for everything ("float16", "half", "full"), or a list
    of `key=dtype` with the keys `params` (`p`), `compute` (`c`) and `output` (`o`), and
    with `grad`, `reduce` and `gather`, for several devices:

    - defaults: parameters are float32, computation follows the parameters, outputs
      follow the computation;
    - dtypes: `half`, `full`, `f16`, `bf16`, `f32`, `f64` and every floating dtype's
      name.

    `half` is `half_precision_datatype()` at the time of the call.

    Args:
        text: The policy as text, such as "params=float32,compute=half".

    Returns:
        The policy; its `str` is the complete text.

    Raises:
        ValueError: A key is unknown or repeated, a dtype does not exist, or is float64
            and not enabled in JAX.
        TypeError: `text` is not a string, or a dtype is not floating.

    Examples:
        >>> import mpx
        >>> str(mpx.get_policy("c=f16"))
        'params=float32,compute=float16,output=float16'
    """
    call = "`mpx.get_policy(text)`"
    if not isinstance(text, str):
        raise TypeError(
            f"{call} needs a string such as 'params=float32,compute=float16'; got "
            f"{text!r}. For dtypes use `mpx.Policy`."
        )
    if "=" not in text:
        dtype = float_dtype(text.strip(), call)
        return Policy(dtype, dtype, dtype)
    given: dict[str, np.dtype] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        field = _KEYS.get(key)
        if field is None or field in given:
            problem = "unknown" if field is None else "repeated"
            raise ValueError(
                f"{call} allows the keys params, compute and output (p, c, o), grad, "
                f"reduce and gather, each once; got the {problem} key {key!r} in "
                f"{text!r}."
            )
        given[field] = float_dtype(value, f"{call} for {key!r}")
    param = given.get("param_dtype", jnp.dtype("float32"))
    compute = given.get("compute_dtype", param)
    travelling = {name: given[name] for name in _OPTIONAL if name in given}
    return Policy(param, compute, given.get("output_dtype", compute), **travelling)
