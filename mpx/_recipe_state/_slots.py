"""The slots of recipes with a state: scales passed in, and amaxes returned.

Delayed scaling quantizes with scales that are known before a step, and records an amax
of each array in it. Both are stored by weight: by the path of the parameter, and for
each use of it by named scope and shape. The scales accompany the weight, as *slots*:
where a program passes the weight to an inner program, it passes its slots, too; a scan
over stacked layers slices both alike.

The amaxes come back in the place of the derivative of the scales. JAX would add up
those of several uses, but the maximum is needed. So each use gets its own copy
(`shared`), whose derivative rule is the maximum.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._base.typing import Length, Shape
from .._quantize import (
    AbstractRecipe,
    Role,
    Target,
    amax_in_parts,
    amax_of,
    filled,
    largest_magnitude,
)
from .._settings import ambient, with_ambient

# --- Copies of scales, whose "derivative" is the maximum of their amaxes --------------

# The number of scales in a slot: for input, weight and gradient.
ROLES = len(Role)
_INPUT, _WEIGHT = (tuple(Role).index(role) for role in (Role.INPUT, Role.WEIGHT))


def shared(x: Array, count: int) -> tuple[Array, ...]:
    """Copies scales; the maximum of the copies' amaxes comes back."""
    return (x,) if count == 1 else _shared(count, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(count: int, x: Array) -> tuple[Array, ...]:
    return (x,) * count


def _shared_forward(count: int, x: Array) -> PyTree:
    return (x,) * count, None


def _shared_backward(count: int, _: None, amaxes: tuple[Array, ...]) -> PyTree:
    return (largest_magnitude(jnp.stack(amaxes), (0,)),)


_shared.defvjp(_shared_forward, _shared_backward)


@jax.custom_vjp
def with_input_scale(scales: Array, first: Array) -> Array:
    """Replaces the input's scale by that of another product that reads the same array.

    Each slot records what it would have recorded alone. The first one gets the input's
    amax from all: its own product may have no derivative, behind a `stop_gradient`.
    """
    # The compiler recognizes one scalar in these (2026-11: not in `.at[].set`).
    begin, end = _range_of(_INPUT, scales)
    return jnp.concatenate((scales[:begin], first[begin:end], scales[end:]))


def _with_input_scale_forward(scales: Array, first: Array) -> PyTree:
    return with_input_scale(scales, first), None


def _with_input_scale_backward(_: None, amaxes: Array) -> PyTree:
    is_input = jnp.arange(ROLES) == _INPUT
    if (room := amaxes.size // ROLES) > 1:
        is_input = jnp.repeat(is_input, room)
    return amaxes, jnp.where(is_input, amaxes, 0)


with_input_scale.defvjp(_with_input_scale_forward, _with_input_scale_backward)


@jax.custom_vjp
def with_weight_amax(scales: Array, amax: Array) -> Array:
    """Returns the scales of a weight with a known amax, used if 0 comes back."""
    return scales


def _with_weight_amax_forward(scales: Array, amax: Array) -> PyTree:
    return scales, amax


def _with_weight_amax_backward(amax: Array, amaxes: Array) -> PyTree:
    begin, end = _range_of(_WEIGHT, amaxes)
    found = amaxes[..., begin:end]
    weight = jnp.where(found == 0, amax, found)
    parts = (amaxes[..., :begin], weight, amaxes[..., end:])
    return jnp.concatenate(parts, axis=-1), None


with_weight_amax.defvjp(_with_weight_amax_forward, _with_weight_amax_backward)


def repeated(x: Array, length: int) -> Array:
    """Repeats scales for each iteration of a loop; the amaxes' maximum comes back."""
    return _repeated(length, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeated(length: int, x: Array) -> Array:
    return jnp.broadcast_to(x, (length, *x.shape))


def _repeated_forward(length: int, x: Array) -> PyTree:
    return _repeated(length, x), None


def _repeated_backward(length: int, _: None, amaxes: Array) -> PyTree:
    return (largest_magnitude(amaxes, (0,)),)


_repeated.defvjp(_repeated_forward, _repeated_backward)


def _range_of(role: int, x: Array) -> tuple[int, int]:
    """Returns the places of a role in a slot."""
    parts = x.shape[-1] // ROLES
    return role * parts, (role + 1) * parts


# --- States and requests --------------------------------------------------------------


class SlotName(NamedTuple):
    """The name of a slot: its parameter, and the use of it."""

    parameter: str
    use: str

    def __str__(self) -> str:
        return f"{self.parameter} ({self.use})"


class Use(NamedTuple):
    """A way of using a weight.

    Attributes:
        scope: The named scopes around it.
        form: The weight's shape there, and other distinctions of uses.
    """

    scope: str
    form: str

    def __str__(self) -> str:
        return " ".join(filter(None, self))


class Request(NamedTuple):
    """The requirements on the state of a slot.

    Attributes:
        recipe: The recipe.
        lengths: The lengths of the scans that slice the weight, the outermost first.
    """

    recipe: AbstractRecipe
    lengths: tuple[int, ...]


class StateRequests:
    """Collects the slots that a function needs, in place of a state.

    Attributes:
        requests: The slots.
        quantized: The uses of weights that any recipe quantizes.
        shapes: The shapes of the weights, by path.
        calls: The number of calls of autocast functions.
        is_switched_off: Whether one of the called functions is switched off.
    """

    def __init__(self) -> None:
        """Starts without requests."""
        self.requests: dict[SlotName, Request] = {}
        self.quantized: dict[SlotName, None] = {}
        self.shapes: dict[str, Shape] = {}
        self.calls = 0
        self.is_switched_off = False

    def take(self) -> "StateRequests":
        """Returns the source for one more call of an autocast function."""
        self.calls += 1
        return self


class State(NamedTuple):
    """The state of all slots.

    Attributes:
        scales: The scales of each slot.
        recipes: The recipe that the state of each slot was made for.
        shapes: The shapes of the weights that it was made for, by path.
        quantized: The only uses of weights that a recipe quantizes; None in a training
            step, which decides on them itself.
        vector: Scales and inverses of slots that no scan slices, if in one array.
        rows: The row of each of these slots.
    """

    scales: Mapping[SlotName, Array]
    recipes: Mapping[SlotName, AbstractRecipe]
    shapes: Mapping[str, Shape]
    quantized: Sequence[SlotName] | None = None
    vector: Array | None = None
    rows: Mapping[SlotName, int] = MappingProxyType({})


class ProvidedState:
    """The state of all slots, for a number of calls of autocast functions.

    Attributes:
        taken: The number of calls so far.
        used: The recipes that quantized a product in them.
        parameters: The paths of the weights of these functions.
        has_recipe: Whether one of the called functions has a recipe.
        is_switched_off: Whether one of the called functions is switched off.
    """

    def __init__(self, state: State, calls: int) -> None:
        """Copies the scales for each call."""
        copies = {name: shared(x, calls) for name, x in state.scales.items()}
        self._rest = [{k: v[i] for k, v in copies.items()} for i in range(calls)]
        self._state = state._replace(scales={})
        self.taken = 0
        self.used: set[AbstractRecipe] = set()
        self.parameters: set[str] = set()
        self.has_recipe = False
        self.is_switched_off = False

    def take(self) -> State:
        """Returns the scales for one more call; unforeseen calls share the last."""
        self.taken += 1
        rest = self._rest.pop() if len(self._rest) > 1 else self._rest[0]
        return self._state._replace(scales=rest)

    def forget(self) -> None:
        """Drops the scales.

        JAX's caches hold the source in their keys for any length of time:
        `jax.checking_leaks` reports the tracers in it (JAX 0.10.2).
        """
        self._rest.clear()


@contextlib.contextmanager
def collecting_requests() -> Iterator[StateRequests]:
    """Collects the slots that autocast functions called inside need."""
    found = StateRequests()
    with with_ambient(source=found):
        yield found


@contextlib.contextmanager
def providing_state(state: State, calls: int) -> Iterator[ProvidedState]:
    """Provides scales to autocast functions called inside."""
    provision = ProvidedState(state, calls)
    try:
        with with_ambient(source=provision):
            yield provision
    finally:
        provision.forget()


def is_collecting_requests() -> bool:
    """Returns whether functions that are called now only request slots."""
    return isinstance(ambient().source, StateRequests)


def note_used(
    recipes: Iterable[AbstractRecipe], parameters: Iterable[str], *, has_recipe: bool
) -> None:
    """Records the recipes that an autocast function has quantized by.

    Args:
        recipes: The recipes.
        parameters: The paths of the function's weights.
        has_recipe: Whether the function has a recipe.
    """
    source = ambient().source
    if isinstance(source, ProvidedState):
        source.used.update(recipes)
        source.parameters.update(parameters)
        source.has_recipe |= has_recipe


def first_step() -> contextlib.AbstractContextManager[object]:
    """Makes functions without a state use the scales of a first step, which are 1.

    For inspecting a program: such scales are right for one step only.
    """
    return with_ambient(is_first_step=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """The slots of one weight, in one program.

    Attributes:
        parameter: The path of the weight.
        source: The collector of requests; or the remaining scales by the name of each
            use of the weight; None where there is no state.
        recipes: The recipe that the scales of each use were made for.
        lengths: The lengths of the scans that slice the weight, the outermost first.
        quantized: The uses that the state records as quantized; None if it has no
            record.
        sizes: The sizes of the parameter for the uses whose amax is taken elsewhere.
        rows: The rows of the uses in `State.vector`.
    """

    parameter: str
    source: StateRequests | dict[str, Array] | None
    recipes: Mapping[str, AbstractRecipe] = dataclasses.field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    quantized: tuple[str, ...] | None = None
    sizes: Mapping[str, Length] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_parameter(
        cls, parameter: str, source: StateRequests | State | None, shape: Shape | None
    ) -> "Slots":
        """Makes the slots of a parameter of the function.

        Args:
            parameter: Its path.
            source: The source of the slots.
            shape: The shape of the parameter; None if only a piece of it is here.
        """
        if not isinstance(source, State):
            if source is not None and shape is not None:
                source.shapes[parameter] = shape
            return cls(parameter, source)
        known = source.shapes.get(parameter)
        if None not in (known, shape) and known != shape:
            name = f"`{parameter}`" if parameter else "the weight"
            raise ValueError(
                f"`scaling` must be the state of this model; got one that was made for "
                f"{name} with the shape {known}, which is {shape} here. Make a state "
                "for this model: `mpx.init_scaling(func, model, ...)`."
            )
        mine = [name for name in source.scales if name.parameter == parameter]
        recorded = source.quantized
        return cls(
            parameter,
            {name.use: source.scales[name] for name in mine},
            {name.use: source.recipes[name] for name in mine},
            quantized=None
            if recorded is None
            else tuple(name.use for name in recorded if name.parameter == parameter),
            rows={n.use: source.rows[n] for n in mine if n in source.rows},
        )

    def measured(self, weight: Array, target: Target) -> "Slots":
        """Returns slots whose weight amax is taken here, at the start of the step.

        So it is part of the kernel that reads the weight for the optimizer. In a
        product under `jax.checkpoint` it is a pass over the weight in each step: 0.8 of
        71 GB in a Llama of 542 M in bfloat16, 1.6 in float32 (jax 0.10.2, compiled for
        an H100, November 2026).
        """
        if not isinstance(self.source, dict) or ambient().marks_weights:
            return self
        found = dict(self.source)
        sizes = {}
        for use, scales in self.source.items():
            rows = scales.shape[:-1]  # the lengths of scans that slice the weight
            if weight.shape[: len(rows)] == rows:
                axes = tuple(range(len(rows), weight.ndim))
                fixed = jax.lax.stop_gradient(weight)
                parts = scales.shape[-1] // ROLES
                if rows or parts == 1:
                    amax = amax_of(target, fixed, axes)[..., None]
                else:
                    each = amax_in_parts(target, fixed, parts, ambient().is_repeated)
                    amax = filled(each, parts)
                found[use] = with_weight_amax(scales, amax)
                sizes[use] = math.prod(weight.shape)
        return dataclasses.replace(self, source=found, sizes=sizes)

    def moved(self, *, is_mixed: bool) -> "Slots":
        """Returns the slots of a moved weight, without amaxes that may not apply now.

        A scan may slice the moved weight along another axis.

        Args:
            is_mixed: Whether the result also contains values of other arrays.
        """
        if not self.sizes or not isinstance(self.source, dict):
            return self
        source = self.source
        sizes = {u: n for u, n in self.sizes.items() if u in source}
        sizes = {u: n for u, n in sizes.items() if source[u].ndim == 1}
        return dataclasses.replace(self, sizes={} if is_mixed else sizes)

    def is_measured(self, use: Use, shape: Shape) -> bool:
        """Returns whether a weight of this shape is a whole, measured parameter."""
        return self.sizes.get(self._name(use)) == math.prod((*shape, *self.lengths))

    def is_quantized(self, use: Use) -> bool | None:
        """Returns whether the state records a use as quantized; None if unknown."""
        if not self.quantized:
            return None if self.quantized is None else False
        return True if self._known(use) else None

    def has_scales(self, use: Use, *, otherwise: bool) -> bool:
        """Returns whether the state has scales for a use; `otherwise` if unknown."""
        if self.quantized is None or not isinstance(self.source, dict):
            return otherwise
        return any(name in self.source for name in self._known(use))

    def _known(self, use: Use) -> list[str]:
        """Returns a use's names in the state: its own, or those in other scopes."""
        known, name = self.quantized or (), _named(str(use), self.lengths)
        form = _named(use.form, self.lengths)
        others = [k for k in known if k == form or k.endswith(f" {form}")]
        return [name] if name in known else others

    def note_quantized(self, use: Use) -> None:
        """Records that a use is quantized, if requests are collected."""
        if isinstance(self.source, StateRequests):
            name = SlotName(self.parameter, _named(str(use), self.lengths))
            self.source.quantized[name] = None

    def _name(self, use: Use) -> str:
        """Returns the name of a use: the state's only one for it, or its own."""
        known = self._known(use)
        return known[0] if len(known) == 1 else _named(str(use), self.lengths)

    def slot(self, use: Use) -> SlotName:
        """Returns the name of the slot of a use."""
        return SlotName(self.parameter, self._name(use))

    def row(self, use: Use) -> int | None:
        """Returns the row of a use in `State.vector`; None if it has none."""
        return self.rows.get(self._name(use))

    def take(self, way: Use, recipe: AbstractRecipe) -> Array | None:
        """Returns the scales for one use; None if there is no state."""
        use = self._name(way)
        if isinstance(self.source, StateRequests):
            name = SlotName(self.parameter, use)
            request = Request(recipe, self.lengths)
            if self.source.requests.setdefault(name, request) != request:
                raise ValueError(
                    f"`{self.parameter}` is used twice in {use!r} under two recipes "
                    "with a state. Put the uses into different `jax.named_scope`s, "
                    "or under one recipe."
                )
            return jnp.ones(ROLES, jnp.float32)
        if self.source is None:
            return jnp.ones(ROLES, jnp.float32) if ambient().is_first_step else None
        rest = self.source.get(use)
        if rest is None:
            known = ", ".join(map(repr, self.source)) or "none"
            is_split = self.parameter.endswith("'].value")  # of an `nnx.State`
            raise ValueError(
                f"The recipe's state needs scales for `{self.parameter}` used in "
                f"{use!r}; got scales for {known}. If the model or the recipe has "
                "changed, convert the state: `scaling = mpx.init_scaling(func, model, "
                "...).with_state(scaling)`."
                f"{_SPLIT * is_split}"
            )
        if self.recipes[use] != recipe:
            raise ValueError(
                f"The function uses `{brief(recipe)}` for `{self.parameter}` in "
                f"{use!r}, but the state was made for `{brief(self.recipes[use])}`. "
                "Convert the state to the new recipe: `scaling = "
                "mpx.init_scaling(func, model, ...).with_state(scaling)`. "
                "(Functions are compared by identity: define that of "
                "`amax_compute_algo` once.)"
            )
        # One copy for this use, one for those that follow: so each use gets its own,
        # and the maximum of the amaxes comes back.
        mine, self.source[use] = shared(rest, 2)
        return mine

    @property
    def form(self) -> Hashable:
        """All but the arrays: part of cache keys."""
        found = self.source.items() if isinstance(self.source, dict) else ()
        uses = tuple((use, x.shape, self.recipes[use]) for use, x in found)
        sizes, rows = tuple(self.sizes.items()), tuple(self.rows.items())
        return self.parameter, uses, self.lengths, self.quantized, sizes, rows

    def as_operands(self, is_cut: bool) -> dict[str, Array]:
        """Copies scales for an inner program; for a scan only those it slices."""
        if not isinstance(self.source, dict):
            return {}
        taken = {}
        for use, rest in self.source.items():
            # With another axis: one row of scales for each iteration of the scan.
            if rest.ndim > 1 or not is_cut:
                taken[use], self.source[use] = shared(rest, 2)
        return taken

    def inside(
        self, arrays: dict[str, Array], lengths: tuple[int, ...] = ()
    ) -> "Slots":
        """Returns the slots in an inner program, with its arrays and scan lengths."""
        source = arrays if isinstance(self.source, dict) else self.source
        return dataclasses.replace(
            self, source=source, lengths=(*self.lengths, *lengths)
        )


_SPLIT = (
    " `nnx.split` renames weights: a state of the NNX module is for `mpx.nnx`, such as "
    "`mpx.nnx.blame`."
)


def _named(use: str, lengths: tuple[int, ...]) -> str:
    """Returns the name of a use of a weight that scans of these lengths slice."""
    return f"{use} of {'x'.join(map(str, lengths))}" if lengths else use


def brief(recipe: AbstractRecipe) -> str:
    """Returns a recipe as code, without options that have their defaults."""
    options = [
        f"{field.name}={getattr(recipe, field.name)!r}"
        for field in dataclasses.fields(recipe)
        if getattr(recipe, field.name) != field.default
    ]
    return f"mpx.{type(recipe).__name__}({', '.join(options)})"
