"""Everything that differs between versions of JAX, each behind a function.

Tested with jax 0.10, 0.11 and 0.12. All modules of JAX used here are public, but not
everything is documented: the classes in a name stack, the context and traceback of an
equation, `get_bind_params`. So test a new version here first.

Other modules contain the names of primitives, which may be new or renamed
(`_program/primitives.py`, `REWRITES` in `_autocast/`), the versions of XLA:CPU that
`_tools/_doctor.py` warns about, and Pallas's Triton backend (`contrib/`).
"""

import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.ad_checkpoint
from jax.core import AbstractValue
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, mlir, partial_eval
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

# Since jaxlib 0.11 XLA's CPU compiler sums some bfloat16 matmuls in bfloat16.
NEEDS_CPU_FORM = jax.__version_info__ >= (0, 11)
# jaxlib 0.10.0 lacks the CPU library, and some shapes of such matmuls.
HAS_CPU_FORM = jax.__version_info__ >= (0, 10, 2)
# Earlier versions convert a whole bfloat16 array to float32 to write a part of it.
WIDENS_STACKS = jax.__version_info__ < (0, 11)


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes over which the code being traced runs once per device.

    These are the axes of `shard_map` and of `pmap`. Empty elsewhere, also under
    `jax.jit` over a mesh, where all devices share one program.
    """
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def spans_devices(leaf: object) -> bool:
    """Returns whether an array's type has a mesh of several devices."""
    mesh = _mesh_of(leaf)
    return mesh is not None and mesh.size > 1


def _mesh_of(leaf: object) -> Mesh | AbstractMesh | None:
    """Returns the mesh in an array's type; None without one."""
    if not isinstance(leaf, jax.Array):
        return None
    mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def mesh_of(leaves: Sequence[object]) -> Mesh | AbstractMesh | None:
    """Returns the current mesh, or else the arrays' mesh; None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    meshes = (_mesh_of(leaf) for leaf in leaves)
    return next((one for one in meshes if one is not None), None)


def is_on_a_mesh() -> bool:
    """Returns whether the current mesh, e.g. of `shard_map`, has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def has_one_device(*trees: object) -> bool:
    """Returns whether no array can be sharded, as far as types of arguments say it."""
    if jax.device_count() > 1 or is_on_a_mesh():
        return False
    return not any(map(spans_devices, jax.tree.leaves(trees)))


def bind_equation(equation: JaxprEqn, *operands: object) -> list[Any]:
    """Binds the primitive of a jaxpr's equation to new operands.

    Args:
        equation: The equation.
        *operands: The new operands.

    Returns:
        The results as a list, even if there is just one.
    """
    primitive = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


def answer_policies_for(primitive: Primitive, known: Primitive) -> None:
    """Makes policies of `jax.checkpoint` treat a primitive as another one.

    They compare JAX's primitives by identity. A result that a policy would offload to
    the host is saved on the device.
    """

    def rule(policy: Any, unknown: Any, is_made: Any, equation: JaxprEqn) -> Any:
        operands = zip(equation.invars, is_made, strict=True)
        missing = [v for v, made in operands if isinstance(v, Var) and not made]
        if any(unknown):
            return None, equation, [True], [True], missing
        avals = [v.aval for v in equation.invars]
        answer = policy(known, *avals, **equation.params)
        if answer and answer is not jax.ad_checkpoint.Recompute:
            return equation, None, [False], [False], []
        return equation, equation, [False], [True], missing

    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def layouts_are_said(context: Any) -> bool:
    """Returns whether a lowering can constrain the layouts of arrays.

    It cannot in an exported program, which must not contain such a call, nor where the
    compiler partitions the program: jaxlib 0.10 gathers the call's operand.
    """
    module = context.module_context
    axes = module.axis_context
    if module.lowering_parameters.for_export:
        return False
    if isinstance(axes, mlir.SPMDAxisContext):  # `shard_map`, over some axes of a mesh
        return set(axes.manual_axes) == set(axes.mesh.axis_names)
    return getattr(axes, "num_devices", 1) == 1


def permuted_sharding(aval: Any, order: Sequence[int]) -> Any:
    """Returns a type's sharding for an array with permuted axes.

    None without a mesh; replicated if the type has no sharding.
    """
    sharding = aval.sharding
    if not sharding.mesh.empty:
        entries = tuple(sharding.spec[axis] for axis in order)
        return sharding.update(spec=sharding.spec.update(partitions=entries))
    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec(*(None,) * len(order))
    return None if mesh.empty else NamedSharding(mesh, spec)


def with_weak_type(x: jax.Array, is_weak: bool) -> jax.Array:
    """Returns an array that is weakly typed, as a Python number is, or strongly."""
    # `jax.lax.convert_element_type` only makes strongly typed arrays.
    convert = jax.lax.convert_element_type_p
    return convert.bind(x, new_dtype=x.dtype, weak_type=is_weak, sharding=None)


def execution_context(equation: JaxprEqn) -> contextlib.AbstractContextManager[object]:
    """Returns a context with an equation's mesh and device."""
    return equation.ctx.manager


def execution_key(equation: JaxprEqn) -> Hashable:
    """Returns a key that is equal for equations of the same mesh and device."""
    context = equation.ctx
    metadata = tuple(sorted((context.xla_metadata or {}).items()))
    return context.cur_abstract_mesh, context.compute_type, metadata


@contextlib.contextmanager
def equation_context(equation: JaxprEqn) -> Iterator[None]:
    """Enters the context of an equation, to emit others for it.

    This sets its source lines, named scopes and execution context.
    """
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack):
        with execution_context(equation):
            yield


class _NoTraceback:
    """A traceback that means "none": JAX takes None for "unchanged".

    In jax 0.10 to 0.12; a separate context would also do, if it could be reset.
    """

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        """Returns None to JAX, which filters tracebacks of errors."""


def own_source_lines() -> contextlib.AbstractContextManager[object]:
    """Returns a context where traced code has its own lines, not an equation's."""
    nothing: Any = _NoTraceback()
    stack = source_info_util.current_name_stack()
    return source_info_util.user_context(nothing, name_stack=stack)


def traced_for_all(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function for `jax.jit`, to trace it without its first caller's lines.

    JAX caches traces, and reuses them for callers on other lines.
    """

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with own_source_lines():
            return func(*args, **kwargs)

    return wrapped


def place_of(program: Jaxpr) -> tuple[str, int]:
    """Returns a program's traced function as file and line; "" if unknown."""
    _, _, place = program.debug_info.func_src_info.partition(" at ")
    file, _, line = place.rpartition(":")
    return (file, int(line)) if line.isdigit() else ("", 0)


def scope_names(equation: JaxprEqn) -> tuple[str, ...]:
    """Returns the named scopes of an equation, outermost first, without transforms."""
    # The classes are not public, so compare their names (jax 0.10 to 0.12).
    stack = equation.source_info.name_stack.stack
    return tuple(entry.name for entry in stack if type(entry).__name__ == "Scope")


def manual_axes_of(equation: JaxprEqn) -> tuple[str, ...]:
    """Returns the mesh axes over which an equation is manual: see `manual_axes`."""
    return tuple(equation.ctx.cur_abstract_mesh.manual_axes)


def is_transposed(equation: JaxprEqn) -> bool:
    """Returns whether an equation was made by transposing a derivative."""
    return "transpose" in _transforms(equation)


def is_differentiated(equation: JaxprEqn) -> bool:
    """Returns whether an equation is part of a derivative."""
    return not _transforms(equation).isdisjoint(("jvp", "transpose"))


def _transforms(equation: JaxprEqn) -> set[str]:
    """Returns the transforms of JAX that made an equation, without named scopes."""
    stack = equation.source_info.name_stack.stack
    return {entry.name for entry in stack if type(entry).__name__ == "Transform"}


def scan_options(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a scan equation that `jax.lax.scan` takes."""
    names = ("length", "reverse", "unroll", "_split_transpose")
    return {name: params[name] for name in names if name in params}


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many constants and how many carries a scan equation has."""
    if "num_consts" in params:  # before jax 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Returns the jaxpr without its constants; before jax 0.11 a separate class."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return inner


def named_as(closed: ClosedJaxpr, original: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with another one's function in its debug info."""
    jaxpr, place = open_jaxpr(closed), open_jaxpr(original).debug_info.func_src_info
    info = jaxpr.debug_info._replace(func_src_info=place)  # keep the operands' names
    return ClosedJaxpr(jaxpr.replace(debug_info=info), closed.consts)


def raw_frames(traceback: object) -> list[tuple[types.CodeType, int]]:
    """Returns code and instruction of each frame of a traceback, innermost first.

    Empty where this version of JAX does not have them.
    """
    found = getattr(traceback, "raw_frames", None)
    return list(zip(*found(), strict=True)) if found else []


def shard_map_axes(params: dict[str, Any]) -> tuple[str, ...]:
    """Returns the mesh axes over which a shard_map equation splits its program."""
    is_new = "newly_manual_axes" in params  # since jax 0.11
    axes = params["newly_manual_axes" if is_new else "manual_axes"]
    # `axes` is a set, whose order differs between processes.
    return tuple(axis for axis in params["mesh"].axis_names if axis in axes)


def composite_parameter(params: dict[str, Any]) -> str:
    """Returns the parameter that holds the decomposition of a composite."""
    return "jaxpr" if "jaxpr" in params else "call_jaxpr"  # since jax 0.11


def stack(arrays: Sequence[Any]) -> Array:
    """Stacks arrays of one type along a new first axis."""
    found = getattr(jax.lax, "stack", None)  # since jax 0.10.1; several times as fast
    return jax.numpy.stack(arrays) if found is None else found(arrays)


def varying_axes(x: object) -> frozenset[str]:
    """Returns the axes of `shard_map` on which a value varies; empty if unchecked."""
    return type_varies_on(jax.typeof(x))


def type_varies_on(kind: object) -> frozenset[str]:
    """Returns the axes of `shard_map` on which values of a type vary."""
    found = getattr(kind, "manual_axis_type", None)
    return frozenset() if found is None else frozenset(found.varying)


def shape_varying_like(
    x: object, shape: tuple[int, ...], dtype: object
) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies on the same `shard_map` axes as `x`.

    Pallas kernels need it.
    """
    kind: Any = jax.typeof(x)
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype, manual_axis_type=kind.manual_axis_type)


def as_varying(x: object, axes: frozenset[str]) -> Any:
    """Returns the value, marked as varying on these axes of `shard_map`, too."""
    # Sorted: the order of a set of strings differs between processes, and processes
    # that share devices must run one program.
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def symbolic_zero(aval: AbstractValue) -> Any:
    """Returns a zero cotangent that pullbacks of `jax.vjp` accept.

    A rule with `symbolic_zeros=True` receives it as a symbolic zero; others get an
    array of zeros, and so do all before jax 0.10.2, whose pullbacks take arrays only.
    """
    zero = ad.Zero(aval.to_ct_aval())
    is_taken = jax.__version_info__ >= (0, 10, 2)
    return zero if is_taken else ad.instantiate_zeros(zero)


def set_for_all_threads(context: Any, value: object) -> None:
    """Sets the default of a user context, which invalidates earlier traces."""
    if not hasattr(context, "set_global"):  # before jax 0.10.1
        raise RuntimeError(
            "`mpx.set_half_precision_datatype` needs jax 0.10.1 or later; this is "
            f"jax {jax.__version__}. Set it for a block instead: `with "
            "mpx.half_precision(...):`."
        )
    context.set_global(value)


@contextlib.contextmanager
def explaining(
    kinds: tuple[type[Exception], ...], words: tuple[str, ...], message: str
) -> Iterator[None]:
    """Replaces a message of JAX by another one, which may contain it as `{error}`.

    Errors without one of the `words`, as other versions of JAX may raise, pass
    unchanged.

    Args:
        kinds: The types of errors.
        words: One of these is in the message of JAX.
        message: The new message.
    """
    try:
        yield
    except kinds as error:
        if not any(text in str(error) for text in words):
            raise
        raise type(error)(message.format(error=error)) from error
