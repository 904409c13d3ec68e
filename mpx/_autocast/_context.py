"""What is known while a program is emitted again: of values, of places, of the run.

A value is *declared* (an argument or a constant, moved or sliced perhaps) or computed.
A declared value is cast at each use, so that the gradients of all its uses are summed
in float32; XLA merges the casts. A computed value is cast to half precision once for a
few uses, which then share one gradient in half precision; and once to float32 for all
of them, since a gradient in float32 loses nothing when others are added to it.
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
from .._quantize import AbstractRecipe, QuantizedArray
from .._recipe_state import Slots, StepValues
from .._settings import Rule, Settings, ambient
from .._wire import Gathering
from ._reach import CONSTANT, Origin, Reach

# ----------------------------------------------------------------------------
# What a policy of `jax.checkpoint` saves of quantized products.
#
# A policy is asked about each operation. Of a quantized product it would save what is
# in it: the sum before it is multiplied with the scales, once for each device that the
# program may run on, zeros for the others. XLA takes the scales into a product only if
# nothing else reads it, so the multiplication became a kernel of its own in each
# direction: 10 of the 100 GB that a step of a GPT with
# `dots_with_no_batch_dims_saveable` moves, and in a scan the zeros were stacked (jax
# 0.10.2, compiled for sm_90, November 2026). So the policy is asked about the product
# as it was written, and its result gets a name, which is what is saved.

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


# ----------------------------------------------------------------------------

FULL = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
_CASTABLE = frozenset((*HALF, FULL))


class Facts(NamedTuple):
    """What is known of a value without knowing the value; a key of caches.

    Attributes:
        is_declared: An argument or a constant, moved or sliced perhaps, of a dtype that
            autocast may cast.
        parameter: The path of the parameter that it is, moved or sliced perhaps. Rows
            that were looked up in a table are none.
        origin: What it is computed from.
        is_stored_in_half: A part of what was half precision, or a sum of two products:
            what is stored of it is rounded, which costs no more than the rounding of
            the products did.
        is_stream: A residual stream that is half precision, moved perhaps.
    """

    is_declared: bool = False
    parameter: str | None = None
    origin: Origin = Origin.DATA
    is_stored_in_half: bool = False
    is_stream: bool = False

    @property
    def is_weight(self) -> bool:
        """A parameter, or computed from parameters and constants alone."""
        return self.origin is Origin.WEIGHT


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """A value of the program: an array in its present dtype, and its facts.

    Which array a use reads is decided here, by `cast`, and not by the use: how many
    share a cast decides in which precision JAX sums their gradients. So one use is one
    call. What the first use fills in (the array of a pending weight, casts, scales of
    the input) changes no number; all else is set before anything reads the value.

    Attributes:
        facts: What is known of it.
        is_constant: Whether it is a number that stands in the program.
        slots: The state of recipes that a weight carries.
        stored: The same numbers in 8 bits, as a weight is stored.
        gathering: Of a float32 weight that other devices send, once it is known in
            which form. It has no array before.
        is_shared: Whether several read it, some in float32; see `shared`.
        float32_source: The weight in float32 that the program rounded to it.
        input_scales: By recipe, of the first product that reads it.
        dtype: The dtype that it has now. Of a tracer JAX takes long to say it.
    """

    _array: Any
    facts: Facts
    is_constant: bool = False
    slots: Slots | None = None
    stored: QuantizedArray | None = None
    gathering: Gathering | None = None
    is_shared: bool = False
    float32_source: "Value | None" = None
    input_scales: dict[AbstractRecipe, AnyArray] = dataclasses.field(
        default_factory=dict
    )
    dtype: Any = dataclasses.field(init=False)
    # The casts of a computed value, and by how many uses each is shared.
    _casts: dict[np.dtype, list[Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = FULL if self._array is None else self._array.dtype

    @property
    def array(self) -> AnyArray:
        """The array."""
        if self._array is None and self.gathering is not None:
            self._array = self.gathering.arrive()
        array = cast(AnyArray, self._array)
        if not self.is_shared:
            return array
        made = self._casts.get(array.dtype)
        return made[0] if made else self.cast(array.dtype)

    @property
    def as_operand(self) -> Any:
        """The array that a program inside gets of it, which is a use."""
        return self.cast(self.dtype)

    @property
    def shape(self) -> Shape:
        """The shape that it has."""
        return self.array.shape if self.gathering is None else self.gathering.shape

    @property
    def is_computed_in_half(self) -> bool:
        """Whether it was computed, and is half precision now."""
        dtype = self.dtype
        return not self.facts.is_declared and dtype != FULL and dtype in _CASTABLE

    def shared(self) -> "Value":
        """What was computed in half precision, for several users.

        The gradients of all are summed in float32. Each would else be rounded before:
        of p - 1, the gradient of a cross entropy by its logits, which a softmax and a
        label read, nothing is left in bfloat16 where p is 0.999.
        """
        value = Value(self.array, self.facts, slots=self.slots)
        value.float32_source = self.float32_source
        value.offer(self.cast(FULL))
        value.is_shared = True
        return value

    def as_float32(self) -> "Value":
        """What was computed in half precision, to be read and stored elsewhere."""
        facts = self.facts._replace(is_stored_in_half=True)
        return Value(self.cast(FULL), facts)

    def offer(self, array: AnyArray) -> None:
        """Gives a cast of the array that was made elsewhere."""
        self._casts[array.dtype] = [array, 0]

    def cast(self, dtype: np.dtype) -> Any:
        """The array in a dtype, for one use."""
        if self.is_constant:
            # By NumPy and not by JAX, which would trace it: a number stays a number.
            with np.errstate(over="ignore"):
                return np.asarray(self.array, dtype)
        if self.facts.is_declared or self.dtype not in _CASTABLE:
            return _converted(self.array, dtype)
        if self.dtype == FULL == dtype:
            return self.array
        found = self._casts.setdefault(dtype, [None, 0])
        # In float32 the gradients of any number of uses may be summed.
        if found[0] is None or (dtype != FULL and found[1] >= FEW_USES):
            # The first uses of a half precision value read the array itself.
            is_first = found[0] is None and (dtype == FULL or not self.is_shared)
            is_own = is_first or self.dtype == FULL
            array = self.array if is_own else self.cast(FULL)
            found[:] = _converted(array, dtype), 0
        found[1] += 1
        return found[0]


def _converted(array: AnyArray, dtype: np.dtype) -> AnyArray:
    if array.dtype == dtype:
        return array
    return jax.lax.convert_element_type(array, dtype)


def is_castable(aval: Aval) -> bool:
    """Whether values of this type are ones that autocast may cast."""
    return type(aval) is ShapedArray and aval.dtype in _CASTABLE


def computed(array: AnyArray) -> Value:
    """A value that an equation gave."""
    return Value(array, Facts())


def stream(array: AnyArray) -> Value:
    """A residual stream that is half precision."""
    return Value(array, Facts(is_stream=True))


def declared(array: Any, parameter: str | None = None) -> Value:
    """An argument, or a constant, which is a parameter without a path."""
    if not hasattr(array, "shape"):
        array = np.asarray(array)
    is_data = parameter is None
    if array.dtype not in _CASTABLE:
        return Value(array, Facts(origin=Origin.DATA if is_data else Origin.PATTERN))
    return Value(array, Facts(True, parameter, Origin.DATA if is_data else CONSTANT))


def literal(number: object) -> Value:
    """A number that stands in the program."""
    # A Python number of JAX's own may carry a dtype that numpy does not see.
    array = np.asarray(number, getattr(number, "dtype", None))
    if array.dtype not in _CASTABLE or array.shape != ():
        return declared(number, "")
    return Value(array, Facts(True, origin=CONSTANT), is_constant=True)


# --- Places and runs ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the program an equation stands.

    Attributes:
        settings: What holds there.
        scopes: The named scopes around it, the outermost first, if anybody asks.
        reach: Where the results of the program that it stands in go; empty if no
            recipe asks.
        has_own_rule: Whether it is part of a function with a derivative rule of its
            own, in which nothing is quantized.
        sums_over_devices: Whether JAX sums the gradients of what all devices share.
        is_recomputed: Whether it is part of something that is recomputed as a whole.
        saving: The policies of what is recomputed around it, the outermost first, if
            there is a recipe.
        is_in_loop: Whether it is in the body of a loop.
        is_in_while: Whether that is a `while`, from which no amax comes back: JAX has
            no reverse-mode derivative of it.
        has_wide_loop: Whether it is in a loop that keeps no bfloat16: see `_wide`.
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
        """The place inside of the scopes of an equation that stands here.

        Args:
            equation: The equation.
            names_scopes: Whether anybody asks for the names of scopes.
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
        # `at` gives the same object where no scope is a region, as nearly always.
        if settings is self.settings:
            return self
        return dataclasses.replace(self, settings=settings)


@dataclasses.dataclass(frozen=True)
class Uses:
    """Which features a call uses: asked once, where it begins.

    They hold for all of the call, whatever regions and rules say in it. A derivative
    rule that is traced when the call is over goes by those of its call, but for notes,
    which are taken where it is traced (`Run.for_later`).

    Attributes:
        recipes: Whether anything may be quantized.
        slots: Whether weights carry slots: for a recipe with a state, or because
            which uses of them are quantized is recorded, or prescribed.
        scopes: Whether anybody asks for the names of scopes.
        parameters: Whether anybody asks which parameter a value is. If not, paths are
            not kept apart, and equal layers are rewritten once.
        payloads: Whether weights may be stored in 8 bits that a product reads.
        wire: Whether weights and gradients travel between devices in dtypes of the
            policy.
        notes: Whether what is emitted carries notes.
    """

    recipes: bool
    slots: bool
    scopes: bool
    parameters: bool
    payloads: bool
    wire: bool
    notes: bool

    @classmethod
    def of(
        cls,
        settings: Settings,
        recipes: Collection[AbstractRecipe] = (),
        wants_slots: bool = False,
        has_payloads: bool = False,
    ) -> "Uses":
        """Those of a call with settings, in whose program these recipes stand."""
        rules = settings.rules if settings.rules.rules else None
        slots = any(r.has_state for r in recipes) or (wants_slots and bool(recipes))
        notes = ambient().takes_notes
        are_named = rules is not None and rules._needs_parameters
        return cls(
            recipes=bool(recipes),
            slots=slots,
            scopes=slots or (rules is not None and rules._needs_scopes),
            parameters=slots or notes or are_named,
            payloads=has_payloads and bool(recipes),
            wire=settings.wire is not None,
            notes=notes,
        )


class Programs(weakref.WeakKeyDictionary[Any, dict[Any, Any]]):
    """A store for rewritten programs, each as long as the one it was made from.

    Pickled or copied it is empty: so a function that autocast made may be sent to
    another process (Ray, Dask, joblib).
    """

    def __reduce__(self) -> tuple:
        return Programs, ()

    def __deepcopy__(self, memo: object) -> "Programs":
        return Programs()


class Usage(NamedTuple):
    """What has been used, for what is reported when a call is over.

    Attributes:
        rules: The rules that applied to an operation.
        recipes: The recipes that quantized a product.
        one_row: Those that left one alone only for its batch of one row.
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
        rewrites: How equations that hold a program are rewritten, by primitive.
        uses: Which features are in use.
        programs: Inner programs that were rewritten, by program and by how it was met.
            They may be kept from call to call: JAX gives the same program for the same
            jitted function, and compiles what it finds again only once.
        spares_final: Whether the final projection is left alone.
        only_recomputes: Whether nothing is cast, and islands are recomputed anyway.
        traced: What the function was traced with, which is no more; weak references.
        step: The number of the training step, an array, in the program that is being
            emitted; None if it is unknown, or nothing rounds by it.
        scale: The scale of the loss, an array, likewise; None if no rule asks for it.
        demands: The demands of programs that were analysed, by their keys.
        islands: Islands that were emitted, by what they have in common.
        used: What has been used so far.
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
    demands: dict[Any, Any] = dataclasses.field(default_factory=dict)
    islands: dict[Any, Any] = dataclasses.field(default_factory=dict)
    used: Usage = Usage()
    parameters: set[str] = dataclasses.field(default_factory=set)

    @contextlib.contextmanager
    def at_step(self, known: StepValues) -> Iterator[None]:
        """In a program within, what is known of the step are other arrays."""
        outside = self.step, self.scale
        self.step, self.scale = known
        try:
            yield
        finally:
            self.step, self.scale = outside

    def note(self, used: Usage) -> None:
        """Notes what is used, here or in what is emitted again."""
        self.used = Usage(*map(operator.or_, self.used, used))

    def for_later(self) -> "Callable[[], Run]":
        """How a derivative rule, which outlives a run, gets at it.

        A run holds every program that it has met, and a rule stands in a rewritten one,
        which is to live no longer than the program that it was made from. So a rule
        holds no run; when the run is over, it gets another one that is like it.

        Returns:
            A function that gives this run as long as it is there, and then a new one.
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
