"""The state of emitting a program: its values, the places in it, and the run.

A value is *declared* (an argument or a constant, moved or sliced perhaps) or computed.
A declared value is cast at each use, so that the gradients of all its uses are summed
in float32; XLA merges the casts. A computed value is cast to half precision once for a
few uses, which then share one gradient in half precision. It is cast to float32 once
for all uses, since adding to a float32 gradient loses nothing.
"""

import contextlib
import dataclasses
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import Saveable, checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive

from .._base.dtypes import HALF
from .._base.jax_compat import scope_names
from .._base.typing import AnyArray, Aval, Shape
from .._program import FEW_USES, DataScope, avals
from .._quantize import AbstractRecipe, HalfCopy, Stored
from .._recipe_state import Slots, StepValues
from .._settings import Rule, Settings, ambient
from .._wire import Gathering
from ._reach import CONSTANT, Origin, Reach

# --- Policies of `jax.checkpoint` and quantized products ------------------------------
#
# JAX asks a policy about each operation. Inside a quantized product it would save the
# sum before the multiplication with the scales, once for each device that the program
# may run on, zeros for the others. XLA fuses the scales into a product only if nothing
# else reads it, so the multiplication became a kernel of its own in each direction: 10
# of the 100 GB that a step of a GPT with `dots_with_no_batch_dims_saveable` moves, and
# in a scan the zeros were stacked (jax 0.10.2, compiled for sm_90, November 2026). So
# the policy is asked about the original product, and the result is saved by its name.

Policy = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Saving:
    """A policy that saves what the given one saves, and quantized products by name.

    Nothing inside a product is saved, even if the policy asks for it: its backward pass
    reads the named result.

    Attributes:
        policy: The given policy.
        depth: The number of policies around it; each saves under a name of its own.
        keeps_wide: Whether float32 under a name is saved instead of bfloat16: see
            `_stacks`.
    """

    policy: Policy
    depth: int = 0
    keeps_wide: bool = False

    def __call__(self, primitive: Primitive, *operands: Aval, **params: object) -> Any:
        """Returns whether the result of an operation is saved."""
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
        """Names the result of a product if the policy saves it.

        Args:
            equation: The original product.
            result: Its result.
        """
        decision = self.policy(
            equation.primitive, *avals(equation.invars), **equation.params
        )
        # Policies that offload to the host return something else, and are left alone.
        is_saved = decision is True or decision is Saveable
        return checkpoint_name(result, self._name) if is_saved else result


# --- Values ---------------------------------------------------------------------------
FULL = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
_CASTABLE = frozenset((*HALF, FULL))


class Facts(NamedTuple):
    """The static facts of a value; part of cache keys.

    Attributes:
        is_declared: Whether it is an argument or a constant, moved or sliced perhaps,
            of a dtype that autocast may cast.
        parameter: The path of the parameter that it is, moved or sliced perhaps. None
            for rows that were looked up in a table.
        origin: The kinds of values that it is computed from.
        is_stored_in_half: Whether it is a part of a half-precision value, or a sum of
            two products. It is stored rounded, which loses no more than the rounding of
            the products did.
        is_stream: Whether it is a half-precision residual stream, moved perhaps.
        is_scaled: Whether it is a matmul that was multiplied by a number already.
        fill: The half-precision number that a mask of scores may select in its place.
    """

    is_declared: bool = False
    parameter: str | None = None
    origin: Origin = Origin.DATA
    is_stored_in_half: bool = False
    is_stream: bool = False
    is_scaled: bool = False
    fill: float | None = None

    @property
    def is_weight(self) -> bool:
        """Whether it is a parameter, or computed from parameters and constants only."""
        return self.origin is Origin.WEIGHT


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """A value of the program: an array in its present dtype, and its facts.

    `cast` decides which array a use reads: the number of uses that share a cast decides
    in which precision JAX sums their gradients. So one use is one call. The first use
    fills in the array of a pending weight, casts and input scales, which changes no
    value; all else is set before anything reads the value.

    Attributes:
        facts: Its static facts.
        is_constant: Whether it is a literal of the program.
        slots: The state of recipes that a weight carries.
        stored: The stored form of the weight, in 8 bits; or its copy in half precision.
        gathering: The pending communication of a sharded float32 weight, once its form
            is known. The value has no array before.
        is_shared: Whether several uses read it, some in float32; see `shared`.
        float32_source: The weight in float32 that the program rounded to it.
        tap: Where a product in a loop leaves what it multiplies the weight with.
        input_scales: By recipe, the scales of the first product that reads it.
        summands: Of a residual addition to which a bias is added: what it adds.
        dtype: Its present dtype, cached: JAX computes that of a tracer slowly.
    """

    _array: Any
    facts: Facts
    is_constant: bool = False
    slots: Slots | None = None
    stored: Stored | None = None
    gathering: Gathering | None = None
    is_shared: bool = False
    float32_source: "Value | None" = None
    tap: "Tap | None" = None
    input_scales: dict[AbstractRecipe, AnyArray] = dataclasses.field(
        default_factory=dict
    )
    summands: "list[Value]" = dataclasses.field(default_factory=list)
    dtype: Any = dataclasses.field(init=False)
    # The casts of a computed value, and the number of uses that share each.
    _casts: dict[np.dtype, list[Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = FULL if self._array is None else self._array.dtype

    @property
    def array(self) -> AnyArray:
        """The array, gathered from other devices if it is pending."""
        if self._array is None and self.gathering is not None:
            self._array = self.gathering.arrive()
        array = cast(AnyArray, self._array)
        if not self.is_shared:
            return array
        made = self._casts.get(array.dtype)
        return made[0] if made else self.cast(array.dtype)

    @property
    def as_operand(self) -> Any:
        """The array that an inner program gets as operand; counts as a use."""
        return self.cast(self.dtype)

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self.array.shape if self.gathering is None else self.gathering.shape

    @property
    def is_computed_in_half(self) -> bool:
        """Whether it was computed, and is in half precision now."""
        dtype = self.dtype
        return not self.facts.is_declared and dtype != FULL and dtype in _CASTABLE

    def shared(self) -> "Value":
        """Returns a half-precision computed value for several uses.

        The gradients of all uses are summed in float32. Otherwise each would be rounded
        first: of p - 1, the gradient of a cross entropy by its logits, which a softmax
        and a label read, nothing remains in bfloat16 where p is 0.999.
        """
        value = Value(self.array, self.facts, slots=self.slots)
        value.float32_source = self.float32_source
        value.offer(self.cast(FULL))
        value.is_shared = True
        return value

    def as_float32(self) -> "Value":
        """Returns a half-precision computed value, cast to be stored in float32."""
        return Value(self.cast(FULL), self.facts._replace(is_stored_in_half=True))

    def offer(self, array: AnyArray) -> None:
        """Adds a cast of the array that was made elsewhere."""
        self._casts[array.dtype] = [array, 0]

    def cast(self, dtype: np.dtype) -> Any:
        """Returns the array in a dtype, for one use."""
        if self.is_constant:
            # By NumPy: JAX would trace the cast, and the constant must stay one.
            with np.errstate(over="ignore"):
                return np.asarray(self.array, dtype)
        read = _converted if self.stored is None else self._read
        if self.facts.is_declared or self.dtype not in _CASTABLE:
            return read(self.array, dtype)
        if self.dtype == FULL == dtype:
            return self.array
        found = self._casts.setdefault(dtype, [None, 0])
        # Any number of uses may share a float32 cast: their gradients are float32.
        if found[0] is None or (dtype != FULL and found[1] >= FEW_USES):
            # The first uses of a half-precision value read the array itself.
            is_first = found[0] is None and (dtype == FULL or not self.is_shared)
            is_own = is_first or self.dtype == FULL
            found[:] = read(self.array if is_own else self.cast(FULL), dtype), 0
        found[1] += 1
        return found[0]

    def _read(self, array: AnyArray, dtype: np.dtype) -> AnyArray:
        """Returns the array in a dtype: its copy if it has one, or a cast."""
        copy = self.copy
        if copy is None or copy.dtype != dtype:
            return _converted(array, dtype)
        return _with_gradient_of(copy, array)

    @property
    def copy(self) -> AnyArray | None:
        """Its copy in half precision, if it has one."""
        return self.stored.payload if isinstance(self.stored, HalfCopy) else None


@dataclasses.dataclass
class Tap:
    """The one product of a loop's weight, whose gradient is computed behind the loop.

    Attributes:
        zeros: An array that gets the gradient of the product's result.
        row: What the product multiplies the weight with.
        product: The product, and the weight's place among its operands.
    """

    zeros: AnyArray
    row: Any = None
    product: Any = None


@jax.custom_jvp
def tapped(result: AnyArray, zeros: AnyArray) -> AnyArray:
    """Returns a result whose gradient goes to the zeros, too, which are not read."""
    return result


@tapped.defjvp
def _(primals: tuple[AnyArray, AnyArray], tangents: tuple[AnyArray, AnyArray]) -> Any:
    return tapped(*primals), jax.lax.add(*tangents)


@jax.custom_jvp
def _with_gradient_of(copy: AnyArray, wide: AnyArray) -> AnyArray:
    """Returns a copy in half precision, as if `wide` were cast here."""
    return copy


@_with_gradient_of.defjvp
def _(primals: tuple[AnyArray, AnyArray], tangents: tuple[AnyArray, AnyArray]) -> Any:
    copy = _with_gradient_of(*primals)
    return copy, jax.lax.convert_element_type(tangents[1], copy.dtype)


def _converted(array: AnyArray, dtype: np.dtype) -> AnyArray:
    if array.dtype == dtype:
        return array
    return jax.lax.convert_element_type(array, dtype)


def is_castable(aval: Aval) -> bool:
    """Returns whether autocast may cast values of this type."""
    return type(aval) is ShapedArray and aval.dtype in _CASTABLE


def computed(array: AnyArray) -> Value:
    """Returns the value of a result of an equation."""
    return Value(array, Facts())


def stream(array: AnyArray) -> Value:
    """Returns the value of a half-precision residual stream."""
    return Value(array, Facts(is_stream=True))


def declared(array: Any, parameter: str | None = None) -> Value:
    """Returns the value of an argument, or of a constant: a parameter without path."""
    if not hasattr(array, "shape"):
        array = np.asarray(array)
    is_data = parameter is None
    if array.dtype not in _CASTABLE:
        return Value(array, Facts(origin=Origin.DATA if is_data else Origin.PATTERN))
    return Value(array, Facts(True, parameter, Origin.DATA if is_data else CONSTANT))


def literal(number: object) -> Value:
    """Returns the value of a literal of the program."""
    # JAX's Python numbers may carry a dtype that NumPy does not see.
    array = np.asarray(number, getattr(number, "dtype", None))
    if array.dtype not in _CASTABLE or array.shape != ():
        return declared(number, "")
    facts = Facts(True, origin=CONSTANT, fill=_fill(array))
    return Value(array, facts, is_constant=True)


# Softmax turns both into zero: the exponential of what is so far below a maximum.
_LOW = -1024.0


def _fill(number: np.ndarray) -> float | None:
    """Returns zero or a number far below zero, in bfloat16; None for others.

    It is finite if the number is: `finfo(float32).min` becomes the least of bfloat16.
    """
    value, least = float(number), float(jnp.finfo(jnp.bfloat16).min)
    if not value <= 0:  # or NaN
        return None
    rounded = float(np.asarray(max(value, least), jnp.bfloat16))
    if np.isinf(value):
        return value
    return rounded if value <= _LOW or rounded == value else None


def is_tpu(settings: Settings) -> bool:
    """Returns whether programs under these settings are compiled for a TPU."""
    return settings.device.platform == "tpu"


_OF_SCORES = ("dot_general", "mul", "div", "select_n", "reduce_max", "sub")


def keeps_scores(settings: Settings) -> bool:
    """Returns whether scores are scaled and masked in half precision."""
    return is_tpu(settings) and _may_round(settings, _OF_SCORES)


_OF_KERNELS = ("add", "mul", "logistic", "tanh", "erf", "reduce_sum")


def hands_on(settings: Settings) -> bool:
    """Returns whether kernels of one region hand on half precision: see `islands`."""
    is_gpu = settings.device.platform == "cuda"
    return is_gpu and _may_round(settings, _OF_KERNELS)


def _may_round(settings: Settings, names: tuple[str, ...]) -> bool:
    """Returns whether bfloat16 is computed in, and no rule is about some primitives."""
    if not settings.is_enabled or settings.dtype != jnp.bfloat16:
        return False
    rules = settings.rules
    return rules.looks_ahead and not any(map(rules._first_of, names))


# --- Places and runs ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an equation in the program.

    Attributes:
        settings: The settings that apply there.
        scopes: The named scopes around it, the outermost first; empty if unused.
        reach: Where the results of the program around it go; empty if no recipe needs
            it.
        has_own_rule: Whether it is in a function with a custom derivative rule, in
            which nothing is quantized.
        sums_over_devices: Whether JAX sums the gradients of arrays that all devices
            share.
        is_recomputed: Whether it is in a region that is recomputed as a whole.
        saving: The policies of the recomputed regions around it, the outermost first,
            if there is a recipe.
        is_in_loop: Whether it is in the body of a loop.
        is_in_while: Whether that is a `while`, which returns no amax: JAX has no
            reverse-mode derivative of it.
        has_wide_loop: Whether it is in a loop that stores no bfloat16: see `_stacks`.
    """

    settings: Settings
    scopes: tuple[str, ...] = ()
    reach: tuple[Reach, ...] = ()
    has_own_rule: bool = False
    sums_over_devices: bool = False
    is_recomputed: bool = False
    saving: tuple[Saving, ...] = ()
    is_in_loop: bool = False
    is_in_while: bool = False
    has_wide_loop: bool = False

    def inside(self, equation: JaxprEqn, names_scopes: bool) -> "Place":
        """Returns the place inside the scopes of an equation.

        Args:
            equation: The equation, which is here.
            names_scopes: Whether the names of scopes are needed.
        """
        scopes = scope_names(equation)
        if not scopes:
            return self
        settings = self.settings.at(scopes)
        if names_scopes:
            named = tuple(s for s in scopes if not isinstance(s, DataScope))
            return dataclasses.replace(
                self, settings=settings, scopes=self.scopes + named
            )
        # `at` returns the same object where no scope is a region: nearly always.
        if settings is self.settings:
            return self
        return dataclasses.replace(self, settings=settings)


@dataclasses.dataclass(frozen=True)
class Uses:
    """The features that a call uses, determined once at its start.

    They stay the same for the whole call, whatever regions and rules set in it. A
    derivative rule that is traced after the call uses those of its call, except for
    notes, which are taken if they are active where it is traced (`Run.for_later`).

    Attributes:
        recipes: Whether anything may be quantized.
        slots: Whether weights carry slots: for a recipe with a state, or because their
            quantized uses are recorded or prescribed.
        scopes: Whether the names of scopes are needed.
        parameters: Whether the parameter of a value is needed. Otherwise paths are not
            distinguished, and equal layers are rewritten once.
        wire: Whether weights and gradients are communicated in the policy's dtypes.
        notes: Whether emitted equations carry notes.
    """

    recipes: bool
    slots: bool
    scopes: bool
    parameters: bool
    wire: bool
    notes: bool

    @classmethod
    def of(
        cls,
        settings: Settings,
        recipes: Collection[AbstractRecipe] = (),
        wants_slots: bool = False,
    ) -> "Uses":
        """Determines the features of a call, from its settings and its recipes."""
        rules = settings.rules if settings.rules.rules else None
        slots = any(r.has_state for r in recipes) or (wants_slots and bool(recipes))
        notes = ambient().takes_notes
        are_named = rules is not None and rules._needs_parameters
        return cls(
            recipes=bool(recipes),
            slots=slots,
            scopes=slots or (rules is not None and rules._needs_scopes),
            parameters=slots or notes or are_named,
            wire=settings.wire is not None,
            notes=notes,
        )


class Programs(weakref.WeakKeyDictionary[Any, dict[Any, Any]]):
    """A store of rewritten programs, each kept as long as its original program.

    Copies, pickled or not, are empty: so an autocast function can be sent to another
    process (Ray, Dask, joblib).
    """

    def __reduce__(self) -> tuple:
        return Programs, ()

    def __deepcopy__(self, memo: object) -> "Programs":
        return Programs()


class Usage(NamedTuple):
    """The usage of a run, reported when the call is over.

    Attributes:
        rules: The rules that matched an operation.
        recipes: The recipes that quantized a product.
        one_row: The recipes that left a product alone only for its batch of one row.
        computes_float16: Whether anything is computed in float16.
    """

    rules: frozenset[Rule] = frozenset()
    recipes: frozenset[AbstractRecipe] = frozenset()
    one_row: frozenset[AbstractRecipe] = frozenset()
    computes_float16: bool = False


@dataclasses.dataclass(eq=False)
class Run:
    """One rewriting of a program.

    Attributes:
        settings: The options of the transform.
        rewrites: The rewriting functions of equations that contain a program, by
            primitive.
        uses: The features in use.
        programs: Inner programs that were rewritten, by program and by all that the
            rewriting depends on. May be kept between calls: JAX returns the same
            program for the same jitted function, and compiles a known one only once.
        spares_final: Whether the output layer is not quantized.
        only_recomputes: Whether nothing is cast, and islands are recomputed anyway.
        traced: Weak references to the tracers that the function was traced with.
        step: The number of the training step, an array, in the program that is being
            emitted; None if it is unknown, or no rounding needs it.
        scale: The loss scale, an array, likewise; None if no rule needs it.
        scales: The scales of recipes in one array, if they are.
        demands: The demands of analysed programs, by their keys.
        islands: Emitted islands, by their keys.
        used: The usage so far.
        parameters: The paths of the weights, where they carry slots.
    """

    settings: Settings
    rewrites: Mapping[str, Any]
    uses: Uses
    programs: Programs = dataclasses.field(default_factory=Programs)
    spares_final: bool = True
    only_recomputes: bool = False
    traced: tuple[weakref.ref[AnyArray], ...] = ()
    step: AnyArray | None = None
    scale: AnyArray | None = None
    scales: AnyArray | None = None
    demands: dict[Any, Any] = dataclasses.field(default_factory=dict)
    islands: dict[Any, Any] = dataclasses.field(default_factory=dict)
    used: Usage = Usage()
    parameters: set[str] = dataclasses.field(default_factory=set)

    @contextlib.contextmanager
    def at_step(self, known: StepValues) -> Iterator[None]:
        """Sets the step's values for an inner program, which has arrays of its own."""
        outside = self.step, self.scale, self.scales
        self.step, self.scale, self.scales = known
        try:
            yield
        finally:
            self.step, self.scale, self.scales = outside

    def note(self, used: Usage) -> None:
        """Records the usage of this program, or of one that is emitted again."""
        self.used = Usage(*map(operator.or_, self.used, used))

    def for_later(self) -> "Callable[[], Run]":
        """Returns access to this run for a derivative rule, which outlives the run.

        A run holds every program that it has met. A rule is part of a rewritten
        program, which must not outlive its original. So a rule holds no run, and gets
        an equivalent one when the run is over.

        Returns:
            A function that returns this run while it exists, and then a new one.
        """
        itself, kept = weakref.ref(self), weakref.ref(self.programs)
        settings, rewrites, uses = self.settings, self.rewrites, self.uses
        options = self.spares_final, self.only_recomputes, self.traced

        def run() -> Run:
            found, notes = itself(), ambient().takes_notes
            if found is None or found.uses.notes != notes:
                here, programs = dataclasses.replace(uses, notes=notes), kept()
                programs = Programs() if programs is None else programs
                found = Run(settings, rewrites, here, programs, *options)
            return found

        return run
