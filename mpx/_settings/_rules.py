"""Rules: the user's precision for single operations, instead of autocast's choice.

A rule has conditions, all of which must match, and a precision. The first rule of
`Rules` that matches an operation decides; if there is none, autocast decides.

Rules are for operations that compute. Data movement runs in the precision of its
operand; the program's own casts are respected; a program within the program (a scan, a
function under jit) is entered, and the rules apply inside. Only a rule that names such
a primitive, with `Precision.DECLARED`, keeps autocast out of it.
"""

import contextlib
import dataclasses
import enum
import fnmatch
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from .._base.errors import describe
from .._program import PRIMITIVES, PrimitiveClass, aval_of, count, line_of
from .._quantize import AbstractRecipe

_RULE = "`mpx.Rule`"


class Precision(enum.Enum):
    """The precision in which an operation is computed."""

    HALF = "half"
    """Its float32 operands are float16 or bfloat16 when it runs."""
    LOW = "low"
    """Quantized by the active recipe; for matmuls."""
    FULL = "full"
    """Computed in float32."""
    FOLLOW = "follow"
    """In float32 if one of its operands was computed in float32, else in half."""
    DECLARED = "declared"
    """Unchanged, as written."""


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """An operation of the program, the argument of a rule's function.

    Attributes:
        primitive: The primitive's name: `dot_general`, `exp`, ...
        kind: Its class, which sets what autocast does by default.
        dtype: The half-precision dtype in use here.
        scopes: The named scopes around it, the outermost first.
        equation: The equation before autocast: operands and results with their declared
            dtypes (`equation.invars[i].aval`), and parameters.
        in_dtypes: The present dtypes of its operands.
        parameters: For each operand the path of its parameter, possibly moved or
            sliced, and None for operands that are not parameters.
    """

    primitive: str
    kind: PrimitiveClass
    dtype: np.dtype
    scopes: tuple[str, ...]
    equation: JaxprEqn
    in_dtypes: tuple[np.dtype, ...]
    parameters: tuple[str | None, ...]

    @property
    def multiplications(self) -> int:
        """The number of multiplications of a matmul; 0 for any other operation."""
        own = getattr(self.equation.params.get("operation"), "multiplications", None)
        if own is not None:  # mpx's own operations have it
            return own([aval_of(v) for v in self.equation.invars])
        if self.primitive != "dot_general":
            return 0
        contracted = self.equation.params["dimension_numbers"][0][0]
        shape = aval_of(self.equation.invars[0]).shape
        results = count(aval_of(self.equation.outvars[0]).shape)
        return results * count(shape[i] for i in contracted)

    @property
    def line(self) -> str:
        """The line of the user's code that it comes from; "" if unknown."""
        return line_of(self.equation)


Rewrite = Callable[[Candidate, list[Any]], tuple[Sequence[Any], dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A precision for the operations that match its conditions.

    Attributes:
        precision: The precision they are computed in; `Precision.LOW` quantizes matmuls
            of any operands by the active recipe. Or a recipe, for weight matmuls. Or a
            function that gets the operation and its operands in their present dtypes,
            and returns operands and parameters to bind the primitive to.
        primitive: The name of a primitive, or several; `*` and `?` match any text and
            any letter, here and below.
        scope: Named scopes, joined by `/`: `attention`, `layer*/softmax`. It may begin
            at any scope, and matches everything inside the last one.
        parameter: The path of a parameter that must be an operand, possibly moved or
            sliced: `layers[0].weight`, `*bias`.
        when: A function of the operation that returns whether the rule applies.

    Raises:
        TypeError: `precision` is not one of these, `when` is not a function, or another
            condition is not a string.
        ValueError: The rule has no condition, or an empty one.

    Examples:
        >>> import mpx
        >>> mpx.Rule(mpx.Precision.FULL, primitive="dot_general", scope="head").scope
        'head'
    """

    precision: Precision | AbstractRecipe | Rewrite
    primitive: str | tuple[str, ...] | None = None
    scope: str | None = None
    parameter: str | None = None
    when: Callable[[Candidate], bool] | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        self._check_precision()
        _check_text("primitive", self.primitive, several=True)
        _check_text("scope", self.scope)
        _check_text("parameter", self.parameter)
        if self.when is not None and not callable(self.when):
            raise TypeError(
                "`when` of `mpx.Rule` must be a function `when(candidate) -> bool`; "
                f"got {describe(self.when)}."
            )
        conditions = (self.primitive, self.scope, self.parameter, self.when)
        if all(condition is None for condition in conditions):
            raise ValueError(
                "`mpx.Rule` needs a condition: `primitive`, `scope`, `parameter` or "
                '`when`. For every operation: `primitive="*"`.'
            )

    def _check_precision(self) -> None:
        given = self.precision
        if is_recipe_class(given):
            raise TypeError(
                "`precision` of `mpx.Rule` must be a recipe, not its class; got "
                f"{describe(given)}. Call it: `{as_written(given)}`."
            )
        is_named = isinstance(given, Precision | AbstractRecipe)
        if not is_named and (isinstance(given, type) or not callable(given)):
            raise TypeError(
                "`precision` of `mpx.Rule` must be a `mpx.Precision`, a recipe or a "
                "function `rewrite(candidate, operands)`; got "
                f"{describe(given)}. For float32: `mpx.Precision.FULL`."
            )

    def __str__(self) -> str:
        """Returns the rule in short, for reports and messages."""
        what = self.precision
        text = what.value if isinstance(what, Precision) else _name(what)
        given = {
            "primitive": self.primitive,
            "scope": self.scope,
            "parameter": self.parameter,
            "when": None if self.when is None else _name(self.when),
        }
        where = ", ".join(f"{k} {v}" for k, v in given.items() if v is not None)
        return f"{text} for {where}"

    def _holds(self, candidate: Candidate) -> bool:
        """Returns whether all conditions match an operation."""
        if self._is_for_products and candidate.kind is not PrimitiveClass.HALF:
            return False
        return self._holds_at(
            candidate.primitive, candidate.scopes, candidate.parameters
        ) and (self.when is None or bool(self.when(candidate)))

    def _holds_at(
        self, primitive: str, scopes: Sequence[str], parameters: Sequence[str | None]
    ) -> bool:
        """Returns whether the conditions on name, scope and parameter match."""
        if not self._holds_for_primitive(primitive):
            return False
        if self.scope is not None and not is_within(scopes, self.scope):
            return False
        paths = (path for path in parameters if path is not None)
        path = self.parameter
        return path is None or any(matches(found, path) for found in paths)

    def _rewritten(
        self, candidate: Candidate, operands: list[Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Returns operands and parameters of an operation by the user's function."""
        rewrite: Any = self.precision
        given = rewrite(candidate, operands)
        if isinstance(given, tuple | list) and len(given) == 2:
            arrays, params = given
            is_whole = isinstance(arrays, tuple | list) and len(arrays) == len(operands)
            if is_whole and isinstance(params, Mapping):
                return arrays, dict(params)
        raise self._refused(
            candidate, f"{describe(given)} for {len(operands)} operands"
        )

    def _refused(self, candidate: Candidate, got: str) -> TypeError:
        """Returns the error for an invalid result of the user's function."""
        return TypeError(
            f"The function `{_name(self.precision)}`, the `precision` of a "
            "`mpx.Rule`, must return operands and parameters of the operation "
            f"{candidate.primitive}; got {got}. To keep it unchanged: `return "
            "operands, candidate.equation.params`."
        )

    @contextlib.contextmanager
    def _binding(self, candidate: Candidate) -> Iterator[None]:
        """Converts errors into ones that name the rule's function and the operation."""
        try:
            yield
        except Exception as error:
            refused = f"what JAX rejects: {type(error).__name__}: {error}"
            raise self._refused(candidate, refused.rstrip(". ")) from error

    def _check_shape(self, candidate: Candidate, got: Any, wanted: Any) -> None:
        """Raises if a result does not have the shape that the program expects."""
        if got.shape != wanted.shape:
            shapes = f"a result of shape {got.shape} instead of {wanted.shape}"
            raise self._refused(candidate, shapes)

    def _holds_for_primitive(self, name: str) -> bool:
        """Returns whether the condition on the primitive matches."""
        named = self.primitive
        patterns = (named,) if isinstance(named, str) else named
        return patterns is None or any(matches(name, one) for one in patterns)

    @property
    def _is_for_products(self) -> bool:
        """Whether it quantizes, which only matmuls can be."""
        is_recipe = isinstance(self.precision, AbstractRecipe)
        return is_recipe or self.precision is Precision.LOW

    @property
    def _asks_for_all(self) -> bool:
        """Whether a function gets everything known about an operation."""
        is_named = isinstance(self.precision, Precision | AbstractRecipe)
        return self.when is not None or not is_named

    @property
    def _is_about_primitives(self) -> bool:
        """Whether the name of the primitive is the only condition."""
        return self.scope is None and self.parameter is None and self.when is None


def _name(func: object) -> str:
    return getattr(func, "__name__", type(func).__name__)


def matches(text: str, pattern: str) -> bool:
    """Returns whether a name or path matches a pattern; brackets are literal."""
    return _pattern(pattern).match(text) is not None


@functools.lru_cache(maxsize=256)
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")))


def is_within(scopes: Sequence[str], pattern: str) -> bool:
    """Returns whether a path of scopes, from any of them on, matches a pattern."""
    count = pattern.count("/") + 1
    parts = "/".join(scopes).split("/")  # a scope's name may contain a slash
    return any(
        matches("/".join(parts[i : i + count]), pattern)
        for i in range(len(parts) - count + 1)
    )


@dataclasses.dataclass(frozen=True, init=False)
class Rules:
    """An ordered list of rules; the first that matches an operation decides.

    Attributes:
        rules: The rules.
        looks_ahead: Whether autocast takes into account in which precision a value is
            used later. If False, each operation is decided alone: data movement keeps
            its input's dtype, and operations that select values do not round first.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="dot_general"))
        >>> product = mpx.autocast(jnp.dot, rules=rules)
        >>> w = jnp.ones((2, 2))
        >>> [e.primitive.name for e in jax.make_jaxpr(product)(w, w).eqns]
        ['dot_general']
    """

    rules: tuple[Rule, ...]
    looks_ahead: bool

    def __init__(self, *rules: Rule, looks_ahead: bool = True) -> None:
        """Creates an ordered list of rules.

        Raises:
            TypeError: A rule is not a `mpx.Rule`, or `looks_ahead` is not a boolean.
        """
        for rule in rules:
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"`mpx.Rules(*rules)` needs `mpx.Rule`s; got {describe(rule)}."
                )
        object.__setattr__(self, "rules", rules)
        is_ahead = read_switch("looks_ahead", looks_ahead, "`mpx.Rules`")
        object.__setattr__(self, "looks_ahead", is_ahead)

    @classmethod
    def like_pytorch(cls, *rules: Rule) -> "Rules":
        """Returns the operation lists of PyTorch's autocast, after your own rules.

        PyTorch decides for each operation alone and has shorter lists: powers,
        exponentials, logarithms, sums, products, norms, softmax and losses run in
        float32, matmuls and convolutions in half precision, everything else in the
        widest dtype of its operands. The lists are those of "CUDA Ops that can
        autocast" in PyTorch's documentation of `torch.amp`, read for JAX's primitives.

        Args:
            *rules: Rules that take precedence over these lists.

        Returns:
            The rules.
        """
        full = Rule(Precision.FULL, primitive=_PYTORCH_FULL)
        follow = Rule(Precision.FOLLOW, primitive=_PYTORCH_FOLLOW)
        return cls(*rules, full, follow, looks_ahead=False)

    @property
    def _recipes(self) -> tuple[AbstractRecipe, ...]:
        """Returns the recipes of the rules."""
        found = (r.precision for r in self.rules)
        return tuple(p for p in found if isinstance(p, AbstractRecipe))

    @property
    def _needs_scopes(self) -> bool:
        """Whether a rule has a condition on scopes."""
        return any(r.scope is not None or r._asks_for_all for r in self.rules)

    @property
    def _needs_parameters(self) -> bool:
        """Whether a rule has a condition on paths of parameters."""
        return any(r.parameter is not None or r._asks_for_all for r in self.rules)

    def _find(self, candidate: Candidate) -> Rule | None:
        """Returns the first rule that matches an operation, or None."""
        return next((r for r in self.rules if r._holds(candidate)), None)

    def _find_for_program(self, name: str) -> Rule | None:
        """Returns a rule that keeps autocast out of an inner program, or None."""
        for rule in self.rules:
            # `*` means operations: it would keep autocast out of the whole function.
            names_it = rule._is_about_primitives and rule.primitive != "*"
            if names_it and rule._holds_for_primitive(name):
                return rule if rule.precision is Precision.DECLARED else None
        return None

    def _first_of(self, name: str) -> Rule | None:
        """Returns the first rule that may match a primitive's operations, or None."""
        return next((r for r in self.rules if r._holds_for_primitive(name)), None)


_PYTORCH_FULL = tuple(
    """
    acos asin cosh cumprod cumsum cumlogsumexp erf_inv exp exp2 expm1 integer_pow log
    log1p log2 polynomial pow reduce_prod reduce_sum rsqrt sinh square tan
    """.split()
)
_PYTORCH_FOLLOW = tuple(
    name
    for name, known in PRIMITIVES.items()
    if known.kind is PrimitiveClass.FULL and name not in _PYTORCH_FULL
)


# --- Reading options ------------------------------------------------------------------


def is_recipe_class(value: object) -> bool:
    """Returns whether a value is a class of recipes."""
    return isinstance(value, type) and issubclass(value, AbstractRecipe)


def as_written(recipe: object) -> str:
    """Returns a recipe or class of recipes as Python code: `mpx.DelayedScaling()`."""
    made = recipe if isinstance(recipe, type) else type(recipe)
    options = "" if isinstance(recipe, type) or recipe == _default(made) else "..."
    return f"mpx.{made.__name__}({options})"


def _default(made: type) -> object:
    try:
        return made()
    except TypeError:  # a class with required arguments
        return None


def read_switch(name: str, value: object, caller: str) -> bool:
    """Reads an option that is True or False.

    Args:
        name: The option's name.
        value: The value passed.
        caller: The public call to name in an error.

    Raises:
        TypeError: It is neither. A text such as "no" would count as True.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`{name}` of {caller} must be True or False; got {describe(value)}."
        )
    return bool(value)


def _check_text(name: str, value: object, several: bool = False) -> None:
    """Raises unless a condition is a non-empty string: an empty one never matches."""
    if value is None:
        return
    texts = value if several and isinstance(value, tuple) else (value,)
    for text in texts:
        if not isinstance(text, str):
            kind = "a string, or a tuple of strings" if several else "a text"
            raise TypeError(f"`{name}` of {_RULE} must be {kind}; got {_shown(value)}.")
    if not texts or "" in texts:
        raise ValueError(
            f"`{name}` of {_RULE} must not be empty; got {value!r}, which matches "
            "nothing. Omit it, or use `*` for all."
        )


def _shown(value: object) -> str:
    """Formats a short list as Python code, and describes other values."""
    if isinstance(value, tuple | list | set | frozenset) and len(repr(value)) < 80:
        return repr(value)
    return describe(value)
