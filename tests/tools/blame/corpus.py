"""Planted faults: programs, what is to be named of each, and whether it was."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpx

from ...helpers import HALF
from ...registries import RECIPES
from . import plants
from .containers import CONTAINERS, LAYERS, ROWS, WIDTH, Container, layer
from .frameworks import FRAMEWORKS
from .masks import MASKS
from .plants import PLANTS

# Ways to compute: what the function is made by, and the options of `mpx.blame`.
PRECISIONS: dict[str, dict[str, Any]] = {
    **{name: {"autocast": {"dtype": name}} for name in HALF},
    **{f"explicit {name}": {"options": {"policy": name}} for name in HALF},
    **{
        name: {"autocast": {"recipe": RECIPES[name]}}
        for name in ("delayed", "current", "mxfp8")
    },
}
# Faults of formats, and where they are.
OF_FORMATS = dict.fromkeys(("overflow", "underflow"), "explicit float16")
OF_FORMATS["rounding"] = "explicit bfloat16"
SCALE = 2.0**8  # at which nothing overflows but by a fault
DIRECTIONS = ("forward", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step to be replayed: `mpx.blame(func, scaling, **options)(*args)`."""

    func: Callable[..., Any]
    scaling: Any
    options: dict[str, Any]
    args: tuple[Any, ...]
    is_nnx: bool = False

    def blame(self, **options: Any) -> mpx.reports.BlameReport:
        blame = mpx.nnx.blame if self.is_nnx else mpx.blame
        return blame(self.func, self.scaling, **self.options, **options)(*self.args)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of the corpus.

    Attributes:
        plant: The name of the plant.
        container: That of the program around it.
        direction: `forward`, `dgrad` or `wgrad`.
        precision: How it is computed.
        place: Where in `f` the zero is.
    """

    plant: str
    container: str
    direction: str
    precision: str
    place: tuple[int, ...]

    @property
    def name(self) -> str:
        where = ",".join(map(str, self.place))
        parts = (self.plant, self.container, self.direction, self.precision, where)
        return " | ".join(parts)

    def step(self, *, with_fault: bool = True) -> Step:
        plant = PLANTS[self.plant]
        is_forward = self.direction == "forward"
        planted = plants.forward(plant) if is_forward else plants.backward(plant)
        keys = jax.random.split(jax.random.key(sum(map(ord, self.name))), 3)
        x = jax.random.normal(keys[2], (ROWS, WIDTH))
        f = np.ones(container_of(self).shape, np.float32)
        if with_fault:
            f[self.place] = 0
        if self.container in FRAMEWORKS:
            loss, model = FRAMEWORKS[self.container](planted, mean_of_squares)
            step = as_step(loss, self.precision, (model, x, jnp.asarray(f)))
            return dataclasses.replace(step, is_nnx=self.container == "NNX")
        on_weight = self.direction == "wgrad"
        step = functools.partial(layer, planted, on_weight)
        hidden = CONTAINERS[self.container].make(step)

        def loss(model, x, f):
            return mean_of_squares(hidden(model["w"], x, f) @ model["head"])

        w = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
        head = jax.random.normal(keys[1], (WIDTH, 4)) / 4
        model = {"w": w, "head": head}
        return as_step(loss, self.precision, (model, x, jnp.asarray(f)))

    def mistakes(self, report: mpx.reports.BlameReport) -> list[str]:
        """What a report says wrong."""
        plant, container = PLANTS[self.plant], container_of(self)
        first = report.first
        if first is None:
            return ["nothing"]
        is_forward = self.direction == "forward"
        function = plant.op if is_forward else plants.backward
        text = "return" if is_forward else "return identity"
        line = plants.line_of(function, text)
        # Where something does not fit in a format, what made it may be named as well
        # as what it was cast for.
        lines = (first.line, *[first.made_at] * (plant.kind == "overflow"))
        names = {first.primitive, first.computed, first.made_by}
        said = {
            "operation": bool(names & set(plant.primitives)),
            "line": line in lines,
            "scope": first.scope.split("/")[-1:] == ["plant"] or line == first.made_at,
            "direction": first.gradient == ("" if is_forward else self.direction)
            and (first.phase == "forward") == is_forward,
            "inside": first.inside == tuple(container.inside(self.place)),
            "devices": first.devices == (self.place[:1] if container.devices else ()),
            "verdict": report.verdict is self.verdict,
        }
        if self.direction == "wgrad":
            said["parameter"] = "w" in "".join(first.parameters)
        return [name for name, is_right in said.items() if not is_right]

    @property
    def verdict(self) -> mpx.reports.Verdict:
        is_of_format = PLANTS[self.plant].kind in OF_FORMATS
        return getattr(mpx.reports.Verdict, "PRECISION" if is_of_format else "DATA")


def container_of(fault: Fault) -> Container:
    """What is to be named of a container, or of a framework's model."""
    if fault.container in CONTAINERS:
        return CONTAINERS[fault.container]
    like = "scan" if "scan" in fault.container else "unrolled"
    return dataclasses.replace(CONTAINERS[like], directions=("forward", "dgrad"))


def mean_of_squares(h: Any) -> Any:
    return mpx.force_full_precision(jnp.mean, jnp.float32)(jnp.square(h))


def as_step(loss: Any, precision: str, args: tuple[Any, ...]) -> Step:
    how = PRECISIONS[precision]
    if "autocast" in how:
        loss = mpx.autocast(loss, **how["autocast"])
        scaling = mpx.init_scaling(loss, *args)
        if precision == "float16":
            scaling = scaling.with_loss(mpx.DynamicLossScaling(SCALE))
        return Step(loss, scaling, {}, args)
    is_small = precision.endswith(" float16")
    scaling = mpx.DynamicLossScaling(SCALE) if is_small else mpx.NoLossScaling()
    return Step(loss, scaling, how["options"], args)


def all_faults() -> Iterator[Fault]:
    """Every kind of fault there is, at the first place."""
    kinds = PLANTS.values(), (*CONTAINERS, *FRAMEWORKS), DIRECTIONS, PRECISIONS
    for plant, name, direction, precision in itertools.product(*kinds):
        fault = Fault(plant.name, name, direction, precision, ())
        if direction not in container_of(fault).directions:
            continue
        only = OF_FORMATS.get(plant.kind, precision), "forward"
        if plant.kind not in OF_FORMATS or (precision, direction) == only:
            yield fault


def faults(count: int, seed: int) -> list[Fault]:
    """Some of them, each plant and each container as often as the others."""
    chance = random.Random(seed)
    by_pair: dict[tuple[str, str], list[Fault]] = {}
    for fault in all_faults():
        by_pair.setdefault((fault.plant, fault.container), []).append(fault)
    chosen: list[Fault] = []
    while len(chosen) < count:
        pairs = list(by_pair.values())
        chance.shuffle(pairs)
        for options in pairs[: count - len(chosen)]:
            fault = chance.choice(options)
            shape = container_of(fault).shape
            place = tuple(chance.randrange(n) for n in shape)
            chosen.append(dataclasses.replace(fault, place=place))
    return chosen


def clean_steps() -> Iterator[tuple[str, Step, mpx.reports.Verdict]]:
    """Fifty steps with infinities, of which nothing is bad."""
    for (name, part), precision in itertools.product(MASKS.items(), CLEAN):

        def loss(model, x, part=part):
            return mean_of_squares(part(part(x @ model) @ model))

        keys = jax.random.split(jax.random.key(len(name)))
        w = jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5
        x = jax.random.normal(keys[1], (ROWS, WIDTH))
        step = as_step(loss, precision, (w, x))
        yield f"{name} | {precision}", step, mpx.reports.Verdict.NOTHING


CLEAN = ("float16", "bfloat16", "explicit float16", "explicit bfloat16", "current")


SCALED = ("unrolled", "scan", "scan, remat", "masked", "shard_map", *FRAMEWORKS)


def large_scales() -> Iterator[tuple[str, Step, mpx.reports.Verdict]]:
    """Twenty steps whose loss scale is too large, and nothing else."""
    precisions = ("float16", "explicit float16")
    for number, precision in itertools.product(range(10), precisions):
        fault = Fault("by_zero", SCALED[number % len(SCALED)], "forward", precision, ())
        step = fault.step(with_fault=False)
        scaling = mpx.StaticLossScaling(2.0 ** (24 + number))
        if number % 2:
            scaling = mpx.DynamicLossScaling(2.0**28, max_loss_scaling=2.0**28)
        name = f"{fault.container} | {precision} | {float(scaling.loss_scale):g}"
        step = dataclasses.replace(step, scaling=scaling)
        yield name, step, mpx.reports.Verdict.SCALE


def verdict_steps(seed: int) -> Iterator[tuple[str, Step, mpx.reports.Verdict]]:
    """Sixty steps, twenty for each verdict."""
    yield from large_scales()
    left = {mpx.reports.Verdict.PRECISION: 20, mpx.reports.Verdict.DATA: 20}
    for fault in faults(300, seed):
        if left[fault.verdict]:
            left[fault.verdict] -= 1
            yield fault.name, fault.step(), fault.verdict
