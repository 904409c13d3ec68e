"""Writes the programs that mpx emits, to be compared with those of another commit.

    python -m tests.emitted write before
    ... change the core ...
    python -m tests.emitted write after
    python -m tests.emitted compare before after

    python -m tests.emitted record          # for tests/autocast/test_emitted.py

One text for each program of the zoo, of other packages as far as they are installed,
and of the examples, in each precision: its jaxpr with the names of JAX's own printer,
which depend on nothing but the program and the target, and what `mpx.explain` says of
it. Addresses in memory and paths of this machine are left out. A program that raises
has its error as its text, which is to stay, too.
"""

import argparse
import collections
import dataclasses
import difflib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx
from rigs.clients import gradients
from rigs.clients.programs import PACKAGES, programs_of
from rigs.clients.record import PRECISIONS

from .autocast.zoo import PROGRAMS, Program, gradient as gradient_of
from .registries import RECIPES

ROOT = Path(__file__).resolve().parents[1]
Thunk = Callable[[], Any]


def text_of(function: Callable[..., Any], *args: Any) -> str:
    """The program that a function is, in normal form."""
    arrays, static = eqx.partition(args, eqx.is_array)

    def of_arrays(arrays: Any) -> Any:
        return eqx.filter(function(*eqx.combine(arrays, static)), eqx.is_array)

    return normal(str(jax.jit(of_arrays).trace(arrays).jaxpr))


def normal(text: str) -> str:
    """A text without what differs from one run, or one machine, to the next."""
    text = re.sub(r"0x[0-9a-f]+", "0x", text).replace(f"{ROOT}/", "")
    text = re.sub(r"\S*/site-packages/", "", text)
    # Lines of mpx's own code move.
    text = re.sub(r"(mpx/\S+?\.py)\S*", r"\1", text)
    return re.sub(r"\b(id|key)=\d{6,}", r"\1=", text)


def of_the_zoo(name: str, found: Program) -> Iterator[tuple[str, Thunk]]:
    """A program of the zoo in each precision, differentiated on either side."""

    def differentiated(fn: Any) -> Any:
        return gradient_of(fn, found.argnums, forward_mode=found.forward_mode)

    def inside(target: str = "cpu", **options: Any) -> str:
        fn, args = found.make()
        fn = mpx.autocast(fn, target=target, **options)
        return text_of(differentiated(fn), *args)

    def outside() -> str:
        fn, args = found.make()
        fn = mpx.autocast(differentiated(fn), "bfloat16", target="cpu")
        return text_of(fn, *args)

    def delayed() -> str:
        fn, args = found.make()
        loss = mpx.autocast(fn, recipe=mpx.DelayedScaling(), target="cpu")
        scaling = mpx.init_scaling(loss, *args)

        def step(scaling: Any, *args: Any) -> Any:
            return tuple(mpx.filter_value_and_grad(loss, scaling, has_aux=True)(*args))

        return text_of(step, scaling, *args)

    def report() -> str:
        fn, args = found.make()
        fn = mpx.autocast(fn, "bfloat16", target="cpu")
        whole = mpx.explain(differentiated(fn))(*args)
        return normal(f"{whole}\n{whole.to_json()}")

    yield "float16", lambda: inside(dtype="float16")
    yield "bfloat16", lambda: inside(dtype="bfloat16")
    for target in ("cpu bf16", "H100", "tpu v5e"):
        yield target, lambda target=target: inside(target)
    yield "outside", outside
    yield "fast", lambda: inside(residuals="fast")
    yield "stream", lambda: inside(residual_stream="half")
    for name in ("mxfp8", "nvfp4"):
        yield name, lambda name=name: inside(recipe=RECIPES[name])
    yield "units", lambda: inside(recipe=mpx.Float8CurrentScaling(), target="sm_90")
    yield "delayed", delayed
    yield "explain", report


def of_packages() -> Iterator[tuple[str, str, Thunk]]:
    """Programs of other packages, those that are installed."""
    for module in PACKAGES:
        try:
            found = programs_of(module)
        except ImportError:
            continue
        for name, client in found.items():
            for precision in filter(client.has, PRECISIONS):
                yield name, precision, lambda c=client, p=precision: _step(c, p)


def _step(client: Any, precision: str) -> str:
    built = client.make()
    step = gradients.autocast(built, precision)
    return text_of(step.run, step.state, built.params, built.batch)


def of_examples() -> Iterator[tuple[str, str, Thunk]]:
    """A step of either example, small, on all devices."""
    from examples import gpt, precisions, runs, vit

    mesh, images = runs.data_mesh(), 2 * jax.device_count()
    model = vit.ModelConfig(patch=4, width=8, hidden=8, blocks=1, heads=2, dropout=0.2)
    of_vit = dataclasses.replace(vit.PRESETS["digits"], model=model)
    small = gpt.ModelConfig(context=8, width=8, hidden=8, blocks=1, heads=2)
    of_gpt = gpt.Config(model=small)

    def vit_step(precision: Any) -> str:
        module = vit.VisionTransformer(model, (8, 8, 1), 10, jax.random.key(0))
        batch = {"image": jnp.zeros((images, 8, 8, 1))}
        batch["label"] = jnp.zeros(images, jnp.int32)
        state = vit.initial_state(of_vit, precision, module, batch)
        return text_of(vit.make_step(of_vit, precision, mesh), batch, state)

    def gpt_step(precision: Any) -> str:
        texts = jnp.zeros((images, 9), jnp.uint8)
        parts, scaling = gpt.initial_state(of_gpt, precision, texts)
        three_axes = runs.make_mesh()
        with jax.set_mesh(three_axes):
            step = gpt.make_step(of_gpt, precision, three_axes)
            lowered = step.lower(**parts, scaling=scaling, texts=texts)
        return normal(lowered.as_text())

    for precision in precisions.AUTOCAST:
        yield "vit", precision, lambda p=precision: vit_step(p)
        yield "gpt", precision, lambda p=precision: gpt_step(p)


def everything(parts: list[str]) -> Iterator[tuple[str, Thunk, Any]]:
    """The names of all texts, how to make them, and what holds meanwhile."""
    if "zoo" in parts:
        for name, found in PROGRAMS.items():
            for kind, make in of_the_zoo(name, found):
                yield f"zoo.{name}.{kind}", make, found.context
    if "clients" in parts:
        for name, kind, make in of_packages():
            yield f"clients.{name}.{kind}", make, None
    if "examples" in parts:
        for name, kind, make in of_examples():
            yield f"examples.{name}.{kind}", make, None


def write(folder: Path, parts: list[str], share: tuple[int, int]) -> None:
    """Writes the texts, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    before = ""
    for name, make, context in everything(parts):
        program = name.rpartition(".")[0]
        if program != before:  # what one leaves does not change the next
            jax.clear_caches()
        before = program
        if zlib.crc32(program.encode()) % share[1] != share[0]:
            continue
        (folder / f"{name}.txt").write_text(_text(make, context) + "\n")


# Of these kinds a short form is committed: other precisions take the same ways.
RECORDED = ("bfloat16", "cpu bf16", "H100", "tpu v5e", "stream", "units", "delayed")
_OPERATION = re.compile(r"(\w+)\[[\d,]*\](?:<[^>]*>)? = ([\w\-]+)")


def short_forms(name: str, found: Program) -> dict[str, str]:
    """What the emitted programs of a program of the zoo are, in a line each."""
    found.make()  # or what computes its arguments is compiled once more
    jax.clear_caches()  # what one leaves does not change the next
    forms = {}
    for kind, make in of_the_zoo(name, found):
        if kind in RECORDED:
            forms[kind] = _short(_text(make, found.context))
    return forms


def _short(text: str) -> str:
    """Counts of a text's casts and products by dtype, and its hash."""
    operations = _OPERATION.findall(text)
    counts = collections.Counter(
        f"{name} {dtype}"
        for dtype, name in operations
        if name in ("convert_element_type", "dot_general", "conv_general_dilated")
    )
    words = [f"{count} {what}" for what, count in sorted(counts.items())]
    short = ", ".join([f"{len(operations)} operations", *words])
    return f"{short}; {zlib.crc32(text.encode()):08x}"


def record() -> None:
    """Writes the short forms of the zoo."""
    programs = {name: short_forms(name, found) for name, found in PROGRAMS.items()}
    text = json.dumps({"jax": jax.__version__, "programs": programs}, indent=1)
    (ROOT / "tests" / "autocast" / "emitted.json").write_text(text + "\n")


def _text(make: Thunk, context: Any) -> str:
    """A text; of a program that raises, its error."""
    try:
        with context() if context else jax.default_matmul_precision(None):
            return make()
    except Exception as error:
        return normal(f"{type(error).__name__}: {error}")


def compare(first: Path, second: Path, lines: int) -> int:
    """Says which texts differ, and how they begin to."""
    names = sorted({p.name for f in (first, second) for p in f.glob("*.txt")})
    differ = 0
    for name in names:
        paths = [first / name, second / name]
        missing = [str(path) for path in paths if not path.is_file()]
        if missing:
            differ += 1
            print(f"{name}: only one of them has it")
            continue
        a, b = (path.read_text() for path in paths)
        if a != b:
            differ += 1
            print(f"{name}: differs")
            found = difflib.unified_diff(a.splitlines(), b.splitlines(), n=1)
            print("\n".join(line[:160] for line in list(found)[:lines]))
    print(f"{len(names)} texts, {differ} differ")
    return 1 if differ else 0


def main() -> int:
    """Writes or compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--parts", nargs="+", default=["zoo", "clients", "examples"])
    writing.add_argument("--share", default="0/1", help="which of how many processes")
    comparing = commands.add_parser("compare")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    comparing.add_argument("--lines", type=int, default=12)
    commands.add_parser("record")
    told = parser.parse_args()
    if told.command == "record":
        record()
        return 0
    if told.command == "compare":
        return compare(told.first, told.second, told.lines)
    number, count = map(int, told.share.split("/"))
    write(told.folder, told.parts, (number, count))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Programs for several devices, as in the tests.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    sys.exit(main())
