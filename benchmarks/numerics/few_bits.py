"""What do moments in 8 bits cost a training? Twelve optimizers, short and long.

Question: how far is the final validation loss with `mpx.compress_state` from that of
the optimizer itself?

A pair is one seed: the same initial weights and the same batches. The seeds of an arm
are one program, by `jax.vmap`. Computed in float32, so that moments are the only
difference. Long trainings warm up and end with a learning rate of zero.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from optax import contrib

from ..results import Results, read
from ..tables import Goal, Table
from .interval import mean_interval
from .small_models import TASKS

# Percent; of the short trainings, and of so many optimizers.
LIMIT, WITHIN = 0.05, 11
SHORT, LONG = 150, 3000
Rate = Any  # a number or a schedule
OPTIMIZERS: dict[str, Callable[[Rate], Any]] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lamb": optax.lamb,
    "lion": optax.lion,
    "adafactor": optax.adafactor,
    "rmsprop": optax.rmsprop,
    "adabelief": optax.adabelief,
    "nadam": optax.nadam,
    "sgd, momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "schedule_free": lambda rate: contrib.schedule_free_adamw(rate, warmup_steps=10),
    "muon": contrib.muon,
    "adagrad": optax.adagrad,
    "adam, b2 0.95": lambda rate: optax.adam(rate, b2=0.95),
    "ademamix": contrib.ademamix,
}
_RATES = dict.fromkeys(["adam", "adamw", "adabelief", "nadam", "adam, b2 0.95"], 3e-3)
_RATES |= dict.fromkeys(["lamb", "adafactor", "muon"], 1e-2)
_RATES |= {"lion": 1e-3, "rmsprop": 1e-3, "sgd, momentum": 0.1, "adagrad": 3e-2}
_RATES |= {"schedule_free": 5e-3, "ademamix": 1e-3}
# With three times the rate the MLP's pairs are further apart by chance.
_FACTORS = {"GPT": 1.0, "MLP": 0.33}
_LONG = ("adam", "adam, b2 0.95", "lion", "ademamix", "muon")


class Run(NamedTuple):
    """A training by one optimizer.

    Attributes:
        model: Of `TASKS`.
        optimizer: Of `OPTIMIZERS`.
        steps: How many.
        seeds: How many.
        limit: The interval of the gap is to lie within, in percent.
    """

    model: str
    optimizer: str
    steps: int
    seeds: int
    limit: float


RUNS = [Run("GPT", name, LONG, 10, 0.05) for name in _LONG]
RUNS += [Run("MLP", name, LONG, 3, 0.3) for name in _LONG]
RUNS += [
    Run("GPT", name, SHORT, 10, LIMIT)
    for name in OPTIMIZERS
    if name not in ("ademamix", "adam, b2 0.95")
]
ARMS = ("float32", "8 bits")
# Where 8 bits show: weights whose gradients vanish, with a short second moment.
WIDER = Run("MLP", "adam, b2 0.95", LONG, 3, 0.3)
TRAINS = True


def requests(options: Any, found: Results) -> list[dict[str, Any]]:
    """One, for what is left to do: it goes on where it was interrupted."""
    earlier = read(found.name, options.out)
    if earlier is not None:
        found.records, found.versions = earlier.records, earlier.versions
    done = {(*_key(r), r["arm"]) for r in found.records}
    every = [(run, arm) for run in RUNS for arm in ARMS] + [(WIDER, "16 bits")]
    return [{"runs": [(r, arm) for r, arm in every if (*r[:3], arm) not in done]}]


def _key(record: dict[str, Any]) -> tuple[str, str, int]:
    return record["model"], record["optimizer"], record["steps"]


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer for the seeds of an arm; runs in a worker."""
    import mpx

    for fields, arm in request["runs"]:
        run, start = Run(*fields), time.perf_counter()
        losses = _train(run, arm, mpx.compress_state)
        seconds = round(time.perf_counter() - start, 1)
        record = {"model": run.model, "optimizer": run.optimizer, "arm": arm}
        yield {"run": {**record, "steps": run.steps, "seconds": seconds, **losses}}


def _train(run: Run, arm: str, compress: Callable[..., Any]) -> dict[str, list[float]]:
    """The validation losses of all seeds, by name of what is validated with."""
    task, steps = TASKS[run.model](), run.steps
    rate: Rate = _RATES[run.optimizer] * _FACTORS[run.model]
    if steps == LONG:
        rate = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 30, steps)
    optimizer = OPTIMIZERS[run.optimizer](rate)
    if arm != "float32":
        optimizer = compress(optimizer, arm.replace(" bits", "bit"))

    def train(seed: Array) -> dict[str, Array]:
        weights, draws = task.weights(jax.random.key(seed)), jax.random.key(seed + 1000)

        def step(carry: Any, number: Array) -> tuple[Any, None]:
            weights, state = carry
            batch = task.batch(jax.random.fold_in(draws, number), number / steps)
            grads = jax.grad(task.loss)(weights, batch)
            updates, state = optimizer.update(grads, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        begin = weights, optimizer.init(weights)
        (weights, _), _ = jax.lax.scan(step, begin, jnp.arange(steps))
        named = task.validation.items()
        return {f"losses {name}".strip(): task.loss(weights, b) for name, b in named}

    found = jax.jit(jax.vmap(train))(jnp.arange(run.seeds))
    return {name: [round(float(x), 6) for x in found[name]] for name in found}


class Gap(NamedTuple):
    """How far 8 bits are from float32, in percent of the loss, for each seed."""

    run: Run
    base: float
    gaps: list[float]


def _gaps(
    found: Results, steps: int, name: str = "losses", arm: str = "8 bits"
) -> list[Gap]:
    losses = {(*_key(r), r["arm"]): r[name] for r in found.records if name in r}
    arms = "float32", arm
    pairs = [(run, *(losses.get((*run[:3], each)) for each in arms)) for run in RUNS]
    return [
        Gap(
            run,
            statistics.fmean(old),
            [100 * (b / a - 1) for a, b in zip(old, new, strict=True)],
        )
        for run, old, new in pairs
        if run.steps == steps and old is not None and new is not None
    ]


def _row(gap: Gap) -> list[str]:
    interval = mean_interval(gap.gaps)
    ends = f"[{interval.low:+.3f}%, {interval.high:+.3f}%]"
    return [f"{gap.base:.4f}", f"{interval.mean:+.3f}%", ends]


def tables(found: Results) -> Iterator[Table]:
    """A row for each optimizer: of long trainings, and of short ones."""
    columns = "loss in float32 | gap of 8 bits | 95% interval"
    rows = [
        [gap.run.optimizer, gap.run.model, *_row(gap), _verdict(gap)]
        for gap in _gaps(found, LONG)
    ]
    yield Table(
        f"Final validation loss after {LONG:,} steps with moments in 8 bits, paired: "
        "GPT with 10 seeds, MLP with 3",
        f"optimizer | model | {columns} | within",
        rows,
        [
            "Lower is better. MLP: the next byte of a text that becomes lower case "
            "after half of the steps. AdEMAMix' slow average is in 16 bits."
        ],
    )
    yield Table(
        "MLP, the text of the first half: what weights lose whose gradients vanish",
        "optimizer | bits | loss in float32 | gap | 95% interval",
        [
            [gap.run.optimizer, arm, *_row(gap)]
            for arm in ("8 bits", "16 bits")
            for gap in _gaps(found, LONG, "losses upper case", arm)
        ],
        [
            "Lower is better. With b2 = 0.95 8 bits forget more. We guess that a "
            "second moment decays to the smallest code while rounding moves the first."
        ],
    )
    yield Table(
        f"Final validation loss of the GPT after {SHORT} steps, 10 paired seeds",
        f"optimizer | {columns}",
        [[gap.run.optimizer, *_row(gap)] for gap in _gaps(found, SHORT)],
        ["Lower is better. Adagrad's sums are in 16 bits."],
    )


def _verdict(gap: Gap) -> str:
    is_within = mean_interval(gap.gaps).lies_within(gap.run.limit)
    return f"{gap.run.limit}%" if is_within else f"missed: {gap.run.limit}%"


def goals(found: Results) -> Iterator[Goal]:
    """Short: within noise, or at most `LIMIT`. Long: the interval within the limit."""
    for model, limit, least in (("GPT", 0.05, 5), ("MLP", 0.3, 4)):
        long = [gap for gap in _gaps(found, LONG) if gap.run.model == model]
        wide = [g.run.optimizer for g in long if _verdict(g).startswith("missed")]
        good = len(long) - len(wide)
        text = f"{LONG:,} steps, {model}: the interval is within {limit}%: {good}"
        text += f" of {len(long)} optimizers, at least {least}; missed: {wide}"
        yield Goal(text, good >= least)
    short = _gaps(found, SHORT)
    worse = [g.run.optimizer for g in short if mean_interval(g.gaps).low > LIMIT]
    text = (
        f"8 bits train within noise or {LIMIT}% of float32: {len(short) - len(worse)}"
    )
    yield Goal(
        f"{text} of {len(short)} optimizers, at least {WITHIN}; worse: {worse or 'no'}",
        len(short) - len(worse) >= WITHIN,
    )
