"""What a policy of `jax.checkpoint` saves of quantized products.

A policy is asked about each operation. Of a quantized product it would save what is in
it: the sum before it is multiplied with the scales, once for each device that the
program may run on, zeros for the others. XLA takes the scales into a product only if
nothing else reads it, so the multiplication became a kernel of its own in each
direction: 10 of the 100 GB that a step of a GPT with
`dots_with_no_batch_dims_saveable` moves, and in a scan the zeros were stacked
(jax 0.10.2, compiled for sm_90, November 2026). So the policy is asked about the
product as it was written, and its result gets a name, which is what is saved.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import Saveable, checkpoint_name
from jax.extend.core import JaxprEqn, Primitive

from .._program import avals
from .._typing import AnyArray, Aval

Policy = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Saving:
    """A policy that saves what the given one does, and products under a name.

    What is in a product is read from what was saved of it, and so JAX keeps nothing of
    it, whatever the policy says about that.

    Attributes:
        policy: The policy that was given.
        depth: How many others it stands in; each saves what it says of its own.
        keeps_wide: Whether no bfloat16 is saved, but float32 under a name: see `_wide`.
    """

    policy: Policy
    depth: int = 0
    keeps_wide: bool = False

    def __call__(self, primitive: Primitive, *operands: Aval, **params: object) -> Any:
        """Whether the result of an operation is saved."""
        if primitive.name == "name" and params["name"] == self._name:
            return True
        dtype = params.get("new_dtype", params.get("preferred_element_type"))
        if self.keeps_wide and dtype == jnp.bfloat16:
            return False
        return self.policy(primitive, *operands, **params)

    @property
    def _name(self) -> str:
        return f"a quantized product that the policy {self.depth} saves"

    def named(self, equation: JaxprEqn, result: AnyArray) -> AnyArray:
        """The result of a product, to be saved if the policy says so.

        Args:
            equation: The product as it was written.
            result: Its result.
        """
        decision = self.policy(
            equation.primitive, *avals(equation.invars), **equation.params
        )
        # Others say that it is sent to the host's memory, which they do as ever.
        is_saved = decision is True or decision is Saveable
        return checkpoint_name(result, self._name) if is_saved else result
