"""The step to compile: the user's, or made of a loss and an optimizer.

Arrays that it closes over (frozen weights, a teacher, a table) become arguments. JAX
makes constants of them; a compiler's memory figures leave constants out, and it
computes with their values. Arrays that functions inside loops, `jax.checkpoint` and
`shard_map` close over remain constants.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import PyTree

from ..._autocast import autocast
from ..._base.errors import describe
from ..._base.jax_compat import bind_equation, equation_context, open_jaxpr
from ..._base.typing import AnyArray, Program
from ..._loss_scaling import NoLossScaling
from ..._memory import layouts_of
from ..._program import (
    distinct_equations,
    is_array_or_type,
    program_of,
    properties,
    run_by,
    sub_jaxprs,
)
from ..._quantize import (
    AbstractRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Int8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from ..._settings import settings_of
from ..._step import (
    Options,
    gradient_function,
    init_scaling,
    optimizer_step,
    refuse_optimizer,
)
from .._counter import Device, compile_only_devices
from .._inspect import Operation, explain

# --- Arrays that a step closes over ---------------------------------------------------

# Bytes. Smaller constants (indices, windows) do not matter, and compilers use their
# values.
_LEAST = 1024
# Their programs are separate from the program around them, or sharded.
_KEPT = frozenset({"checkpoint", "remat", "remat2", "shard_map"})


class ClosedOver:
    """The large constants of a program and the programs in it, each once.

    Attributes:
        arrays: The constants that can become arguments.
        constants: The others.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._holds: dict[int, bool] = {}
        arrays: dict[Hashable, AnyArray] = {}
        self._look(program, arrays)
        within = [sub for e in distinct_equations(program) for sub in sub_jaxprs(e)]
        large = [pair for sub in within for pair in _large(sub).items()]
        self._keys = [*arrays]
        self.arrays = [*arrays.values()]
        self.constants = [*{key: x for key, x in large if key not in arrays}.values()]

    def _look(self, program: Program, arrays: dict[Hashable, AnyArray]) -> bool:
        """Collects constants that can be arguments; returns whether there are any."""
        if id(program) not in self._holds:
            large = _large(program)
            arrays |= large
            calls = [program_of(e) for e in open_jaxpr(program).eqns if _is_call(e)]
            inner = [self._look(call, arrays) for call in calls]
            self._holds[id(program)] = bool(large) or any(inner)
        return self._holds[id(program)]

    def run(self, arrays: Sequence[AnyArray], given: Sequence[AnyArray]) -> list[Any]:
        """Runs the program with `arrays` instead of its own."""
        return self._run(
            self._program, dict(zip(self._keys, arrays, strict=True)), given
        )

    def _run(
        self,
        program: Program,
        found: Mapping[Hashable, AnyArray],
        given: Sequence[AnyArray],
    ) -> list[Any]:
        consts = [found.get(_key(x), x) for x in getattr(program, "consts", ())]
        closed = core.ClosedJaxpr(open_jaxpr(program), consts)

        def bind(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            with equation_context(equation):
                if _is_call(equation):
                    inner = program_of(equation)
                    if self._holds[id(inner)]:
                        return self._run(inner, found, operands)
                return bind_equation(equation, *operands)

        return list(map(run_by(bind, closed, given), closed.jaxpr.outvars))


def _is_call(equation: JaxprEqn) -> bool:
    """Returns whether an equation runs a program that can be inlined."""
    name = equation.primitive.name
    known = properties(name)
    return bool(known.program and known.runs_once) and name not in _KEPT


def _large(program: Any) -> dict[Hashable, AnyArray]:
    consts = getattr(program, "consts", ())
    return {_key(x): x for x in consts if size_of([x]) >= _LEAST}


def _key(x: Any) -> Hashable:
    """Returns the identity of an array: JAX functions wrap those of NumPy each anew."""
    if not isinstance(x, np.ndarray):
        return id(x)
    return x.__array_interface__["data"][0], x.shape, x.strides, x.dtype


def size_of(arrays: Sequence[Any]) -> int:
    """Returns the bytes of arrays; a random key has 8."""
    return sum(
        math.prod(x.shape) * (8 if _is_key(x) else x.dtype.itemsize) for x in arrays
    )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# --- The step -------------------------------------------------------------------------

_CALL = "`mpx.forecast`"
_RECIPES = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "row-wise": Float8RowwiseScaling(),
    "int8": Int8CurrentScaling(),
}
_DTYPES = ("float32", "bfloat16", "float16")
AS_WRITTEN = "as written"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A precision of the loss.

    Attributes:
        label: Its name in the report.
        options: The options of `mpx.autocast`.
    """

    label: str
    options: Mapping[str, Any]


def read_precisions(given: object, options: Mapping[str, Any]) -> list[Variant]:
    """Returns the precisions that a user requested.

    Args:
        given: A dtype's name, a recipe or its short name, or several of these; or
            options of `mpx.autocast` by label.
        options: Options of `mpx.autocast` for all of them.
    """
    if isinstance(given, Mapping):
        found = [Variant(str(k), {**options, **v}) for k, v in given.items()]
    else:
        is_one = isinstance(given, str | AbstractRecipe | type)
        several: Any = (given,) if is_one else given
        found = [_precision(one, options) for one in several]
    labels = [one.label for one in found]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(
            f"`precisions` of {_CALL} must have at least one, each with a different "
            f"label; got {labels}. Pass a dict from labels to options of "
            "`mpx.autocast`."
        )
    return found


def _precision(one: object, options: Mapping[str, Any]) -> Variant:
    if isinstance(one, str) and one in _RECIPES:
        return Variant(one, {"recipe": _RECIPES[one], **options})
    if isinstance(one, AbstractRecipe):
        same = [name for name, recipe in _RECIPES.items() if recipe == one]
        label = same[0] if same else type(one).__name__
        return Variant(label, {"recipe": one, **options})
    name = one if isinstance(one, str) else getattr(one, "__name__", str(one))
    if name == "float32":
        return Variant(name, {"enabled": False})
    if name in _DTYPES:
        return Variant(name, {"dtype": name, **options})
    raise ValueError(
        f"`precisions` of {_CALL} must be of {', '.join((*_DTYPES, *_RECIPES))}, a "
        "recipe, or a dict from labels to options of `mpx.autocast`; got "
        f"{describe(one)}."
    )


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A step that is not compiled yet.

    Attributes:
        program: What `jax.jit` lowered.
        closed_over: Bytes of the arrays that it closes over.
        constants: Bytes of the arrays among these that are constants of the program.
        arguments: Bytes of its arguments on a device, by part.
        weights: Bytes of each weight.
        has_options: Whether its `jax.jit` may have compiler options of its own.
        devices: The devices that it is lowered for.
    """

    program: Any
    closed_over: int
    constants: int
    arguments: dict[str, int]
    weights: list[int]
    has_options: bool = False
    devices: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class ForecastStep:
    """A step, or a loss and an optimizer to make one of.

    Attributes:
        func: A step, or a loss.
        optimizer: An Optax transformation; None if `func` is a step.
        has_aux: Whether the loss returns more than its value.
        args: Its arguments; the first has the weights.
        kwargs: Its keyword arguments.
    """

    func: Callable[..., PyTree]
    optimizer: Any
    has_aux: bool
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]

    def check(self) -> None:
        """Raises if this cannot be forecast.

        Raises:
            TypeError: There are no arguments, or the optimizer is not an optimizer.
            ValueError: A loss is an autocast function.
        """
        if not self.args:
            raise TypeError(
                f"{_CALL} needs the arguments of the function: `mpx.forecast(loss, "
                "optimizer)(model, *batch)`; shapes are enough."
            )
        if self.optimizer is None:
            return
        refuse_optimizer(self.optimizer, _CALL)
        if settings_of(self.func) is not None:
            raise ValueError(
                f"{_CALL} computes the loss in each of `precisions`; got an autocast "
                "function. Pass the plain function."
            )

    def named(self, precision: Variant) -> Variant:
        """Returns a precision, relabelled if float32 has half-precision weights."""
        weights = filter(_is_float, jax.tree.leaves(self.args[0]))
        is_half = any(leaf.dtype.itemsize < 4 for leaf in weights)
        if precision.label == "float32" and is_half:
            return dataclasses.replace(precision, label=AS_WRITTEN)
        return precision

    @property
    def devices(self) -> int:
        """The number of devices that the arguments are sharded over."""
        mesh = _mesh_of((self.args, self.kwargs))
        return 1 if mesh is None else mesh.size

    def lower(self, precision: Variant, target: Device) -> Lowered:
        """Lowers the step in a precision for a target."""
        devices = compile_only_devices(target, self.devices)
        place = _Placement(devices, _mesh_of((self.args, self.kwargs)))
        # Autocast functions inside get the target.
        with autocast(target=target.name, ambient=True):
            if self.optimizer is None:
                lowered = self._lower_own(place)
            else:
                lowered = self._lower_made(precision, target, place)
        return dataclasses.replace(lowered, devices=devices)

    def operations(self, precision: Variant, target: str) -> tuple[Operation, ...]:
        """Returns the operations of the loss, or of a whole step, by `mpx.explain`."""
        func, args = self.func, self.args
        if self.optimizer is not None:
            loss, args = _pure(func, args)
            func = autocast(loss, **precision.options)
        with autocast(target=target, ambient=True):
            return explain(func)(*args, **self.kwargs).operations

    def _lower_own(self, place: "_Placement") -> Lowered:
        args, kwargs = place(self.args), place(self.kwargs)
        func: Any = self.func
        if type(func).__module__.startswith("equinox") and hasattr(func, "lower"):
            func = func.__wrapped__  # the `lower` of `eqx.filter_jit` takes no shapes
        parts = {"weights": _size(args[0]), "optimizer": 0}
        parts["other arguments"] = _size((args[1:], kwargs))
        sizes = _sizes(args[0])
        if not (hasattr(func, "lower") and hasattr(func, "trace")):
            return Lowered(*_lower(func, args, kwargs, place), parts, sizes)
        traced = func.trace(*args, **kwargs)
        traced = getattr(traced, "traced", traced)  # Flax wraps it
        held = ClosedOver(traced.jaxpr)
        constants = size_of(held.arrays) + size_of(held.constants)
        has_options = _has_options(func, args, kwargs)
        return Lowered(traced.lower(), constants, constants, parts, sizes, has_options)

    def _lower_made(
        self, precision: Variant, target: Device, place: "_Placement"
    ) -> Lowered:
        loss, args = _pure(self.func, self.args)
        model, *batch = args
        options: dict[str, Any] = {"target": target.name, **precision.options}
        loss = autocast(loss, **options)
        tx = getattr(self.optimizer, "tx", self.optimizer)  # of an `nnx.Optimizer`

        def first(model: PyTree, batch: Any) -> tuple[PyTree, PyTree]:
            state = tx.init(eqx.filter(model, eqx.is_inexact_array))
            if options.get("enabled") is False:  # a plain step checks nothing
                return state, NoLossScaling(skip=False)
            args, kwargs = batch
            return state, init_scaling(loss, model, *args, **kwargs)

        def step(model: PyTree, state: PyTree, scaling: Any, batch: Any) -> Any:
            asked = Options(has_aux=self.has_aux)
            gradient: Any = gradient_function(_CALL, loss, scaling, None, True, asked)
            args, kwargs = batch
            result = gradient(model, *args, **kwargs)
            return (*optimizer_step(model, tx, state, result), result.value)

        state, scaling = eqx.filter_eval_shape(first, model, (batch, self.kwargs))
        model, batch = place(model), place((batch, self.kwargs))
        state, scaling = place.state(state, model), place(scaling)
        parts = {"weights": _size(model), "optimizer": _size(state)}
        parts["other arguments"] = _size((scaling, batch))
        lowered = _lower(step, (model, state, scaling, batch), {}, place)
        return Lowered(*lowered, parts, _sizes(model))


def _lower(
    func: Callable[..., PyTree], args: Any, kwargs: Any, place: "_Placement"
) -> tuple[Any, int, int]:
    """Lowers a function with its arrays as inputs; those that it returns are donated.

    Returns:
        The lowered function; bytes of what it closes over; bytes of constants in these.
    """
    arrays, rest = eqx.partition((args, kwargs), is_array_or_type)

    def flat(*arrays: PyTree) -> PyTree:
        args, kwargs = eqx.combine((arrays[:-1], arrays[-1]), rest)
        return eqx.filter(func(*args, **kwargs), eqx.is_array)

    inputs = (*arrays[0], arrays[1])
    results = jax.eval_shape(flat, *inputs)
    made = [_kind(one) for one in results] if isinstance(results, tuple | list) else []
    donated = []
    for number, one in enumerate(inputs[:-1]):
        if (kind := _kind(one)) in made:
            made.remove(kind)  # a result reuses one argument
            donated.append(number)

    def traced(flat: Any, *inputs: PyTree) -> Any:
        flat.__name__ = getattr(func, "__name__", "step")
        return jax.jit(flat, donate_argnums=tuple(donated)).trace(*inputs)

    def with_arrays(*inputs: PyTree) -> PyTree:
        *given, arrays = inputs
        found = held.run(arrays, jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(results), found)

    step = traced(flat, *inputs)
    held = ClosedOver(step.jaxpr)
    if held.arrays:
        step = traced(with_arrays, *inputs, place.whole(held.arrays))
    constants = size_of(held.constants)
    return step.lower(), size_of(held.arrays) + constants, constants


def _has_options(func: Callable[..., PyTree], args: Any, kwargs: Any) -> bool:
    """Returns whether a jitted function may have compiler options."""
    try:
        eqx.filter_eval_shape(func, *args, **kwargs)
    except Exception:  # JAX refuses such options inside of another function
        return True
    return False


def _is_float(leaf: Any) -> bool:
    return is_array_or_type(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _kind(tree: PyTree) -> object:
    leaves, structure = jax.tree.flatten(tree)
    return bool(leaves) and (structure, [(x.shape, x.dtype) for x in leaves])


def _size(tree: PyTree) -> int:
    return sum(_sizes(tree))


def _sizes(tree: PyTree) -> list[int]:
    """Returns the bytes of each array of a tree, on one device."""
    sizes = []
    for leaf in jax.tree.leaves(tree):
        if not is_array_or_type(leaf):
            continue
        sharding, shape = getattr(leaf, "sharding", None), leaf.shape
        shape = shape if sharding is None else sharding.shard_shape(shape)
        sizes.append(size_of([jax.ShapeDtypeStruct(shape, leaf.dtype)]))
    return sizes


# --- Devices --------------------------------------------------------------------------


class _Placement:
    """Puts shapes on the target's devices, sharded as the arguments are."""

    def __init__(self, devices: list[Any], mesh: Mesh | AbstractMesh | None) -> None:
        self._one = SingleDeviceSharding(devices[0])
        self._mesh = None
        if mesh is not None:
            sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
            array = np.array(devices).reshape(sizes)
            self._mesh = Mesh(array, mesh.axis_names, axis_types=mesh.axis_types)

    def __call__(self, tree: PyTree) -> PyTree:
        return jax.tree.map(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if not is_array_or_type(leaf):
            return leaf
        sharding: Any = self._one
        if self._mesh is not None:
            own = getattr(leaf, "sharding", None)
            spec = own.spec if isinstance(own, NamedSharding) else ()
            sharding = NamedSharding(self._mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def whole(self, arrays: list[Any]) -> list[Any]:
        """Returns arrays replicated on every device, as constants are."""
        return [self._leaf(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in arrays]

    def state(self, state: PyTree, model: PyTree) -> PyTree:
        """Returns an optimizer's state sharded as by `mpx.init_optimizer`."""
        if self._mesh is None:
            return self(state)
        layouts = layouts_of(state, model, NamedSharding(self._mesh, jax.P()))
        return jax.tree.map(
            lambda leaf, place: (
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
                if is_array_or_type(leaf)
                else leaf
            ),
            state,
            layouts,
        )


def _mesh_of(tree: PyTree) -> Mesh | AbstractMesh | None:
    """Returns the mesh that arrays are sharded over; None for one device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


# --- Flax NNX -------------------------------------------------------------------------


def _pure(
    loss: Callable[..., Any], args: tuple[PyTree, ...]
) -> tuple[Callable[..., Any], tuple[PyTree, ...]]:
    """Returns a loss of an NNX module as a function of its weights and other state."""
    bases = type(args[0]).__mro__
    if not any(base.__module__.startswith("flax.nnx") for base in bases):
        return loss, args
    from flax import nnx

    # Plain arrays: NNX variables are objects that record where they were made.
    graph, *states = nnx.split(args[0], nnx.Param, ...)
    flat = [jax.tree_util.tree_flatten_with_path(state) for state in states]
    forms = [form for _, form in flat]
    plain = [{jax.tree_util.keystr(p): x for p, x in leaves} for leaves, _ in flat]

    def pure(params: PyTree, rest: PyTree, *args: PyTree, **kwargs: PyTree) -> Any:
        made = [
            jax.tree.unflatten(form, [one[name] for name in names])
            for form, one, names in zip(forms, (params, rest), plain, strict=True)
        ]
        return loss(nnx.merge(graph, *made), *args, **kwargs)

    return pure, (*plain, *args[1:])
