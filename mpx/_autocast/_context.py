"""What is known while a program is emitted again: of values, of places, of the run.

Three *provenances* say how a float32 value of the program came to be:

- *declared*: an argument or a constant, or such a value moved or sliced. It may become
  half at each use.
- *half*: computed in half precision.
- *full*: computed in float32; what it meets is computed in float32, too.

A declared value is cast anew at each use, so that the gradients of all its uses are
summed in float32; XLA merges the casts. A computed value is cast once for a few uses,
which then share one gradient in half precision.
"""

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import JaxprEqn

from .._jax_compat import scope_names
from .._program import DataScope
from .._quantize import AbstractRecipe, DelayedScaling
from .._recipe_state import Slots
from .._settings import Settings
from .._typing import AnyArray, Aval, Shape
from .._wire import Asked, Entered, Gathering

FULL = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
_CASTABLE = frozenset(np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32))

# The gradients of so many uses of a computed value are summed in half precision: a
# block's norm feeds three products, and no digits are lost in a sum of eight.
_USES_OF_A_CAST = 8


# A weight in `jax.shard_map`, and any that other devices send.
Entering: TypeAlias = Asked | Entered
Arriving: TypeAlias = Gathering | Entering


class Provenance(enum.Enum):
    """How a value of float16, bfloat16 or float32 came to be."""

    DECLARED = "declared"
    HALF = "half"
    FULL = "full"
    OTHER = "other"
    """Not a value that autocast would touch."""


class Facts(NamedTuple):
    """What is known of a value without knowing the value; a key of caches.

    Attributes:
        provenance: Its provenance.
        is_broadcast: A declared value that was broadcast, or a scalar.
        is_product: What a matrix product gave, moved perhaps.
        literal: The number that all of its elements are, if it is known.
        parameter: The path of the parameter that it is, moved or sliced perhaps. Rows
            that were looked up in a table are none.
        is_fixed: Computed, but from parameters and constants alone.
        is_weight: A parameter, or computed from parameters and constants alone.
    """

    provenance: Provenance
    is_broadcast: bool = False
    is_product: bool = False
    literal: float | None = None
    parameter: str | None = None
    is_fixed: bool = False
    is_weight: bool = False


class Value:
    """A value of the program: an array in its present dtype, and its facts."""

    __slots__ = (
        "_array",
        "_casts",
        "arriving",
        "facts",
        "input_scales",
        "is_constant",
        "narrow",
        "slots",
        "wide",
        "widened_by",
    )

    def __init__(
        self,
        array: Any,
        facts: Facts,
        is_constant: bool = False,
        slots: Slots | None = None,
    ) -> None:
        """Makes a value.

        Args:
            array: The array.
            facts: What is known of it.
            is_constant: Whether it is a number that stands in the program.
            slots: The state of recipes that a weight carries.
        """
        self._array: Any = array
        self.arriving: Arriving | None = None
        self.facts = facts
        self.is_constant = is_constant
        self.slots = slots
        # The equation that cast it from half to float32, and the array that it cast.
        self.widened_by: JaxprEqn | None = None
        self.narrow: AnyArray | None = None
        # The weight in float32 that the program rounded to it.
        self.wide: Value | None = None
        # By recipe, of the first product that reads it.
        self.input_scales: dict[AbstractRecipe, AnyArray] = {}
        # The cast of a computed value, and by how many uses it is shared.
        self._casts: dict[np.dtype, list[Any]] = {}

    @classmethod
    def on_its_way(
        cls, arriving: "Arriving", facts: Facts, slots: Slots | None
    ) -> "Value":
        """A float32 weight that other devices send, once it is known in which form."""
        value = cls(None, facts, slots=slots)
        value.arriving = arriving
        return value

    @property
    def array(self) -> AnyArray:
        """The array."""
        return self._for_cast_to(None)

    def _for_cast_to(self, dtype: np.dtype | None) -> Any:
        """The array, for a use that casts it to a dtype and reads no more digits."""
        if self._array is None and self.arriving is not None:
            array = self.arriving.arrive(dtype)
            if self.has_entered:  # each use says what it reads
                return array
            self._array = array
        return self._array

    @property
    def has_entered(self) -> bool:
        """Whether it is a weight that entered `jax.shard_map` in the forms it needs."""
        return isinstance(self.arriving, Entering)

    @property
    def handed(self) -> Any:
        """What a program inside gets of it, a tree of arrays: see `enter`."""
        return self.arriving if self.has_entered else self.array

    @property
    def dtype(self) -> Any:
        """The dtype that it has now."""
        return self.array.dtype if self.arriving is None else FULL

    @property
    def shape(self) -> Shape:
        """The shape that it has."""
        return self.array.shape if self.arriving is None else self.arriving.shape

    def offer(self, array: AnyArray) -> None:
        """Gives a cast of the array that was made elsewhere."""
        self._casts[array.dtype] = [array, 0]

    def cast(self, dtype: np.dtype) -> tuple[Any, bool]:
        """The array in a dtype, and whether a cast for an earlier use is used again."""
        if self.dtype == dtype:
            return self.array, False
        if self.is_constant:
            # By NumPy and not by JAX, which would trace it: a number stays a number.
            with np.errstate(over="ignore"):
                return np.asarray(self.array, dtype), False
        if self.facts.provenance is Provenance.DECLARED:
            array = self._for_cast_to(dtype)
            return jax.lax.convert_element_type(array, dtype), False
        cast = self._casts.get(dtype)
        if cast is None or cast[1] >= _USES_OF_A_CAST:
            array = jax.lax.convert_element_type(self.array, dtype)
            self._casts[dtype] = [array, 1]
            return array, False
        cast[1] += 1
        return cast[0], True


def is_castable(aval: Aval) -> bool:
    """Whether values of this type are ones that autocast may cast."""
    return type(aval) is ShapedArray and aval.dtype in _CASTABLE


def computed(
    array: AnyArray, is_product: bool = False, is_fixed: bool = False
) -> Value:
    """A value that an equation gave."""
    dtype = array.dtype
    if dtype not in _CASTABLE:
        return Value(array, Facts(Provenance.OTHER))
    provenance = Provenance.FULL if dtype == FULL else Provenance.HALF
    return Value(array, Facts(provenance, is_product=is_product, is_fixed=is_fixed))


def declared(array: Any, parameter: str | None = None) -> Value:
    """An argument or a constant."""
    if not hasattr(array, "shape"):
        array = np.asarray(array)
    if array.dtype not in _CASTABLE:
        return Value(array, Facts(Provenance.OTHER))
    is_scalar = array.shape == ()
    return Value(array, Facts(Provenance.DECLARED, is_scalar, parameter=parameter))


def constant(array: Any, parameter: str | None = None) -> Value:
    """A constant of the program, a number of which is known to be it."""
    value = declared(array, parameter)
    is_known = value.array.shape == () and not isinstance(array, Tracer)
    if value.facts.provenance is Provenance.DECLARED and is_known:
        return Value(value.array, value.facts._replace(literal=float(array)))
    return value


def literal(number: object) -> Value:
    """A number that stands in the program."""
    # A Python number of JAX's own may carry a dtype that numpy does not see.
    array = np.asarray(number, getattr(number, "dtype", None))
    if array.dtype not in _CASTABLE or array.shape != ():
        return declared(number)
    facts = Facts(Provenance.DECLARED, is_broadcast=True, literal=float(array))
    return Value(array, facts, is_constant=True)


def does_not_fit(number: float, dtype: np.dtype) -> bool:
    """Whether a number changes its meaning in half precision.

    It becomes infinite, or zero, or so small that few of its digits are left.
    """
    if not np.isfinite(number) or number == 0:
        return False
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.asarray(number, dtype))
    return not abs(rounded - number) <= abs(number) / 64


# --- Places and runs ------------------------------------------------------------------


class Reach(enum.Flag):
    """Where a value goes."""

    LOSS = enum.auto()
    """Into a scalar that the function returns."""
    PRODUCT = enum.auto()
    """Into another product."""
    RESULT = enum.auto()
    """Into another result of the function."""


UNUSED = Reach(0)


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
        is_in_loop: Whether it is in the body of a loop.
        is_in_while: Whether that is a `while`, from which no amax comes back: JAX has
            no reverse-mode derivative of it.
    """

    settings: Settings
    scopes: tuple[str, ...] = ()
    reach: tuple[Reach, ...] = ()
    has_own_rule: bool = False
    sums_over_devices: bool = False
    is_recomputed: bool = False
    is_in_loop: bool = False
    is_in_while: bool = False

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


Programs = MutableMapping[Any, dict[Any, Any]]


def new_programs() -> Programs:
    """A store for rewritten programs, each as long as the one it was made from."""
    return weakref.WeakKeyDictionary()


# In `Run.used`, before a recipe: it left a product alone for this reason only.
ONE_ROW = "a batch of one row"


class Run:
    """One rewriting of a program.

    Attributes:
        settings: What the transform was told.
        rewrites: How equations that hold a program are rewritten, by primitive.
        needs_parameters: Whether anybody asks which parameter a value is. If not,
            paths are not kept apart, and equal layers are rewritten once.
        demands: The demands of programs that were analysed, by their keys.
        programs: Inner programs that were rewritten, by program and by how it was met.
            They may be kept from call to call: JAX gives the same program for the same
            jitted function, and compiles what it finds again only once.
        islands: Islands that were emitted, by what they have in common.
        used: The rules that held for an operation, the recipes that quantized one, or
            would have but for `ONE_ROW`, and float16 if anything is computed in it.
        has_recipe: Whether anything may be quantized.
        spares_final: Whether the final projection is left alone.
        is_stateful: Whether a recipe with a state may be among those.
        traced: What the function was traced with, which is no more; weak references.
        only_recomputes: Whether nothing is cast, and islands are recomputed anyway.
        step: The number of the training step, an array, in the program that is being
            emitted; None if nobody knows it or rounds by it.
    """

    def __init__(
        self,
        settings: Settings,
        rewrites: Mapping[str, Any],
        programs: Programs | None = None,
        recipes: Collection[AbstractRecipe] = (),
        spares_final: bool = True,
        only_recomputes: bool = False,
    ) -> None:
        """Starts a run in whose program these recipes stand."""
        self.spares_final = spares_final
        self.only_recomputes = only_recomputes
        self.settings = settings
        self.rewrites = rewrites
        self.has_recipe = bool(recipes)
        self.is_stateful = any(isinstance(r, DelayedScaling) for r in recipes)
        self.needs_scopes = settings.rules._needs_scopes or self.is_stateful
        self.needs_parameters = settings.rules._needs_parameters or self.is_stateful
        self.demands: dict[Any, Any] = {}
        self.islands: dict[Any, Any] = {}
        self.programs = new_programs() if programs is None else programs
        self.used: set[Any] = set()
        self.traced: tuple[weakref.ref[AnyArray], ...] = ()
        self.step: AnyArray | None = None
        self._recipes = recipes

    @contextlib.contextmanager
    def at_step(self, step: AnyArray | None) -> Iterator[None]:
        """In a program within, the step's number is another array."""
        outside, self.step = self.step, step
        try:
            yield
        finally:
            self.step = outside

    def for_later(self) -> "Callable[[], Run]":
        """How a derivative rule, which outlives a run, gets at it.

        A run holds every program that it has met, and a rule stands in a rewritten one,
        which is to live no longer than the program that it was made from. So a rule
        holds no run; when the run is over, it gets another one that is like it.

        Returns:
            A function that gives this run as long as it is there, and then a new one.
        """
        itself, programs = weakref.ref(self), weakref.ref(self.programs)
        settings, rewrites = self.settings, self.rewrites
        options = self._recipes, self.spares_final, self.only_recomputes
        needs_parameters, traced = self.needs_parameters, self.traced

        def run() -> Run:
            found = itself()
            if found is None:
                found = Run(settings, rewrites, programs(), *options)
                found.needs_parameters, found.traced = needs_parameters, traced
            return found

        return run
