"""`mpx.compare`: compares two precisions of a function, layer by layer.

They are two programs with different casts around the user's operations. An operation is
the same in both if scope, line, primitive and shape are equal, and it occurs equally
often. An *anchor* is such an operation of the forward pass; the last common one of each
layer is compared.

A loss is differentiated. Logits are compared as distributions of tokens instead; two
programs that share no operation, such as a decoder with a cache, have these in common.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import Array, PyTree

from ..._base.errors import describe, warn_user
from ..._base.tree import leaves_with_paths
from ..._base.typing import AnyArray, LeafPredicate
from ..._base.wraps import name_of, wraps
from ..._loss_scaling import AbstractLossScaling, NoLossScaling
from ..._program import (
    Location,
    PrimitiveClass,
    Records,
    Span,
    Tagged,
    aval_of,
    is_matmul,
    probed,
    properties,
    source_span,
)
from ..._quantize import Role
from ..._settings import Policy, settings_of
from ..._step import (
    RecipeScaling,
    filter_value_and_grad,
    inference,
    init_scaling,
    refuse_nnx,
)
from .._inspect import Traced, trace
from ._comparison import (
    Closeness,
    Comparison,
    Sums,
    closeness,
    divergence,
    numbered,
    sums,
)
from ._trace import Source, SourceProbe, line, phase_of, where

# --- Anchors --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Anchor:
    """An operation of the forward pass, as the user wrote it.

    Attributes:
        where: The named scopes, or else the functions around it.
        source: The line of the user's code.
        span: The expression, of the user's or of a library, that it comes from.
        primitive: Its primitive.
        shape: The shape of its result inside the (sub)program that contains it.
        number: The number of such operations before it in the program.
    """

    where: str
    source: str
    span: Span | None
    primitive: str
    shape: tuple[int, ...]
    number: int


@dataclasses.dataclass
class Found:
    """The facts of an anchor, from a trace.

    Attributes:
        weights: The paths of the weights in it, if it is a matmul.
        axes: The leading axes of its record: `turn` (an iteration of a loop), `device`.
    """

    weights: tuple[str, ...]
    axes: list[str]

    def turns_first(self, x: AnyArray) -> tuple[AnyArray, int]:
        """Returns a record with the axes of iterations first, and their number."""
        turns = [i for i, axis in enumerate(self.axes) if axis == "turn"]
        return jnp.moveaxis(x, turns, range(len(turns))), len(turns)


class Collect(SourceProbe):
    """Collects values of the forward pass, and notes the anchor of each.

    Args:
        wanted: The anchors whose values are recorded; None records all.
        reverses: Whether sums are computed in reverse order.
    """

    def __init__(
        self, wanted: frozenset[Anchor] | None = None, *, reverses: bool = False
    ) -> None:
        super().__init__()
        self.found: dict[Hashable, Found] = {}
        self._wanted, self._reverses = wanted, reverses
        self._counts: Counter[Anchor] = Counter()

    def compute(self, equation: JaxprEqn, arrays: Sequence[AnyArray]) -> list[AnyArray]:
        """Computes the results; sums in reverse order if requested."""
        if self._reverses:
            arrays = reversed_sums(equation, arrays)
        return super().compute(equation, arrays)

    def observe(
        self,
        equation: JaxprEqn,
        place: Location,
        operands: Sequence[Tagged],
        results: Sequence[Tagged],
    ) -> Records:
        """Returns the value of an anchor, if it is wanted."""
        if not _is_computed(equation) or phase_of(equation, place) != "forward":
            return {}
        path = where(equation, place)
        if not path:  # from a derivative, not the user's code
            return {}
        kind = Anchor(
            path,
            line(equation, place),
            source_span(equation),
            equation.primitive.name,
            tuple(aval_of(equation.outvars[0]).shape),
            0,
        )
        anchor = dataclasses.replace(kind, number=self._counts[kind])
        self._counts[kind] += 1
        weights = [v.tag.path for v in operands if is_matmul(equation)]
        self.found[anchor] = Found(tuple(filter(None, weights)), [])
        wanted = self._wanted is None or anchor in self._wanted
        return {anchor: results[0].array} if wanted else {}

    def stack(self, key: Hashable, axis: str) -> None:
        """Notes the axis."""
        self.found[key].axes.insert(0, axis)


def _is_computed(equation: JaxprEqn) -> bool:
    """Returns whether an operation computes one floating array, of over 8 bits."""
    known = properties(equation.primitive.name)
    if known.moves or known.joins or known.is_free:
        return False
    if known.kind is PrimitiveClass.CONVERT or len(equation.outvars) != 1:
        return False
    aval = aval_of(equation.outvars[0])
    is_float = jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)
    return bool(is_float) and aval.dtype.itemsize > 1 and bool(aval.ndim)


def reversed_sums(equation: JaxprEqn, arrays: Sequence[AnyArray]) -> list[AnyArray]:
    """Returns the operands of an operation, the last summand first if it sums."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        pairs = params["dimension_numbers"][0]
        return [_reversed(x, axes) for x, axes in zip(arrays, pairs, strict=True)]
    if name == "reduce_sum":
        return [_reversed(arrays[0], params["axes"])]
    return list(arrays)


def _reversed(x: AnyArray, axes: Sequence[Any]) -> AnyArray:
    # The barrier keeps XLA from undoing the reversal of both operands.
    return lax.optimization_barrier(lax.rev(x, [*map(int, axes)])) if axes else x


def anchors_of(
    closed: ClosedJaxpr, tags: Sequence[Source]
) -> dict[Anchor, tuple[Found, tuple[int, ...]]]:
    """Returns the anchors of a program in order, each with its record's shape."""
    probe = Collect()

    keys: list[Any] = []

    def keyed(*arrays: AnyArray) -> list[PyTree]:
        _, records = probed(closed, probe, arrays, tags)
        # Set while JAX traces: records have keys, but results only an order.
        keys[:] = records
        return list(records.values())

    shapes = jax.eval_shape(keyed, *closed.in_avals)
    return {
        key: (probe.found[key], tuple(x.shape))
        for key, x in zip(keys, shapes, strict=True)
    }


def common_layers(
    first: dict[Anchor, tuple[Found, tuple[int, ...]]],
    second: dict[Anchor, tuple[Found, tuple[int, ...]]],
) -> list[tuple[str, Anchor, Found]]:
    """Returns each layer's name and last common anchor, in order."""
    numbers = [Counter(_kind(anchor) for anchor in some) for some in (first, second)]

    def is_common(anchor: Anchor) -> bool:
        kind = _kind(anchor)
        if anchor not in second or numbers[0][kind] != numbers[1][kind]:
            return False
        return first[anchor][1] == second[anchor][1]

    layers = []
    for members in _groups(first):
        weights = [path for anchor in members for path in first[anchor][0].weights]
        common = list(filter(is_common, members))
        if common:
            name = _layer(weights) or common[-1].where
            layers.append((name, common[-1], first[common[-1]][0]))
    return layers


def _groups(anchors: Iterable[Anchor]) -> Iterator[list[Anchor]]:
    """Yields the anchors of each layer: one scope, until an operation repeats."""
    group: list[Anchor] = []
    for anchor in anchors:
        is_again = any(_kind(anchor) == _kind(other) for other in group)
        if group and (anchor.where != group[0].where or is_again):
            yield group
            group = []
        group.append(anchor)
    if group:
        yield group


def _kind(anchor: Anchor) -> Anchor:
    return dataclasses.replace(anchor, number=0)


def _layer(paths: Sequence[str]) -> str:
    """Returns the name of the layer with these weights: `blocks[0].fc1`."""
    parts = [path.split(".") for path in dict.fromkeys(paths)]
    if not parts:
        return ""
    if len(parts) == 1:
        return ".".join(parts[0][:-1]) or parts[0][0]
    same = itertools.takewhile(lambda x: len(set(x)) == 1, zip(*parts, strict=False))
    return ".".join(group[0] for group in same)


# --- The comparison -------------------------------------------------------------------

CALL = "`mpx.compare(reference, func)`"


def compare(
    reference: Callable[..., PyTree],
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None = None,
    has_aux: bool = False,
    *,
    policy: Policy | str | None = None,
    keep: LeafPredicate | None = None,
    floor: bool = True,
) -> Callable[..., Comparison]:
    r"""Returns a function that compares two precisions on the same arguments.

    Losses are run and differentiated once, with the same weights, data and keys. The
    comparison measures how far activations are from those of the reference, for each
    layer that both programs have, and how far the gradient is, for each leaf:

    $$\mathrm{SNR} = 10 \log_{10} \frac{\sum a^2}{\sum (a - b)^2} \qquad
    \cos = \frac{\sum a b}{\sqrt{\sum a^2 \sum b^2}}$$

    An operation is the same in both programs if it comes from the same scope and line,
    has the same primitive and shape, and occurs equally often; a layer's activation is
    the last of them. In a loop over layers each iteration is a layer.

    The *floor* is the noise that no precision can be better than: the reference against
    itself, with every sum of its matmuls and reductions in reverse order.

    **Logits** are a floating array `[..., vocabulary]` of two axes or more. If both
    functions return logits instead of a loss, they are not differentiated, and `func`
    computes as in `mpx.inference(func, scaling)`. The comparison then has the
    divergence of Kullback and Leibler of each token, over the last axis, in nats:

    $$\mathrm{KL} = \sum_i p_i \ln \frac{p_i}{q_i}
    = \sum_i q_i - p_i + p_i \ln \frac{p_i}{q_i} \qquad
    p = \mathrm{softmax}(a) \qquad q = \mathrm{softmax}(b)$$

    It is summed in float32 (float64 for such logits) in the second form, whose terms
    are not negative: so logits that differ by 1e-4 have a KL with 3 digits. The two
    programs may differ, for example a batched forward pass and a decoder with a cache:
    activations are compared only where they share operations. With `has_aux`, logits
    in both aux have a KL as well.

    | logits | KL of the token |
    |---|---|
    | -inf in both (a mask) | adds 0 |
    | -inf only in `reference` | adds $q_i$ |
    | -inf only in `func` | inf |
    | NaN, +inf, or only -inf, in one of them | NaN |
    | of magnitudes that overflowed in half precision | by their infinities, as above |

    Args:
        reference: The function to compare with, such as the one without
            `mpx.autocast`: `reference(model, *args)`. It returns a scalar loss, or
            logits: the array, or a dictionary or object with it as `logits`.
        func: The function in another precision, of the same arguments.
        scaling: The loss scaling of `func`, from the run; by default that of a first
            step, from `mpx.init_scaling`, in which scales of a recipe are 1. The
            reference needs none; if it has a recipe and returns logits, pass
            `mpx.inference(reference, scaling)`.
        has_aux: Both return `(loss, aux)`.
        policy: The policy of a loss `func` in the explicit style, as in
            `mpx.filter_value_and_grad`. For logits use `mpx.cast_function`.
        keep: Likewise.
        floor: False omits the floor, which is a third of the cost.

    Returns:
        A function of the arguments of both that returns a `mpx.reports.Comparison`;
        print it. It compiles one program for each shape of the arguments, and stores
        all activations that it compares.

    Raises:
        TypeError: A function is not callable, or it is called inside a function that
            JAX is tracing, or with non-array arguments; also what
            `mpx.filter_value_and_grad` raises.
        ValueError: Logits have different shapes, or only `reference` returns logits;
            also what `mpx.filter_value_and_grad` raises.

    Warns:
        UserWarning: The state has scales and no step was made: they are 1.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> def loss(w, x):
        ...     return jnp.mean(jax.nn.gelu(x @ w["in"]) @ w["out"])
        >>> a, b, c = jax.random.split(jax.random.key(0), 3)
        >>> w = {"in": jax.random.normal(a, (16, 32)), "out": jnp.ones((32, 4))}
        >>> found = mpx.compare(loss, mpx.autocast(loss))(w, jax.random.normal(b, (8, 16)))
        >>> [g.name for g in found.gradients], min(g.snr for g in found.gradients) > 30
        (["['in']", "['out']"], True)
        >>> found.floor > 120
        True
        >>> logits = lambda w, x: jax.nn.gelu(x @ w["in"]) @ w["out"]
        >>> x = jax.random.normal(c, (2, 5, 16))
        >>> found = mpx.compare(logits, mpx.autocast(logits, "float16"))(w, x)
        >>> found.kl.shape, bool(found.kl.max() < 1e-5)
        ((2, 5), True)
    """  # noqa: E501
    for name, value in (("reference", reference), ("func", func)):
        if not callable(value):
            raise TypeError(
                f"`{name}` of {CALL} must be a function; got {describe(value)}. "
                "Pass the arguments to the returned function: `mpx.compare(a, "
                "b)(*args)`."
            )

    def compared(*args: PyTree, **kwargs: PyTree) -> Comparison:
        refuse_nnx((args, kwargs), "`mpx.compare`")
        used = _scaling_of(func, scaling, policy, args, kwargs)
        _warn_of_new(used)
        is_mixed = settings_of(func) is not None or policy is not None

        @wraps(reference)
        def loss(*args: PyTree, **kwargs: PyTree) -> PyTree:
            result = reference(*args, **kwargs)
            if not has_aux and policy is None and _logits_of(result) is not None:
                raise _ReturnsLogits
            return result

        def first(args: PyTree, _: object, kwargs: PyTree) -> Results:
            plain = filter_value_and_grad(loss, NoLossScaling(), has_aux, False)
            return results(plain(*args, **kwargs))

        def second(args: PyTree, scaling: Any, kwargs: PyTree) -> Results:
            gradient = filter_value_and_grad(
                func, scaling, has_aux, is_mixed, policy=policy, keep=keep
            )
            return results(gradient(*args, **kwargs))

        def results(found: Any) -> Results:
            return found.value, found.grads, _logits_of(found.aux) if has_aux else None

        def logits(func: Any, args: PyTree, scaling: Any, kwargs: PyTree) -> Results:
            return None, None, _logits_of(inference(func, scaling)(*args, **kwargs))

        given = (args, used, kwargs)
        try:
            pair = [_Side(f, given) for f in (first, second)]
        except _ReturnsLogits:
            pair = []
        if not pair:  # outside the handler, so that errors do not mention it
            plain, low = (functools.partial(logits, f) for f in (reference, func))
            pair = [_Side(plain, (args, NoLossScaling(), kwargs)), _Side(low, given)]
        return _compared(_name(reference), _name(func), *pair, floor=floor)

    return compared


class _ReturnsLogits(Exception):
    """The reference is not a loss; raised while it is traced as one."""


Results = tuple[Array | None, PyTree, Array | None]
"""The loss, the gradients and the logits of a function, if it has them."""


def _logits_of(result: Any) -> Array | None:
    """Returns a floating array of two axes or more, or one that is named `logits`."""
    named = result.get("logits") if isinstance(result, dict) else result
    found = getattr(named, "logits", named)
    is_float = jnp.issubdtype(getattr(found, "dtype", bool), jnp.floating)
    return found if is_float and getattr(found, "ndim", 0) > 1 else None


def _name(func: object) -> str:
    """Returns the name of a function with its precision."""
    settings = settings_of(func)
    if settings is None or not settings.is_enabled:
        return name_of(func)
    recipes = dict.fromkeys(type(recipe).__name__ for recipe in settings.recipes)
    low = f" with {', '.join(recipes)}" if recipes else ""
    return f"{name_of(func)} in {settings.dtype}{low}"


def _warn_of_new(scaling: AbstractLossScaling) -> None:
    if isinstance(scaling, RecipeScaling) and scaling._is_new:
        warn_user(
            "`mpx.compare(reference, func, scaling)` got a state before its first "
            "step, or none: its scales are 1, which loses small values. Pass the "
            "`scaling` of the run, or use a warm start: "
            "`mpx.DelayedScaling(warm_start=True)`."
        )


def _scaling_of(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling | None,
    policy: Policy | str | None,
    args: PyTree,
    kwargs: PyTree,
) -> AbstractLossScaling:
    if scaling is not None:
        return NoLossScaling() if scaling._by_loss else scaling
    if settings_of(func) is None and policy is None:
        return NoLossScaling()
    return init_scaling(func, *args, policy=policy, **kwargs)


class _Side:
    """One of the two functions: its program, and what is known without running it."""

    def __init__(self, func: Callable[..., PyTree], args: tuple[PyTree, ...]) -> None:
        self.traced: Traced = trace(func, args, {}, lambda f: f, (0,), CALL)
        probe = Collect()
        self.tags = [
            probe.new(Role.WEIGHT if name else Role.INPUT, name)
            for name in map(_weight_name, self.traced.paths)
        ]
        self.anchors = anchors_of(self.traced.jaxpr, self.tags)
        self._results = self.traced.call.result_of
        self.loss, grads, self.logits = self._results(self.traced.jaxpr.out_avals)
        self.leaves = [path for path, _ in leaves_with_paths(grads)]

    def run(
        self,
        arrays: Sequence[AnyArray],
        wanted: frozenset[Anchor],
        reverses: bool = False,
    ) -> tuple[Results, Records]:
        """Returns the results and the activations."""
        probe = Collect(wanted, reverses=reverses)
        results, records = probed(self.traced.jaxpr, probe, arrays, self.tags)
        return self._results(results), records


def _weight_name(path: str) -> str:
    """Returns the path in the first argument, "" for leaves of other arguments.

    `[0].blocks[1].weight` gives `blocks[1].weight`: the loss's arguments are one tuple.
    """
    return path.removeprefix("[0]").removeprefix(".") if path[:3] == "[0]" else ""


def _compared(
    reference: str, name: str, first: _Side, second: _Side, floor: bool
) -> Comparison:
    has_kl = _has_kl(reference, name, first, second)
    layers = common_layers(first.anchors, second.anchors)
    wanted = frozenset(anchor for _, anchor, _ in layers)

    @jax.jit
    def measure(a: Sequence[AnyArray], b: Sequence[AnyArray]) -> PyTree:
        """Returns the losses, the divergence, and the sums of all pairs."""
        pairs = [first.run(a, wanted), second.run(b, wanted)]
        if floor:
            pairs.append(first.run(a, wanted, reverses=True))
        (results, records), *others = pairs

        def beside(other: tuple[Results, Records]) -> tuple[list[Sums], list[Sums]]:
            values = [
                _sums_by_turn(found, records[anchor], other[1][anchor])
                for _, anchor, found in layers
            ]
            grads = map(jax.tree.leaves, (results[1], other[0][1]))
            return values, [sums(x, y) for x, y in zip(*grads, strict=True)]

        losses, _, logits = zip(*(one[0] for one in pairs[:2]), strict=True)
        kl = divergence(*logits) if has_kl else None
        return jax.tree.leaves(losses), kl, [beside(other) for other in others]

    inputs = first.traced.inputs, second.traced.inputs
    losses, kl, found = jax.device_get(measure(*inputs))
    values, grads = zip(*found, strict=True)
    activations = [
        each
        for (layer, anchor, _), *pairs in zip(layers, *values, strict=True)
        for each in _by_turn(layer, anchor, pairs)
    ]
    gradients = [
        closeness(path or "gradient", "gradient", pairs, ())
        for path, *pairs in zip(first.leaves, *grads, strict=True)
    ]
    return Comparison(
        reference,
        name,
        tuple(map(float, losses)),
        _distinct(activations),
        tuple(gradients),
        kl,
    )


def _has_kl(reference: str, name: str, first: _Side, second: _Side) -> bool:
    """Returns whether both functions return logits; raises if they do not match."""
    a, b = first.logits, second.logits
    shapes = {None if x is None else x.shape for x in (a, b)}
    if len(shapes) > 1 and (first.loss is None or None not in shapes):
        raise ValueError(
            f"{CALL} needs logits of equal shapes, `[..., vocabulary]`; got "
            f"{a} of `{reference}` and {b} of `{name}`. Return the array, or a "
            "dictionary with it as `logits`."
        )
    return None not in shapes


def _sums_by_turn(found: Found, a: AnyArray, b: AnyArray) -> Sums:
    (a, turns), (b, _) = found.turns_first(a), found.turns_first(b)
    return sums(a, b, turns)


def _by_turn(layer: str, anchor: Anchor, pairs: Sequence[Sums]) -> list[Closeness]:
    """Returns one for each iteration of the loops around a layer."""
    turns = itertools.product(*map(range, np.shape(pairs[0].signal)))
    return [
        closeness(
            layer + "".join(f"[{i}]" for i in turn),
            "activation",
            pairs,
            turn,
            where=anchor.where,
            source=anchor.source,
        )
        for turn in turns
    ]


def _distinct(some: Sequence[Closeness]) -> tuple[Closeness, ...]:
    """Adds numbers to repeated names."""
    pairs = zip(some, numbered((each.name, None) for each in some), strict=True)
    return tuple(dataclasses.replace(each, name=name) for each, name in pairs)
