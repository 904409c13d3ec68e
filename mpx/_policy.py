"""Policies: which dtype parameters, computation and outputs have.

A policy is three dtypes and nothing else; which *operation* runs in which of them is
the business of autocast's rules. Names and the text grammar are JMP's, so that a
policy can stand in a configuration file or on a command line.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ._cast import cast_leaves
from ._dtypes import float_dtype
from ._typing import DTypeLike

_KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, of computation and of outputs.

    Policies are immutable and hashable; equal dtypes make equal policies, however they
    were spelled. `str(policy)` is a text that `get_policy` reads back.

    Args:
        param_dtype: The dtype of parameters, a floating dtype or its name.
        compute_dtype: The dtype of computation.
        output_dtype: The dtype of outputs.
        grad_dtype: Reserved; leave it out.
        reduce_dtype: Reserved; leave it out.
        gather_dtype: Reserved; leave it out.

    Raises:
        ValueError: A dtype does not exist, or is float64 and not enabled in JAX.
        TypeError: A dtype is not floating.
        NotImplementedError: A reserved argument was given.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> policy = mpx.Policy("float32", "bfloat16", "float32")
        >>> policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype
        dtype(bfloat16)
        >>> str(policy)
        'params=float32,compute=bfloat16,output=float32'
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    # Arguments without a field: `dataclasses.fields` are JMP's three.
    grad_dtype: dataclasses.InitVar[None] = dataclasses.field(
        default=None, kw_only=True
    )
    reduce_dtype: dataclasses.InitVar[None] = dataclasses.field(
        default=None, kw_only=True
    )
    gather_dtype: dataclasses.InitVar[None] = dataclasses.field(
        default=None, kw_only=True
    )

    def __post_init__(self, *reserved: None) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = float_dtype(getattr(self, name), f"`{name}` of `mpx.Policy`")
            object.__setattr__(self, name, dtype)
        names = ("grad_dtype", "reduce_dtype", "gather_dtype")
        for name, value in zip(names, reserved, strict=True):
            if value is not None:
                raise NotImplementedError(
                    f"`{name}` of `mpx.Policy` is reserved and does nothing yet; leave "
                    "it out. Gradients of float32 parameters are float32."
                )

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
        """A copy with another dtype for outputs.

        Args:
            output_dtype: The dtype of outputs, a floating dtype or its name.

        Returns:
            The new policy; this one stays as it is.

        Raises:
            ValueError: The dtype does not exist, or is float64 and not enabled in JAX.
            TypeError: The dtype is not floating.
        """
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        return (
            f"params={np.dtype(self.param_dtype).name},"
            f"compute={np.dtype(self.compute_dtype).name},"
            f"output={np.dtype(self.output_dtype).name}"
        )


def get_policy(text: str) -> Policy:
    """Reads a policy from text, in JMP's grammar.

    Either one dtype for everything ("float16", "half", "full"), or a list of
    `key=dtype` with the keys `params` (`p`), `compute` (`c`) and `output` (`o`):

    - what is not given: parameters are float32, computation follows the parameters,
      outputs follow the computation;
    - dtypes: `half`, `full`, `f16`, `bf16`, `f32`, `f64` and every floating dtype's
      name.

    `half` is `half_precision_datatype()` at the time of the call.

    Args:
        text: The policy as text, such as "params=float32,compute=half".

    Returns:
        The policy, whose `str` is the text in full.

    Raises:
        ValueError: A key is unknown or repeated, a dtype does not exist, or is float64
            and not enabled in JAX.
        TypeError: `text` is not text, or a dtype is not floating.

    Examples:
        >>> import mpx
        >>> str(mpx.get_policy("c=f16"))
        'params=float32,compute=float16,output=float16'
    """
    call = "`mpx.get_policy(text)`"
    if not isinstance(text, str):
        raise TypeError(
            f"{call} needs text such as 'params=float32,compute=float16'; got "
            f"{text!r}. "
            "Build a `mpx.Policy` from dtypes."
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
                f"{call} takes the keys params, compute and output (p, c, o), each "
                f"once; got the {problem} key {key!r} in {text!r}."
            )
        given[field] = float_dtype(value, f"{call} for {key!r}")
    param = given.get("param_dtype", jnp.dtype("float32"))
    compute = given.get("compute_dtype", param)
    return Policy(param, compute, given.get("output_dtype", compute))
