"""The half precision datatype: process default, thread value, and retracing."""

import concurrent.futures
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import EIGHT_BITS, HALF


@pytest.fixture(autouse=True)
def _restored():
    before = mpx.half_precision_datatype()
    yield
    mpx.set_half_precision_datatype(before)


def test_constants():
    assert mpx.FLOAT16_MAX == float(jnp.finfo(jnp.float16).max) == 65504.0
    assert mpx.BFLOAT16_MAX == float(jnp.finfo(jnp.bfloat16).max)
    assert type(mpx.FLOAT16_MAX) is type(mpx.BFLOAT16_MAX) is float


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float16", "float16"),
        ("f16", "float16"),
        (jnp.float16, "float16"),
        (np.dtype("float16"), "float16"),
        ("bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        (jnp.ones((), jnp.bfloat16).dtype, "bfloat16"),
    ],
)
def test_setter_takes_names_and_dtypes(given, expected):
    mpx.set_half_precision_datatype(given)
    assert mpx.half_precision_datatype() == jnp.dtype(expected)
    assert mpx.HALF_PRECISION_DATATYPE == jnp.dtype(expected)
    assert mpx.cast_to_half_precision(jnp.ones(2)).dtype == jnp.dtype(expected)


@pytest.mark.parametrize("dtype", ["float32", "int8", "fp16", None, 3, jnp.float32])
def test_only_half_precision(dtype):
    enter = lambda dtype: mpx.half_precision(dtype).__enter__()  # noqa: E731
    for call in (mpx.set_half_precision_datatype, enter):
        with pytest.raises(ValueError, match="needs float16 or bfloat16"):
            call(dtype)
    assert mpx.half_precision_datatype() == np.float16


def test_context_nests_and_restores_after_an_error():
    with mpx.half_precision("bfloat16"):
        with mpx.half_precision("float16"):
            assert mpx.half_precision_datatype() == np.float16
        assert mpx.half_precision_datatype() == jnp.bfloat16
        with pytest.raises(KeyError):
            with mpx.half_precision("float16"):
                raise KeyError
        assert mpx.half_precision_datatype() == jnp.bfloat16
    assert mpx.half_precision_datatype() == np.float16


def test_context_wins_over_the_setter():
    with mpx.half_precision("float16"):
        mpx.set_half_precision_datatype("bfloat16")
        assert mpx.half_precision_datatype() == np.float16
    assert mpx.half_precision_datatype() == jnp.bfloat16


def test_half_in_a_context_is_its_dtype():
    with mpx.half_precision("bfloat16"):
        mpx.set_half_precision_datatype("half")
    assert mpx.half_precision_datatype() == jnp.bfloat16


def _in_threads(bodies):
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as threads:
        for future in [threads.submit(body) for body in bodies]:
            future.result()


def test_threads_do_not_see_each_other():
    barrier = threading.Barrier(2, timeout=60)
    jitted = jax.jit(mpx.cast_to_half_precision)

    def run(name):
        with mpx.half_precision(name):
            for _ in range(20):
                barrier.wait()
                assert mpx.cast_to_half_precision(jnp.ones(2)).dtype == name
                assert jitted(jnp.ones(2)).dtype == name

    _in_threads([functools.partial(run, jnp.dtype(name)) for name in HALF])


def test_the_setter_is_for_all_threads():
    mpx.set_half_precision_datatype("bfloat16")
    seen = []
    _in_threads([lambda: seen.append(mpx.half_precision_datatype())])
    assert seen == [jnp.dtype("bfloat16")]


def test_jitted_code_is_traced_anew_and_cached_for_each_setting():
    traces = []

    @jax.jit
    def f(x):
        traces.append(mpx.half_precision_datatype().name)
        return mpx.cast_to_half_precision(x)

    x = jnp.ones(2)
    for name in ("float16", "bfloat16", "float16", "bfloat16"):
        mpx.set_half_precision_datatype(name)
        assert f(x).dtype == jnp.dtype(name)
    mpx.set_half_precision_datatype("float16")
    with mpx.half_precision("bfloat16"):
        assert f(x).dtype == jnp.bfloat16
    assert f(x).dtype == np.float16
    assert traces[:2] == ["float16", "bfloat16"]
    assert len(traces) <= 3  # a context and a default may be two cache entries


@pytest.mark.parametrize("name", ["half", "full", "f32", "float32", *EIGHT_BITS])
def test_names_that_a_cast_takes(name):
    expected = {"half": "float16", "full": "float32", "f32": "float32"}.get(name, name)
    assert mpx.cast_tree(np.ones(2), name).dtype == jnp.dtype(expected)
