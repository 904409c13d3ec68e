"""Programs that a TPU's compiler made without code, against the whole compilation."""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

import mpx
from mpx._tools._counter import (
    TARGETS,
    compile_only_devices,
    kernels_of,
    memory,
    parse,
    program_of,
    traffic,
)
from mpx._tools._forecast._steps import ForecastStep, Variant

V5E = TARGETS["v5e"]
pytestmark = pytest.mark.third_party


@functools.cache
def devices(count=1):
    return compile_only_devices(V5E, count)


def shaped(*shape, dtype=jnp.float32, sharding=None):
    sharding = sharding or SingleDeviceSharding(devices()[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def by_scan(w, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)


def descent(w, x):
    return w - 0.1 * jax.grad(by_scan)(w, x)


def on_one_device():
    return jax.jit(descent, donate_argnums=0), (shaped(6, 512, 512), shaped(256, 512))


def on_four_devices():
    mesh = Mesh(np.array(devices(4)).reshape(2, 2), ("data", "model"))
    w = shaped(6, 512, 512, sharding=NamedSharding(mesh, jax.P(None, None, "model")))
    x = shaped(256, 512, sharding=NamedSharding(mesh, jax.P("data")))
    return jax.jit(descent, donate_argnums=0), (w, x)


def with_keys_and_kernels():
    def double(ours, theirs):
        theirs[...] = 2 * ours[...]

    def step(key, x, unused):
        kept = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
        made = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, out_shape=made)(kept), jax.random.split(key)

    key = shaped(dtype=jax.random.key(0).dtype)
    return jax.jit(step, donate_argnums=1), (key, shaped(256, 512), shaped(99))


# Bytes of code, of the compiler's own, and on the chip.
SLACK = {
    "on_one_device": 2**27,
    "on_four_devices": 2**27,
    "with_keys_and_kernels": 2**17,
}


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SLACK)
def test_it_is_the_program_of_the_whole_compilation(name):
    func, args = globals()[name]()
    lowered = func.lower(*args)
    found = program_of(lowered, V5E, devices(4 if "four" in name else 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compilation cache
        whole = lowered.compile()
    text = whole.as_text()
    kernels = kernels_of(found.text)
    assert traffic(kernels) == traffic(kernels_of(text))
    assert len(kernels) == len(kernels_of(text))
    assert parse(found.text).aliased == parse(text).aliased != set()
    sizes = whole.memory_analysis()
    own = found.memory - found.temporaries
    assert own == memory(whole) - sizes.temp_size_in_bytes
    assert abs(found.temporaries - sizes.temp_size_in_bytes) < SLACK[name]


@pytest.mark.libtpu
def test_where_no_process_starts_it_is_compiled_as_a_whole(monkeypatch):
    lowered = jax.jit(lambda x: x * 2).lower(shaped(256))
    for executable in ("/bin/false", "/no/such/file"):
        monkeypatch.setattr(sys, "executable", executable)
        program = program_of(lowered, V5E, devices())
        assert traffic(kernels_of(program.text)) == 2 * 4 * 256


def block(x, w):
    return x + jax.nn.silu(x @ w[0]) @ w[1]


def in_a_scan(params, x):
    scale, w = params
    return jnp.mean(lax.scan(lambda x, w: (block(x, w), None), x * scale, w)[0] ** 2)


def unrolled(params, x):
    scale, ws = params
    x = x * scale  # the first layer has a gradient of its input as well
    for w in ws:
        x = block(x, w)
    return jnp.mean(x**2)


def forecast_of(layers, loss=in_a_scan, width=256, **options):
    shapes = ((width, 2 * width), (2 * width, width))
    stacked = tuple(jax.ShapeDtypeStruct((layers, *s), jnp.float32) for s in shapes)
    each = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)] * layers
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    x = jax.ShapeDtypeStruct((1024, width), jnp.float32)
    asked = {"targets": "v5e", "precisions": "bfloat16", **options}
    params = (scale, stacked if loss is in_a_scan else each)
    return mpx.forecast(loss, optax.adam(1e-3), **asked)(params, x)


@pytest.mark.libtpu
@pytest.mark.slow
def test_layers_in_a_scan_count_as_unrolled_ones():
    products = 6 * 2 * 1024 * 256 * 512  # of a layer, forward and backward
    for layers, loss in ((4, in_a_scan), (4, unrolled), (300, in_a_scan)):
        report = forecast_of(layers, loss)
        (one,) = report.estimates
        assert one.flops == {"16 bits": pytest.approx(layers * products, rel=0.02)}
        assert one.findings == ()
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in str(report)
        assert sum(one.memory_by_part.values()) == one.memory


@pytest.mark.libtpu
def test_what_cannot_be_counted_is_said_in_the_report():
    def loss(w, x):
        def go_on(state):
            return state[1].sum() < 3

        def turn(state):
            return state[0] + 1, jnp.tanh(state[1] @ w)

        return lax.while_loop(go_on, turn, (0, x))[1].sum()

    def step(w, x):
        return w * loss(w, x)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 256), (8, 256))]
    report = mpx.forecast(step, targets="v5e")(*shapes)
    said = "unknown number of times, and count once: 1 (tests/tools/forecast/"
    assert said in report.estimates[0].findings[0]
    assert said in str(report)
    assert said in report.to_html()
    assert type(report).from_json(report.to_json()).estimates == report.estimates


@pytest.mark.libtpu
def test_a_program_that_does_not_fit():
    one = forecast_of(40, width=16384).estimates[0]
    assert one.memory is None


def test_only_the_whole_compilation_knows_options_of_the_users_jit(on_cpu):
    target, x = V5E, jax.ShapeDtypeStruct((3,), jnp.float32)
    for options, has in (({}, False), ({"xla_cpu_enable_fast_math": True}, True)):
        func = jax.jit(lambda x: x * 2, compiler_options=options)
        step = ForecastStep(func, None, False, (x,), {})
        assert step.lower(Variant("", {}), target).has_options is has
