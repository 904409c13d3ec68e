"""What holds in every test and doctest.

Our own code is tested under strict dtype promotion and without rank promotion, so that
no cast happens by accident. Code of others (Optax's Adam, Equinox's BatchNorm, Flax,
Haiku) needs JAX's defaults: mark such a test `third_party`.

This file stands at the root, not in `tests/`, because the doctests in `mpx/` obey it
too. It must not import mpx: the jaxtyping hook has to be in place before that.
"""

import builtins
import gc
import importlib.metadata
import importlib.util
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

_ROOT = Path(__file__).parent

# Before JAX is imported. The CPU unless JAX_PLATFORMS says more, as eight devices; TPU
# programs are compiled without a chip, and nobody is to be asked for one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is half of a cold run, most of it of many small programs that run once. So
# XLA:CPU is told to make less effort, which halves the time, and to leave the code in
# one piece: in up to 32 pieces it took 1.7 times the CPU time (jaxlib 0.10.2, a scan of
# three layers). XLA stops the process at a flag that it does not know.
_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if "cuda" in os.environ["JAX_PLATFORMS"]:
    _FLAGS = []  # a GPU is tested as it is used
_XLA = importlib.metadata.version("jaxlib")
if _XLA.startswith("0.10."):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
# Of two collectives that wait for nothing, XLA:CPU begins both at once. Each wants a
# thread of every device, and of as many threads as devices, or cores, either may get
# too few: all wait, and the process is ended after a minute (jaxlib 0.10.2).
os.environ.setdefault("NPROC", "32")
# Of the lines that called an operation, compiled text keeps the innermost.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_LOG_DIR", "disabled")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# By environment, so that the subprocesses of tests share the cache. Two workers do not:
# JAX (0.10 to 0.12) writes an entry in place, and warns if it reads half of one.
_CACHE = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".jax_cache"))
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if _WORKER is not None:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(_CACHE) / _WORKER)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


# Called for each operation and frame. They name no shapes, for which jaxtyping binds
# the arguments of each call to their names: twice the time of a test that traces much.
# And they call no function of a user, whose frames beartype's would stand between, nor
# hold a public one: `unchecked_annotations` switches off what jaxtyping checks alone.
_CALLED_OFTEN = (
    "mpx._autocast._context",
    "mpx._autocast._decide",
    "mpx._autocast._demand",
    "mpx._autocast._emit",
    "mpx._tools._inspect._costs",
    "mpx._tools._inspect._facts",
    "mpx._tools._inspect._report",
    "mpx._tools._inspect._traced",
    "mpx._tools._inspect._findings",
    "mpx._base.jax_compat",
    "mpx._program.equations",
    "mpx._program.flow",
    "mpx._program.islands",
    "mpx._program.primitives",
    "mpx._program.remat",
    "mpx._program.source",
)


import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Tracing makes many objects that are not garbage.
gc.set_threshold(200_000, 50, 100)

# Two profiles: the same examples in every run, or a search for new ones
# (HYPOTHESIS_PROFILE=search). Compiling takes longer than any deadline, and a busy
# machine is no reason to fail.
_PATIENT = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile(
    "repeatable", **_PATIENT, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.register_profile(
    "search", **_PATIENT, max_examples=1000, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that run more."""
    parser.addoption(
        "--slow",
        action="store_true",
        help="run also what is marked `slow`, as `.ci/run` does",
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run all: what is marked `slow` and what is marked `exhaustive`",
    )
    parser.addoption(
        "--any-device",
        action="store_true",
        help="run what is marked `gpu` on whatever device JAX has",
    )
    parser.addoption(
        "--all-types",
        action="store_true",
        help="check the annotations of all of mpx, as a part of `.ci/run` does",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Has all of mpx checked: by jaxtyping's hook, or by beartype alone."""
    if not config.getoption("--all-types"):
        return
    import jaxtyping
    from beartype import BeartypeConf, BeartypeDecorPlace, FrozenDict
    from beartype.claw import beartype_packages

    modules = {
        ".".join(file.relative_to(_ROOT).with_suffix("").parts)
        for file in (_ROOT / "mpx").rglob("*.py")
        if not file.stem.startswith("__")  # for jaxtyping that is the whole package
    }
    others = modules - set(_CALLED_OFTEN)
    jaxtyping.install_import_hook(sorted(others), "tests.check_types")
    conf = BeartypeConf(
        # Below decorators that make a function something else.
        claw_decor_place_func=BeartypeDecorPlace.FIRST,
        claw_is_pep526=False,
        hint_overrides=FrozenDict({Self: Any}),
    )
    beartype_packages(_CALLED_OFTEN, conf=conf)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that takes long, or whose device or compiler is not here."""
    everything = item.config.getoption("--exhaustive")
    slow = everything or item.config.getoption("--slow")
    if item.get_closest_marker("slow") and not slow:
        pytest.skip("slow: `.ci/run` runs it, and `make test ARGS=--slow`")
    if item.get_closest_marker("exhaustive") and not everything:
        pytest.skip("exhaustive: `make test ARGS=--exhaustive` runs it")
    needs_gpu = item.get_closest_marker("gpu") and not item.config.getoption(
        "--any-device"
    )
    if needs_gpu and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU (JAX_PLATFORMS=cuda,cpu where there is one)")
    if item.get_closest_marker("libtpu") and not importlib.util.find_spec("libtpu"):
        pytest.skip("needs libtpu, the TPU's compiler (`.ci/run` installs it)")


def pytest_runtest_teardown() -> None:
    """Forgets what a doctest showed last: tyro hashes all that it finds in builtins."""
    vars(builtins).pop("_", None)


@pytest.fixture(autouse=True)
def promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Strict promotion, or JAX's defaults for what calls the code of others."""
    third_party = request.node.get_closest_marker("third_party") is not None
    with (
        jax.numpy_dtype_promotion("standard" if third_party else "strict"),
        jax.numpy_rank_promotion("allow" if third_party else "raise"),
    ):
        yield


@pytest.fixture(scope="module", autouse=True)
def aged() -> Iterator[None]:
    """Keeps what a file leaves behind, caches of traces, out of later collections.

    `gc.collect()` looked at all of it again: 4 s each time at the end of a whole run.
    """
    yield
    gc.freeze()


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """Gives a new PRNG key at every call, the same ones in every run."""
    key = jax.random.key(zlib.crc32(request.node.nodeid.encode()))

    def next_key() -> jax.Array:
        nonlocal key
        key, result = jax.random.split(key)
        return result

    return next_key


@pytest.fixture
def checking_leaks() -> Iterator[None]:
    """Raises where a traced value outlives the function that was traced."""
    with jax.checking_leaks():
        yield
