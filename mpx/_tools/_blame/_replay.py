"""A step as a program that can be run again: the gradient for given arrays."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..._autocast import taking_notes
from ..._base.errors import describe
from ..._base.tree import path_text
from ..._base.typing import AnyArray
from ..._loss_scaling import AbstractLossScaling
from ..._program import Call
from ..._step import GradientResult
from ._blame_report import badness_of
from ._record import AS_WRITTEN, Runs
from ._search import Cause, Search

LOSS = "the loss"

Gradient = Callable[..., GradientResult]


@dataclasses.dataclass(frozen=True)
class Replay:
    """A step as a program.

    Attributes:
        jaxpr: The program.
        inputs: The arrays of its inputs.
        paths: The path of each input in `(scaling, args, kwargs)`.
        places: The name of each result: the loss, then the paths of gradients.
    """

    jaxpr: ClosedJaxpr
    inputs: tuple[AnyArray, ...]
    paths: tuple[KeyPath, ...]
    places: tuple[str, ...]

    def bad_places(self) -> frozenset[int]:
        """Returns the bad results, by one run of the compiled program."""
        return frozenset(int(i) for i in np.flatnonzero(self.bits(self.inputs)))

    def bits(self, inputs: Sequence[AnyArray]) -> np.ndarray:
        """Returns whether each result is bad, with these inputs."""
        return np.asarray(self._compiled(*inputs))

    @functools.cached_property
    def _compiled(self) -> Callable[..., AnyArray]:
        program = jaxpr_as_fun(self.jaxpr)

        @jax.jit
        def bits(*inputs: AnyArray) -> AnyArray:
            return jnp.stack([badness_of(x) for x in program(*inputs)])

        return bits

    def causes(self, concern: frozenset[int], above: float | None) -> list[Cause]:
        """Returns the causes of these bad results, the first one first."""
        # Some results are bad only because XLA removes casts: then default options.
        for options in (AS_WRITTEN, {}):
            runs = Runs(self.jaxpr, self.inputs, above, options)
            found = Search(runs, runs.graph(), concern).causes()
            if found:
                return found
        return []


def replayed(
    make: Callable[[AbstractLossScaling | None], Gradient],
    scaling: AbstractLossScaling | None,
    args: PyTree,
    kwargs: PyTree,
) -> Replay:
    """Traces a step.

    Args:
        make: `make(scaling)` returns the gradient function, whose result has `value`
            and `grads`.
        scaling: The loss scaling that the step had.
        args: The arguments of the step.
        kwargs: The keyword arguments.
    """

    def called(scaling: PyTree, args: PyTree, kwargs: PyTree) -> PyTree:
        result = make(scaling)(*args, **kwargs)
        return {"loss": result.value, "of": result.grads}

    call = Call(scaling, args, kwargs, call=called)
    with taking_notes():
        jaxpr = jax.make_jaxpr(call)(*call.arrays)
    results = call.result_of(range(len(jaxpr.jaxpr.outvars)))
    leaves = jax.tree_util.tree_leaves_with_path(results)
    places = [path_text(path[1:]) for path, leaf in leaves if isinstance(leaf, int)]
    places = [place or "the gradient" for place in places]
    return Replay(jaxpr, tuple(call.arrays), tuple(call.paths), (LOSS, *places[1:]))


def refuse_tracers(trees: Sequence[PyTree], call: str) -> None:
    """Raises if an array has no value: it is traced or only a shape."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, Tracer | jax.ShapeDtypeStruct):
            raise TypeError(
                f"{call} replays a step and needs its arrays; got {describe(leaf)}. "
                "Call it outside `jax.jit` and the like, with the step's model, "
                "batch and scaling."
            )
