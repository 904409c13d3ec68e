"""Where the levels of a program run: on all devices as one, or on each on its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._jax_compat import (
    as_varying,
    manual_axes,
    shard_map_axes,
    type_varies_on,
    varying_axes,
)
from .._typing import AnyArray, Aval

Run = Callable[[PyTree, Sequence[AnyArray]], tuple[PyTree, list[AnyArray]]]

# Each operation rounds as it is written. By default XLA leaves out pairs of casts, and
# an operation would be seen overflow whose result nobody used in that dtype.
AS_WRITTEN = {"xla_allow_excess_precision": False}


class Machine:
    """Compiles programs of a level: one program for all devices.

    A program takes control values, which are small and everywhere the same, and the
    inputs of a level. It returns what is read on the host, a tree of arrays, and a list
    of arrays that stay where they are.

    Attributes:
        options: What the compiler is told.
    """

    def __init__(self, options: dict[str, bool]) -> None:
        """Compiles nothing yet."""
        self.options = options

    def compiled(self, program: Callable[..., PyTree], types: Sequence[Aval]) -> Run:
        """A compiled program.

        Args:
            program: `program(control, *inputs)` returns `(small, kept)`.
            types: The types of the inputs.

        Returns:
            A function of `control, inputs` that returns the same, the small arrays as
            those of NumPy with one more axis in front, of devices.
        """
        return _compiled(program, lambda x: np.asarray(x)[None], self.options)


class EachDevice(Machine):
    """A program for each device, as in the `shard_map` of an equation.

    Arrays that stay have one axis more in front for each axis of the mesh, so that each
    device finds its own.
    """

    def __init__(self, equation: JaxprEqn, options: dict[str, bool]) -> None:
        """Reads how the equation shares its program out."""
        super().__init__(options)
        self._params = equation.params
        self._axes = shard_map_axes(equation.params)
        self._checks = equation.params.get("check_vma", False)

    def _shared_out(
        self, func: Callable[..., PyTree], in_specs: PyTree
    ) -> Callable[..., PyTree]:
        return jax.shard_map(
            func,
            mesh=self._params["mesh"],
            in_specs=in_specs,
            out_specs=PartitionSpec(*self._axes),
            axis_names=set(self._axes),
            check_vma=self._checks,
        )

    def entered(self, operands: Sequence[AnyArray]) -> list[AnyArray]:
        """The operands of the equation as they arrive on each device."""
        specs = tuple(self._params["in_specs"])
        func = self._shared_out(lambda *xs: [self._with_axes(x) for x in xs], specs)
        return list(jax.jit(func)(*operands))

    def compiled(self, program: Callable[..., PyTree], types: Sequence[Aval]) -> Run:
        """See `Machine.compiled`."""
        count = len(self._axes)
        specs = [self._spec(one) for one in types]

        def on_each(control: PyTree, *stacked: AnyArray) -> PyTree:
            # What is the same on all devices came once, and has no axis for them.
            local = [x.reshape(x.shape[count:]) for x in stacked]
            return jax.tree.map(self._with_axes, program(control, *local))

        def whole(control: PyTree, *stacked: AnyArray) -> PyTree:
            given = [
                self._once(x, spec) for x, spec in zip(stacked, specs, strict=True)
            ]
            shared = self._shared_out(on_each, (PartitionSpec(), *specs))
            return shared(control, *given)

        def read(x: AnyArray) -> np.ndarray:
            devices = int(np.prod(x.shape[:count]))
            return np.asarray(x).reshape(devices, *x.shape[count:])

        return _compiled(whole, read, self.options)

    def _with_axes(self, x: AnyArray) -> AnyArray:
        x = varying(jax.numpy.asarray(x))
        return x.reshape((1,) * len(self._axes) + x.shape)

    def _spec(self, one: Aval) -> PartitionSpec:
        varies = type_varies_on(one) if self._checks else frozenset(self._axes)
        return PartitionSpec(*(a if a in varies else None for a in self._axes))

    def _once(self, x: AnyArray, spec: PartitionSpec) -> AnyArray:
        once = tuple(axis for axis, name in enumerate(spec) if name is None)

        def sliced(x: AnyArray) -> AnyArray:
            for axis in once:
                x = jax.lax.slice_in_dim(x, 0, 1, axis=axis)
            return x

        sharding: Any = jax.typeof(x).sharding
        if not once or not sharding.mesh.explicit_axes:
            return sliced(x)
        # Of explicit axes JAX cuts none to a length that its devices do not divide.
        left = [None if i in once else a for i, a in enumerate(sharding.spec)]
        automatic: Any = jax.sharding.auto_axes
        with jax.sharding.use_abstract_mesh(sharding.mesh):
            return automatic(sliced, out_sharding=PartitionSpec(*left))(x)


def varying(x: AnyArray) -> AnyArray:
    """A value as one that differs between devices, where JAX keeps account of it."""
    axes = manual_axes()
    if not axes or not varying_axes(jax.lax.axis_index(axes[0])):
        return x
    return as_varying(x, frozenset(axes))


def _compiled(
    program: Callable[..., PyTree],
    read: Callable[[AnyArray], np.ndarray],
    options: dict[str, bool],
) -> Run:
    compiled: Callable[..., PyTree] | None = None

    def run(
        control: PyTree, inputs: Sequence[AnyArray]
    ) -> tuple[PyTree, list[AnyArray]]:
        nonlocal compiled
        # At the first call: only the inputs say on which devices results are to be.
        if compiled is None:
            where = _everywhere(inputs)
            compiled = jax.jit(
                program, out_shardings=(where, None), compiler_options=options
            )
        small, kept = compiled(control, *inputs)
        return jax.tree.map(read, small), kept

    return run


def _everywhere(inputs: Sequence[AnyArray]) -> NamedSharding | None:
    """Where results are that every process reads; None in one process."""
    for x in inputs:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and not x.is_fully_addressable:
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None
