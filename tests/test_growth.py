"""What a training step costs grows as its model does, and not with a weight's numbers.

Counted are calls of functions, equations, and bytes of lowered programs: no time. Per
layer, a model of 300 costs what one of 20 does. `python -m tests.test_growth` prints
the counts.
"""

import functools
import gc
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

# Optax's Adam mixes dtypes.
pytestmark = pytest.mark.third_party

LAYERS = 10, 20, 300
RECIPES: dict[str, Callable[[], Any]] = {
    "no recipe": lambda: None,
    "current scaling": mpx.Float8CurrentScaling,
    "delayed scaling": mpx.DelayedScaling,
    "MXFP8": mpx.MXFP8BlockScaling,
    "NVFP4": mpx.NVFP4BlockScaling,
}
# Names grow by a digit: `%999` and `%1000`. A quadratic part of a hundredth of what 20
# layers cost is, per layer, a sixth more with 300.
ABOUT_EQUAL = 1.05


def calls_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """How many functions a call enters, of Python and of C, and its result."""
    entered = 0

    def enter(frame: Any, event: str, arg: Any) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # its callbacks are functions, too
    sys.setprofile(enter)
    try:
        result = call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return entered, result


def programs(jaxpr: Any) -> Iterator[Any]:
    """A program and those within it, each as often as it stands there."""
    closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else None
    yield closed or jaxpr
    for equation in (closed.jaxpr if closed else jaxpr).eqns:
        for value in equation.params.values():
            for each in value if isinstance(value, tuple | list) else [value]:
                if isinstance(each, Jaxpr | ClosedJaxpr):
                    yield from programs(each)


def equations_of(jaxpr: Any) -> int:
    return sum(len(p.eqns) for p in programs(jaxpr))


def constants_of(jaxpr: Any) -> int:
    consts = (c for p in programs(jaxpr) for c in getattr(p, "consts", ()))
    return sum(getattr(c, "nbytes", 0) for c in consts)


def loss(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x**2)


def layers_of(
    number: int, width: int, make: Callable[..., Any] = jax.ShapeDtypeStruct
) -> Any:
    shapes = {"kernel": (width, width), "bias": (width,)}
    layer = lambda: {k: make(shape, jnp.float32) for k, shape in shapes.items()}  # noqa: E731
    return [layer() for _ in range(number)]


ADAM = mpx.compress_state(optax.adamw(1e-3))


def counts(layers: Any, x: Any, recipe: Any, optimizer: Any = ADAM) -> dict[str, int]:
    """The counts of a step and of all that is called before the first one."""
    # Functions of its own, so that nothing was traced before.
    function = mpx.autocast(lambda layers, x: loss(layers, x), recipe=recipe)
    init_scaling = functools.partial(mpx.init_scaling, function)
    init = functools.partial(mpx.init_optimizer, optimizer)
    scaling_calls, scaling = calls_of(lambda: jax.eval_shape(init_scaling, layers, x))
    optimizer_calls, state = calls_of(lambda: jax.eval_shape(init, layers))

    def step(layers: Any, state: Any, scaling: Any, x: Any) -> Any:
        result = mpx.value_and_grad(function, scaling)(layers, x)
        return mpx.optimizer_step(layers, optimizer, state, result)

    trace = functools.partial(jax.jit(step).trace, layers, state, scaling, x)
    trace_calls, traced = calls_of(trace)
    lower_calls, lowered = calls_of(traced.lower)
    return {
        "init_scaling calls": scaling_calls,
        "init_optimizer calls": optimizer_calls,
        "trace calls": trace_calls,
        "equations": equations_of(traced.jaxpr),
        "constant bytes": constants_of(traced.jaxpr),
        "lower calls": lower_calls,
        "program bytes": len(lowered.as_text()),
    }


def growth(recipe: str) -> dict[str, tuple[int, ...]]:
    """The counts of each number of layers, with a state that takes little time."""

    def of(number: int) -> dict[str, int]:
        jax.clear_caches()  # of the layers of the size before
        x = jax.ShapeDtypeStruct((8, 32), jnp.float32)
        return counts(layers_of(number, 32), x, RECIPES[recipe](), optax.sgd(0.1))

    of(LAYERS[0])  # what is imported, and done once
    each = [of(n) for n in LAYERS]
    return {name: tuple(c[name] for c in each) for name in each[0]}


def per_layer(counts: tuple[int, ...], sizes: tuple[int, ...] = LAYERS) -> list[float]:
    pairs = zip(sizes[1:], sizes, counts[1:], counts, strict=False)
    return [(more - fewer) / (n - m) for n, m, more, fewer in pairs]


EXHAUSTIVE = [pytest.param(x, marks=pytest.mark.exhaustive) for x in list(RECIPES)[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["no recipe", "current scaling", *EXHAUSTIVE])
def test_of_300_layers_each_costs_what_one_of_20_does(recipe):
    for name, found in growth(recipe).items():
        few, many = per_layer(found)
        assert many <= ABOUT_EQUAL * few, (name, found)


def placed_state(number: int) -> Any:
    """Traced over a mesh: each array finds the weight that it belongs to."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    options = {"shardings": NamedSharding(mesh, P("fsdp"))}
    init = functools.partial(mpx.init_optimizer, optax.adamw(1e-3), **options)
    return jax.eval_shape(init, layers_of(number, 128))


@pytest.mark.slow
def test_the_state_of_300_layers_finds_its_place_on_a_mesh():
    placed_state(2)
    found = tuple(calls_of(lambda n=n: placed_state(n))[0] for n in LAYERS)
    few, many = per_layer(found)
    assert many <= ABOUT_EQUAL * few, found


TOOLS: dict[str, Callable[..., Any]] = {
    "explain": lambda f, s, layers, x: str(mpx.explain(f)(layers, x)),
    "monitor": lambda f, s, layers, x: str(mpx.monitor(f)(layers, x)),
    "blame": lambda f, s, layers, x: str(mpx.blame(f, s)(layers, x * jnp.inf)),
}


def tool_calls(tool: str, number: int) -> int:
    layers, x = layers_of(number, 32, jnp.ones), jnp.ones((8, 32))
    function = mpx.autocast(lambda layers, x: loss(layers, x))
    scaling = mpx.init_scaling(function, layers, x)
    return calls_of(lambda: TOOLS[tool](function, scaling, layers, x))[0]


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_takes_a_layer_of_many_as_it_takes_one_of_few(tool):
    tool_calls(tool, 2)
    sizes = 4, 8, 20
    found = tuple(tool_calls(tool, n) for n in sizes)
    few, many = per_layer(found, sizes)
    assert many <= ABOUT_EQUAL * few, found


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [("no recipe", ADAM), *((x, optax.sgd(0.1)) for x in list(RECIPES)[1:])],
    ids=RECIPES,
)
def test_a_weight_of_ten_million_numbers_costs_what_a_small_one_does(recipe, optimizer):
    """Traced and lowered without the numbers: what grew would stand in the program."""

    def of(width: int) -> dict[str, int]:
        x = jax.ShapeDtypeStruct((32, width), jnp.float32)
        return counts(layers_of(1, width), x, RECIPES[recipe](), optimizer)

    few, many = of(128), of(3168)  # 16,384 and 10,036,224: fewer are not compressed
    for name in few:
        if name.endswith("bytes"):
            assert many[name] <= ABOUT_EQUAL * few[name], name
    assert many["equations"] == few["equations"]


def nested(depth: int) -> Callable[..., Any]:
    def level(number: int, layers: Any, x: Any) -> Any:
        if number == depth:
            return x

        def body(x: Any, _: None) -> tuple[Any, None]:
            return jnp.tanh(level(number + 1, layers, x @ layers[number])), None

        return jax.lax.scan(body, x, None, length=2)[0]

    return lambda layers, x: jnp.mean(level(0, layers, x) ** 2)


def test_loops_in_loops_are_not_looked_at_twice_each():
    """2^n times for n of them: 12 took 7 million calls, which are 240,000."""

    def calls(depth: int) -> int:
        function = mpx.autocast(nested(depth), recipe=mpx.Float8CurrentScaling())
        layers = [jnp.ones((16, 16))] * depth
        return calls_of(lambda: jax.make_jaxpr(function)(layers, jnp.ones((8, 16))))[0]

    calls(2)
    found = tuple(map(calls, (4, 8, 12)))
    few, many = per_layer(found, (4, 8, 12))
    # A program within a program is joined with each that is around it.
    assert many <= 1.5 * few, found


def naive_step(layers: Any, x: Any) -> Any:
    half = jnp.bfloat16

    def in_half(layers: Any) -> Any:
        return loss(jax.tree.map(lambda w: w.astype(half), layers), x.astype(half))

    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(in_half)(layers))


@pytest.mark.parametrize(
    ("recipe", "target", "limit"),
    [("delayed scaling", "H100", 10), ("NVFP4", "B200", 45)],
)
def test_a_layer_has_the_form_for_its_target_alone(recipe, target, limit):
    """With that for other platforms it had 18 (NVFP4: 88) times naive's equations."""

    def of(number: int) -> tuple[int, int]:
        layers = layers_of(number, 128)
        x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
        with mpx.autocast(target=target, ambient=True):
            found = counts(layers, x, RECIPES[recipe](), optax.sgd(0.1))
        return found["equations"], equations_of(jax.make_jaxpr(naive_step)(layers, x))

    (few, few_by_hand), (many, many_by_hand) = of(2), of(10)
    assert many - few <= limit * (many_by_hand - few_by_hand)


def print_table() -> None:
    for recipe in RECIPES:
        print(f"{recipe}: layers {LAYERS}; per layer of few, of many")
        for name, found in growth(recipe).items():
            few, many = per_layer(found)
            ratio = many / few if few else math.nan
            print(f"  {name:24} {found}  {few:.0f} {many:.0f}  {ratio:.2f}")


if __name__ == "__main__":
    print_table()
