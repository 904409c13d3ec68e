"""What several tests share: formats, kinds of leaves, transforms, and bit equality."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import pytest

from mpx._program import Flow

HALF = ("float16", "bfloat16")
# For tests of float16 with a scale of 1, where no gradient is near 6e-8.
unscaled = pytest.mark.filterwarnings("ignore:.* computes in float16 with `mpx.NoLoss")
# Formats of 8 bits that `mpx.cast_tree` can cast to.
EIGHT_BITS = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)
WIDE = (*HALF, "float32")

# Relative tolerances: a few units in the last place of each format.
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "float64": 1e-14}


def identity(x: Any) -> Any:
    """A function as a leaf of a tree."""
    return x


# Leaves that a cast must give back as the same object. Made on demand, so that
# nothing touches a device while tests are collected.
OTHER_LEAVES: dict[str, Callable[[], Any]] = {
    "int array": lambda: jnp.arange(3),
    "uint8 array": lambda: jnp.arange(3, dtype=jnp.uint8),
    "bool array": lambda: jnp.array([True, False]),
    "new-style key": lambda: jax.random.key(0),
    "raw key": lambda: jax.random.PRNGKey(0),
    "complex array": lambda: jnp.ones(2, jnp.complex64),
    "numpy int": lambda: np.arange(3),
    "numpy complex": lambda: np.ones(2, np.complex128),
    "numpy object": lambda: np.array(["a", None], object),
    "numpy int scalar": lambda: np.int32(3),
    "numpy string": lambda: np.array(["text"]),
    "float8 array": lambda: jnp.ones(2, jnp.float8_e4m3fn),
    "int4 array": lambda: jnp.ones(2, jnp.int4),
    "Python float": lambda: 1.5,
    "Python int": lambda: 3,
    "Python bool": lambda: True,
    "Python complex": lambda: 1j,
    "str": lambda: "dense",
    "callable": lambda: identity,
    "int struct": lambda: jax.ShapeDtypeStruct((2,), jnp.int32),
}

# Leaves that a cast must cast, made with a given dtype.
FLOAT_LEAVES: dict[str, Callable[[Any], Any]] = {
    "jax": lambda dtype: jnp.ones((2, 3), dtype),
    "jax scalar": lambda dtype: jnp.ones((), dtype),
    "jax empty": lambda dtype: jnp.ones((0, 3), dtype),
    "numpy": lambda dtype: np.ones((2, 3), dtype),
    "numpy scalar": lambda dtype: np.dtype(dtype).type(1.5),
    "numpy empty": lambda dtype: np.ones((0,), dtype),
    "struct": lambda dtype: jax.ShapeDtypeStruct((4,), dtype),
}


def is_same_array(a: Any, b: Any) -> bool:
    """Whether two arrays have equal dtype, shape and bits (NaN and -0.0 included)."""
    if isinstance(a, jax.Array) and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        return a.dtype == b.dtype and is_same_array(
            jax.random.key_data(a), jax.random.key_data(b)
        )
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_bits(a: Any, b: Any) -> None:
    """Fails, with the path, unless two trees are equal bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    left, right = (jax.tree_util.tree_leaves_with_path(tree) for tree in (a, b))
    for (path, x), (_, y) in zip(left, right, strict=True):
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            assert is_same_array(x, y), f"{jax.tree_util.keystr(path)}: {x} and {y}"
        else:
            assert x == y, jax.tree_util.keystr(path)


def all_codes(dtype: Any) -> np.ndarray:
    """Every value of a format of at most 16 bits, NaNs included."""
    size = ml_dtypes.finfo(dtype).bits // 8
    return np.arange(2 ** (8 * size)).astype(f"uint{8 * size}").view(dtype)


@contextlib.contextmanager
def unchecked_annotations() -> Iterator[None]:
    """Switches the jaxtyping hook off, to see what a user sees for a wrong argument."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@dataclasses.dataclass(frozen=True)
class Case:
    """A wrong call, the type of its error, and what its message must say."""

    name: str
    call: Callable[[], Any]
    error: type[Exception]
    match: str

    @property
    def test_id(self) -> str:
        """The name without addresses, which differ from process to process."""
        return re.sub(r" at 0x[0-9a-f]+", "", self.name)

    def check(self) -> None:
        """Fails unless the call is refused, as a user sees it: without the hook."""
        with unchecked_annotations(), pytest.raises(self.error, match=self.match):
            self.call()


def refused(
    error: type[Exception], *pairs: tuple[str, Callable[[], Any]]
) -> list[Case]:
    """A case for each message with its call; the message is the name, too."""
    return [Case(match, call, error, match) for match, call in pairs]


def each_refused(
    error: type[Exception], match: str, call: Callable[[Any], Any], *values: Any
) -> list[Case]:
    """A case for each value of an argument, all with one message."""
    return [
        Case(f"{match} {v}", functools.partial(call, v), error, match) for v in values
    ]


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`; those that are not among the quick ones are slow.

    Args:
        quick: What `make test` runs: one of each kind.
        cases: All. A tuple is several arguments. Of the others `.ci/run` runs every
            third one, and `make test ARGS=--exhaustive` all.
    """
    quick, cases = list(quick), list(cases)
    assert all(case in cases for case in quick), "there is no such case"
    marks = itertools.cycle((pytest.mark.slow, *2 * (pytest.mark.exhaustive,)))
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else next(marks),
        )
        for case in cases
    ]


def in_two_processes(
    *command: str, devices: int, timeout: float = 240, **environment: str
) -> list[Any]:
    """What two processes of `python COMMAND INDEX ADDRESS` say, as JSON, in the end.

    Args:
        *command: What Python is to run.
        devices: How many devices each of them has.
        timeout: Seconds after which they are killed.
        **environment: Variables beside those of this process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # All other flags as here: bits are those of a compiler. The last one counts.
    count = f"--xla_force_host_platform_device_count={devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {count}"
    processes = [
        subprocess.Popen(
            [sys.executable, *command, str(index), address],
            cwd=Path(__file__).parents[1],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": flags,
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


class NoFlow(Flow):
    """The flow without facts."""

    def constant(self, value):
        return None

    def transfer(self, equation, facts):
        return [None] * len(equation.outvars)

    def join(self, a, b):
        return None
