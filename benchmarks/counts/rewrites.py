"""Whether the rewrites that autocast makes for XLA's sake still pay.

Whole steps in which the pattern of a rewrite occurs are compiled twice, as mpx emits
them and with the rewrite off, which is done by patching names of mpx in this process:

    python -m benchmarks.counts.rewrites [NAME ...] [--target h100 b200 v5e]

A rewrite pays if one of its steps moves 1 % more bytes without it, or needs 1 % more
memory. The steps have 2 layers of real width. One compiles in ten seconds for a GPU and
in one or two minutes for a TPU.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .. import our_arms, processes, results
from ..counter import TARGETS, counter
from ..fingerprint import fingerprint
from ..models import plain, whole_steps
from ..models.arranged import Order, Sizes, gpt, llama
from ..models.weights import by_slices
from ..models.whole_steps import Whole
from ..peers import environment
from ..steps import ArrayStep
from ..tables import megabytes

CUDA = environment.REPOSITORY / ".venv-cuda"
DEFAULT = ["h100", "b200", "v5e"]
HEADS = """| rewrite | step | traffic, MB | off | ratio | memory, MB | off | ratio |
|---|---|--:|--:|--:|--:|--:|--:|"""


def _by_take(turn: Any, x: Any, stacked: Any) -> tuple[Any, None]:
    """A loop in Python over rows of stacked weights, each looked up by `jnp.take`."""
    for index in range(jax.tree.leaves(stacked)[0].shape[0]):
        x, _ = turn(x, jax.tree.map(partial(jnp.take, indices=index, axis=0), stacked))
    return x, None


def _in_pairs(turn: Any, x: Any, stacked: Any) -> tuple[Any, None]:
    """A scan over pairs of layers, each pair a loop in Python."""
    pairs = jax.tree.map(lambda leaf: leaf.reshape(-1, 2, *leaf.shape[1:]), stacked)
    return jax.lax.scan(partial(by_slices, turn), x, pairs)


_LLAMA = Sizes(2048, 5632, 32_000, layers=2, heads=16, gathers=True)
_GPT = Sizes(1536, 6144, 50_304, layers=2, heads=12, gathers=True)
_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
WHOLES = {
    "Llama": Whole(llama, _LLAMA),
    "Llama, no remat": Whole(llama, _LLAMA, Order(remat=False)),
    "Llama, slices": Whole(llama, _LLAMA, Order(by_slices)),
    "Llama, take": Whole(llama, _LLAMA, Order(_by_take)),
    "Llama, scan of pairs": Whole(llama, replace(_LLAMA, layers=4), Order(_in_pairs)),
    "GPT": Whole(gpt, _GPT, Order(remat=False)),
    "GPT, dots saved": Whole(gpt, _GPT, Order(policy=_DOTS)),
    "GPT, dots saved, scan": Whole(gpt, _GPT, Order(jax.lax.scan, policy=_DOTS)),
}
BATCHES = {"desktop": 256, "base": 64, "gpt": 16}  # of models with biases, in `plain`


def _literal(numbers: Any, atom: Any) -> Any:
    return np.asarray(atom.val) if isinstance(atom, Literal) else None


# What is patched to switch a rewrite off.
OFF: dict[str, dict[str, Any]] = {
    "lookup": {"_autocast._emit.finds_one_in_each_row": lambda equation: False},
    "bias": {"_autocast._emit.with_rounded_gradient": lambda case, results: results},
    "stacks": {"_autocast._emit.cast_stacks": lambda *of: {}},
    "saving": {"_autocast._context.Saving.named": lambda self, equation, x: x},
    "cuts": {
        "_autocast._stacks.boxes_read": lambda jaxpr, stacks: [()] * len(stacks),
        "_autocast._loops.is_read_once": lambda jaxpr, variable: False,
    },
    "numbers": {"_program.cuts.Numbers.of": _literal},
    "totals": {"_program.remat._is_total": lambda equation: False},
}
_LOSSES = ("Llama: bfloat16", "Llama, no remat: bfloat16", "GPT: bfloat16")
# Models with arms of `our_arms`.
STEPS = {
    "lookup": _LOSSES,
    "bias": tuple(f"{model}: autocast bfloat16" for model in BATCHES),
    "stacks": ("Llama, slices: bfloat16", "Llama, slices: delayed"),
    "saving": ("GPT, dots saved: delayed", "GPT, dots saved, scan: current"),
    "cuts": ("Llama, slices: bfloat16", "Llama, scan of pairs: bfloat16"),
    "numbers": ("Llama, slices: bfloat16", "Llama, take: bfloat16"),
    "totals": _LOSSES,
}


def _build(title: str, target: str, devices: list[Any]) -> ArrayStep:
    model, arm = title.split(": ")
    if model in BATCHES:
        plain_case = plain.Case(target, model, 2, BATCHES[model], arm)
        return plain.build(our_arms.ARMS[arm], plain_case, devices)
    case = whole_steps.Case(target, model, "float32", arm)
    return whole_steps.build(case, devices, whole=WHOLES[model])


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Counts of each step with each rewrite and without it; runs in a worker."""
    import mpx

    target = TARGETS[request["target"]]
    devices = counter.compile_only_devices(target)
    known: dict[str, list[int]] = {}
    for name, title in request["steps"]:
        programs = []
        for off in ({}, OFF[name]):
            with contextlib.ExitStack() as patched:
                patched.enter_context(mpx.autocast(target=target.name, ambient=True))
                for path, value in off.items():
                    patched.enter_context(mock.patch(f"mpx.{path}", value))
                jax.clear_caches()
                step = _build(title, target.name, devices)
                lowered = step.jitted().trace(step.state, step.batch).lower()
            programs.append(fingerprint(lowered))
            if programs[-1] not in known:
                compiled = lowered.compile()
                traffic = counter.traffic(counter.kernels_of(compiled.as_text()))
                known[programs[-1]] = [traffic, counter.memory(compiled)]
        used, off = (known[program] for program in programs)
        yield {"name": name, "step": title, "used": used, "off": off}


def main() -> None:
    """Prints a table for each target, and which rewrites pay."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*OFF, "all"], default="all")
    parser.add_argument("--target", nargs="+", default=DEFAULT, choices=TARGETS)
    options = parser.parse_args()
    names = [*OFF] if "all" in options.names else options.names
    steps, gains = [(name, step) for name in names for step in STEPS[name]], {}
    for target in options.target:
        request = {"task": "counts.rewrites", "target": target, "steps": steps}
        is_cuda = TARGETS[target].platform == "cuda"
        cuda = environment.prepare_cuda(CUDA) if is_cuda else None
        answers = processes.ask("ours", request, environment.existing(), libraries=cuda)
        versions = results.compiler(next(answers)["versions"], TARGETS[target].platform)
        print(f"\n{TARGETS[target].title}, by {versions}\n\n{HEADS}", flush=True)
        for answer in answers:
            row = [answer["name"], answer["step"]]
            for used, off in zip(answer["used"], answer["off"], strict=True):
                gains.setdefault(answer["name"], []).append(off / used)
                row += [megabytes(used), megabytes(off), f"{off / used:.3f}"]
            print(f"| {' | '.join(row)} |", flush=True)
    for name, found in gains.items():
        print(name, "pays" if max(found) > 1.01 else "does not pay")


if __name__ == "__main__":
    main()
