"""The operations of a program that claims are about: matmuls, collectives, calls.

`Program` is a step as lowered and as compiled; functions read operations from either.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from ..._base.errors import describe
from ..._settings import is_within
from .._counter import ArrayType, Body, Instruction, Module, parse

_PRODUCTS = ("dot", "convolution", "ragged-dot", "scaled-dot")
# JAX's own call for matmuls with block scales, before the compiler has chosen one.
_SCALED_PRODUCT = "__op$block_scaled_dot"
# Library calls that are matmuls, convolutions or attention.
_PRODUCT_CALL = re.compile(
    r"__cublas\$(gemm|lt\$)|__cudnn\$(conv|blockScaledDot|fmha)|__onednn\$(matmul|convolution)"
    r"|__op\$block_scaled_dot|__triton.*gemm"
)
_HOST = re.compile(r"callback", re.IGNORECASE)
_TRANSFERS = ("send", "recv", "infeed", "outfeed")


# Parts of an operation's path that JAX writes, other than names of scopes.
_LOOP = re.compile(r"\bwhile/(body|cond)(?=/|$)|\bbranch_\d+_fun\b")
_STRUCTURE = frozenset(
    "jit pjit jvp transpose vmap closed_call cond checkpoint rematted_computation "
    "shard_map custom_jvp_call custom_vjp_call".split()
)


def _scopes(op_name: str) -> list[str]:
    """Returns the named scopes and the jitted functions of a path.

    >>> _scopes("jit(step)/transpose(jvp(decoder))/while/body/closed_call/layer/dot")
    ['step', 'decoder', 'layer']
    """
    parts = re.split(r"[/()]+", _LOOP.sub("", op_name.rpartition("/")[0]))
    return [part for part in parts if part and part not in _STRUCTURE]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the program, as an error shows it.

    Attributes:
        kind: `dot`, `all-gather`, or the target of a call.
        operands: Dtypes and shapes of its operands, if known.
        results: Dtypes and shapes of its results.
        op_name: The path of transforms and scopes.
        source: `file:line`, or the empty text.
        times: The number of its runs.
        flops: Floating point operations of all its runs; 0 if not counted.
    """

    kind: str
    operands: tuple[ArrayType, ...]
    results: tuple[ArrayType, ...]
    op_name: str
    source: str
    times: int = 1
    flops: int = 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of its operands, or of its results if those are unknown."""
        return tuple(array.dtype for array in self.operands or self.results)

    @property
    def bytes(self) -> int:
        """The bytes of its operands, or of its results if those are unknown."""
        return sum(array.bits for array in self.operands or self.results) // 8

    def is_within(self, scope: str) -> bool:
        """Returns whether a named scope, or a path joined by `/`, encloses it.

        As in `mpx.Rule`: the path may begin at any scope, and `*` matches any text.
        """
        return is_within(_scopes(self.op_name), scope)

    def __str__(self) -> str:
        given = " x ".join(map(str, self.operands)) + " -> " * bool(self.operands)
        results = ", ".join(map(str, self.results))
        parts = [
            f"{self.kind}: {given}{results}",
            f"{self.times} times" * (self.times > 1),
            f"{self.flops:,} FLOPs" * bool(self.flops),
            f"in `{self.op_name}`" * bool(self.op_name),
            f"at {self.source}" * bool(self.source),
        ]
        return ", ".join(filter(None, parts))


def products(module: Module) -> list[Operation]:
    """Returns the matmuls and convolutions of a lowered program, with loop iterations.

    Matmuls of integers and booleans are left out.
    """
    found = []
    for instruction, names, times, prefix in _run(module, module.entry, 1, ""):
        is_scaled = instruction.target == _SCALED_PRODUCT
        if instruction.opcode not in _PRODUCTS and not is_scaled:
            continue
        operands = tuple(names[name].results[0] for name in instruction.operands[:2])
        if not all("float" in x.dtype or "complex" in x.dtype for x in operands):
            continue
        depth = _depth(instruction, operands)
        size = math.prod(instruction.results[0].shape)
        kind = "scaled dot" if is_scaled else instruction.opcode
        types = operands, instruction.results
        where = _full_name(instruction, prefix), _source(module, instruction)
        found.append(Operation(kind, *types, *where, times, 2 * size * depth * times))
    return found


def _depth(instruction: Instruction, operands: tuple[ArrayType, ...]) -> int:
    """Returns the count of terms in each element of a matmul's sum."""
    left, right = (operand.shape for operand in operands)
    if instruction.opcode == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.line)
        output = labels[1].index("o") if labels else len(right) - 1
        return math.prod(right) // max(right[output], 1)
    if instruction.opcode == "custom-call":
        return left[-1]
    contracted = instruction.attribute("lhs_contracting_dims")
    return math.prod(left[int(i)] for i in contracted.split(",") if i)


def _run(
    module: Module, name: str, times: int, prefix: str
) -> Iterator[tuple[Instruction, Body, int, str]]:
    """Yields the instructions that run, with the names in scope and their runs."""
    body = module.computations[name]
    for instruction in body.values():
        yield instruction, body, times, prefix
        inner = _full_name(instruction, prefix)
        for called in instruction.runs:
            yield from _run(module, called, times * module.turns(instruction), inner)


def _full_name(instruction: Instruction, prefix: str) -> str:
    """Returns the operation's path; in a called computation it is written relative."""
    name = instruction.op_name
    outermost = prefix.partition("/")[0]
    if not prefix or name == outermost or name.startswith(f"{outermost}/"):
        return name
    return f"{prefix}/{name}" if name else prefix


def collectives(module: Module) -> list[Operation]:
    """Returns the collectives of an optimized program that send more than scalars."""
    found = []
    for home, instruction, names in _everything(module):
        kind = instruction.collective(home)
        if not kind:
            continue
        arrays = _operands(instruction, names) or instruction.results
        arrays = tuple(array for array in arrays if math.prod(array.shape) > 1)
        if arrays:
            found.append(_plain(module, home, instruction, kind, arrays))
    return found


def custom_calls(module: Module) -> list[Operation]:
    """Returns the calls of libraries and kernels in an optimized program."""
    return _of_kinds(module, lambda x: x.target * (x.opcode == "custom-call"))


def compiled_products(module: Module) -> list[Operation]:
    """Returns the calls and instructions of an optimized program that are matmuls."""

    def kind(instruction: Instruction) -> str:
        is_call = _PRODUCT_CALL.match(instruction.target) is not None
        is_product = is_call or instruction.opcode in _PRODUCTS
        return (instruction.target or instruction.opcode) * is_product

    found = _of_kinds(module, kind)
    return [dataclasses.replace(x, operands=x.operands[:2]) for x in found]


def host_transfers(module: Module) -> list[Operation]:
    """Returns the calls of, and transfers to, the host in an optimized program."""

    def kind(instruction: Instruction) -> str:
        is_transfer = instruction.opcode in _TRANSFERS and (
            instruction.opcode.endswith("feed")
            or "is_host_transfer=true" in instruction.line
        )
        if is_transfer or _HOST.search(instruction.target):
            return instruction.target or instruction.opcode
        return ""

    return _of_kinds(module, kind)


def _of_kinds(module: Module, kind: Callable[[Instruction], str]) -> list[Operation]:
    """Returns the operations of an optimized program that have a kind (not "")."""
    return [
        _plain(module, home, instruction, name, _operands(instruction, names))
        for home, instruction, names in _everything(module)
        if (name := kind(instruction))
    ]


def largest_results(module: Module, count: int) -> list[Operation]:
    """Returns the largest arrays that instructions outside of fusions make."""
    inside = set(module.fusions)
    for _, instruction, _ in _everything(module):
        if instruction.opcode in ("reduce", "sort", "scatter", "all-reduce"):
            inside.update(instruction.called("to_apply"))
    found = [
        _plain(module, name, instruction, instruction.opcode, ())
        for name, body in module.computations.items()
        if name not in inside
        for instruction in body.values()
        if not (instruction.makes_nothing or instruction.opcode in ("while", "call"))
    ]
    found.sort(key=lambda x: sum(array.bits for array in x.results), reverse=True)
    return found[:count]


def _everything(module: Module) -> Iterator[tuple[str, Instruction, Body]]:
    """Yields every instruction, with its computation and the names in scope."""
    for home, body in module.computations.items():
        for instruction in body.values():
            yield home, instruction, body


_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_OWN = f"{Path(__file__).parents[2]}{os.sep}"


def _source(module: Module, instruction: Instruction) -> str:
    """`file:line` of the user's code, or the empty text where it is not known.

    It is the innermost line that is not of mpx, which computes for its caller.
    """
    if not instruction.frame:
        source = _SOURCE.search(instruction.line)
        return f"{source[1]}:{source[2]}" if source else ""
    lines = []
    for file, _, line in module.frames.get(instruction.frame, ()):
        if file == __file__:  # the call of `lower`: no line of the user's made it
            break
        if file:
            lines.append((file, f"{file}:{line}"))
    others = [line for file, line in lines if not file.startswith(_OWN)]
    return (others or [line for _, line in lines] or [""])[0]


def _operands(instruction: Instruction, names: Body) -> tuple[ArrayType, ...]:
    given = (names[name].results for name in instruction.operands if name in names)
    return tuple(array for results in given for array in results)


def _plain(
    module: Module,
    home: str,
    instruction: Instruction,
    kind: str,
    operands: tuple[ArrayType, ...],
) -> Operation:
    """Returns an operation of the compiled program, named by its fusion if unnamed."""
    named = instruction
    if not instruction.op_name:
        named = module.fusions.get(home, instruction)
    return Operation(
        kind, operands, instruction.results, named.op_name, _source(module, named)
    )


# --- A program as lowered, and as compiled --------------------------------------------


class Program:
    """A jitted function with its arguments, a lowered or a compiled program.

    Each state is made, and its text is parsed, when a claim needs it.

    Args:
        lowered: The lowered program, or None.
        compiled: The compiled program; None to compile the lowered one.
    """

    def __init__(self, lowered: Any, compiled: Any = None) -> None:
        self._lowered = lowered
        self._given = compiled

    @functools.cached_property
    def compiled(self) -> Any:
        """The executable."""
        return self._lowered.compile() if self._given is None else self._given

    @functools.cached_property
    def compiled_module(self) -> Module:
        """The optimized program."""
        return parse(self.compiled.as_text())

    @functools.cached_property
    def lowered_module(self) -> Module:
        """The program that JAX passed to the compiler."""
        if self._lowered is None:
            raise ValueError(
                "`products` of `mpx.expect` reads the program before it is "
                "compiled, because compilers change dtypes of matmuls (the CPU's "
                "computes half precision in float32); got a compiled one. Pass the "
                "jitted function with its arguments, or `jitted.lower(...)`."
            )
        return parse(self._lowered.as_text(dialect="hlo", debug_info=True))

    @property
    def arguments(self) -> Any:
        """The dtype, shape and donation of each argument, by JAX."""
        return (self._given if self._lowered is None else self._lowered).args_info

    @functools.cached_property
    def bytes_of(self) -> dict[str, int]:
        """The bytes that each claim about memory limits."""
        sizes = self.compiled.memory_analysis()
        if sizes is None:
            raise ValueError(
                "`mpx.expect` needs the memory analysis of the executable to check "
                "bytes; this backend has none. Omit claims about memory here."
            )
        arguments, temporaries = sizes.argument_size_in_bytes, sizes.temp_size_in_bytes
        results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return {
            "temporaries_at_most": temporaries,
            "arguments_at_most": arguments,
            "memory_at_most": arguments + results + temporaries,
        }


def as_program(program: Any, args: tuple[PyTree, ...]) -> Program:
    """Returns the program from the first arguments of `mpx.expect`.

    Raises:
        TypeError: It was not, and cannot be, lowered; or there are arguments for a
            program that was lowered with its own.
    """
    stage = _stage(program)
    if stage is None and hasattr(program, "lower"):
        stage = _stage(program.lower(*args))
    elif args:
        raise TypeError(
            "`mpx.expect(program, *args)` takes arguments only for a jitted function; "
            f"got {len(args)} for {describe(program)}."
            + (" Jit the function first: `jax.jit(function)`." if stage is None else "")
        )
    if isinstance(stage, jax.stages.Lowered):
        return Program(stage)
    if isinstance(stage, jax.stages.Compiled):
        return Program(None, stage)
    raise TypeError(
        "`mpx.expect(program, *args)` needs a jitted function with its arguments, "
        "or the result of `jitted.lower(...)` or its `.compile()`; got "
        f"{describe(program)}. Jit the function first: `jax.jit(function)`."
    )


def _stage(program: Any) -> Any:
    """Returns JAX's stage, without the wrappers of Equinox and Flax."""
    while not isinstance(program, jax.stages.Lowered | jax.stages.Compiled):
        inner = getattr(program, "lowered", None) or getattr(program, "compiled", None)
        if inner is None:
            return None
        program = inner
    return program
