"""A program in the states that contracts read: as lowered, and as compiled."""

import functools
from typing import Any

import jax
from jaxtyping import PyTree

from .._errors import describe
from ._hlo import Module, parse


class Program:
    """A jitted function with its arguments, a lowered or a compiled program.

    Each state is made, and its text is read, when a claim needs it.

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
        """The program as JAX handed it to the compiler."""
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
        """What JAX says of each argument: dtype, shape, and whether it is donated."""
        return (self._given if self._lowered is None else self._lowered).args_info

    @functools.cached_property
    def bytes_of(self) -> dict[str, int]:
        """Bytes by the claim that limits them."""
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
    """Reads the first arguments of `mpx.expect`.

    Raises:
        TypeError: It is nothing that was, or can be, lowered; or there are arguments
            for a program that was lowered with its own.
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
    """JAX's own stage; Equinox and Flax wrap it."""
    while not isinstance(program, jax.stages.Lowered | jax.stages.Compiled):
        inner = getattr(program, "lowered", None) or getattr(program, "compiled", None)
        if inner is None:
            return None
        program = inner
    return program
