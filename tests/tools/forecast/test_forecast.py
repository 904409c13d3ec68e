"""Forecasts of whole steps: by the CPU's compiler, and by those of targets if here."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpx
from mpx._program import Frame
from mpx._tools._counter import TARGETS
from mpx._tools._counter._targets import why_missing
from mpx._tools._forecast import _estimate, _steps

pytestmark = pytest.mark.third_party

W = {"a": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
W["b"] = jax.ShapeDtypeStruct((256, 64), jnp.float32)
X = jax.ShapeDtypeStruct((512, 64), jnp.float32)
ADAM = optax.adam(1e-3)


def loss(weights, x):
    with jax.named_scope("block"):
        hidden = jax.nn.gelu(x @ weights["a"])
    return jnp.mean((hidden @ weights["b"]) ** 2)


def test_a_loss_in_each_precision(on_cpu):
    asked = {"precisions": ("float32", "bfloat16"), **on_cpu}
    report = mpx.forecast(loss, ADAM, **asked)(W, X)
    full, half = report.estimates
    assert (full.precision, half.precision) == ("float32", "bfloat16")
    assert full.batch == 512
    size = 4 * 2 * 64 * 256
    for one in (full, half):
        assert one.memory == sum(one.memory_by_part.values())
        assert one.memory_by_part["weights"] == size
        assert one.memory_by_part["optimizer"] == 2 * size + 4
        assert one.time[0] <= one.time[1]
        assert one.roofline <= one.time[0]
    assert "float32 takes" in report.sentences[0]


def test_a_whole_step_is_donated(on_cpu):
    def step(weights, state, x):
        updates, state = ADAM.update(jax.grad(loss)(weights, x), state)
        return optax.apply_updates(weights, updates), state

    state = jax.eval_shape(ADAM.init, W)
    plain = mpx.forecast(step, **on_cpu)(W, state, X).estimates[0]
    jitted = mpx.forecast(jax.jit(step), **on_cpu)(W, state, X).estimates[0]
    assert plain.precision == "as written"
    assert jitted.memory > plain.memory  # nothing is donated in it


def test_a_forecast_of_a_gradient_of_equinox_and_of_one_place_for_a_result(on_cpu):
    wrapped = eqx.filter_value_and_grad(loss)
    ours, jax_own, alone = (
        sum(mpx.forecast(f, **on_cpu)(W, X).estimates[0].flops.values())
        for f in (wrapped, jax.value_and_grad(loss), loss)
    )
    assert ours == jax_own > 2 * alone

    # A result has the place of one argument.
    def average(weights, others):
        return (jax.tree.map(lambda a, b: (a + b) / 2, weights, others),)

    memory = mpx.forecast(average, **on_cpu)(W, W).estimates[0].memory
    assert memory >= 2 * 4 * 2 * 64 * 256


def test_precisions_of_half_weights_and_keyword_arguments(on_cpu):
    half = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), W)
    asked = ("float32", "bfloat16")
    optimizer = mpx.master_weights(ADAM)
    report = mpx.forecast(loss, optimizer, precisions=asked, **on_cpu)(half, X)
    assert [one.precision for one in report.estimates] == ["as written", "bfloat16"]
    forecast = mpx.forecast(loss, ADAM, precisions="float32", **on_cpu)
    (one,), (other,) = forecast(W, x=X).estimates, forecast(W, X).estimates
    assert one.memory_by_part == other.memory_by_part


def test_equinox_and_nnx_and_has_aux(on_cpu):
    nnx = pytest.importorskip("flax.nnx")
    model = eqx.filter_eval_shape(eqx.nn.MLP, 64, 64, 256, 1, key=jax.random.key(0))

    def of_equinox(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2), x

    def of_nnx(model, x):
        return jnp.mean(model(x) ** 2)

    def make():
        linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        return nnx.Sequential(linear, nnx.BatchNorm(64, rngs=nnx.Rngs(0)))

    asked = {"precisions": "bfloat16", **on_cpu}
    report = mpx.forecast(of_equinox, ADAM, has_aux=True, **asked)(model, X)
    weights = report.estimates[0].memory_by_part["weights"]
    assert weights == 4 * (2 * 64 * 256 + 256 + 64)
    report = mpx.forecast(of_nnx, ADAM, **asked)(nnx.eval_shape(make), X)
    assert report.estimates[0].memory_by_part["weights"] == 4 * (64 * 64 + 3 * 64)


def test_a_wrong_loss_names_the_forecast(on_cpu):
    match = r"passed to `mpx\.forecast` must return .*set `has_aux=True`"
    with pytest.raises(TypeError, match=match):
        mpx.forecast(lambda w, x: (loss(w, x), x), ADAM, **on_cpu)(W, X)
    with pytest.raises(TypeError) as caught:  # which cannot be traced
        mpx.forecast(lambda w, x: x @ w["a"].T, ADAM, **on_cpu)(W, X)
    assert "float32 for TPU v5e" in caught.value.__notes__[-1]


def test_progress_is_logged_and_frames_of_python_are_left_out(on_cpu, caplog):
    with caplog.at_level("INFO", "mpx.forecast"):
        mpx.forecast(loss, ADAM, precisions="bfloat16", **on_cpu)(W, X)
    assert caplog.messages == ["Compiling bfloat16 for TPU v5e, batch 512"]
    outer, inner = ("<frozen runpy>", "_run_code", 1), ("/home/me/train.py", "loss", 7)
    found = [Frame("/home/me/train.py", 7, 0, "loss")]
    assert _estimate._inside([inner, outer]) == found
    ours = (_estimate.__file__, "estimate", 1)
    assert _estimate._inside([inner, ours, inner, outer]) == found


def test_arrays_over_a_mesh(on_cpu):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    divided = NamedSharding(mesh, PartitionSpec("data"))

    def placed(one):
        return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=divided)

    w, x = jax.tree.map(placed, (W, X))
    one = mpx.forecast(loss, ADAM, precisions="float32", **on_cpu)(w, x).estimates[0]
    assert one.memory_by_part["weights"] == 4 * 64 * 256
    assert one.memory_by_part["optimizer"] == 2 * 4 * 64 * 256 + 4
    assert one.sent


LOW = mpx.compress_state(optax.MultiSteps(optax.lion(0.1), 4))
OVER_MESHES = {
    "adam": ADAM,
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=8, momentum=0.9),
    "masters": mpx.master_weights(optax.masked(ADAM, {"a": True, "z": False})),
    "low bits": mpx.master_weights(LOW, bits=8),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, AxisType.Auto) for name in OVER_MESHES), ("adam", AxisType.Explicit)],
)
def test_state_over_a_mesh_has_the_bytes_of_what_is_made(on_cpu, name, kind):
    """Of `mpx.init_optimizer`; `['a']` is listed before `['z']['a']`, its end."""
    optimizer = OVER_MESHES[name]
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    dtype = jnp.bfloat16 if name in ("masters", "low bits") else jnp.float32
    shapes = {"a": (128, 128), "z": {"a": (128, 128), "b": (3, 64, 100), "c": (40, 64)}}
    specs = {"a": (), "z": {"a": ("d", "t"), "b": (None, ("d", "t")), "c": ("t",)}}

    def placed(make, mesh):
        def one(shape, spec):
            return make(shape, dtype, NamedSharding(mesh, PartitionSpec(*spec)))

        return jax.tree.map(one, shapes, specs, is_leaf=lambda x: isinstance(x, tuple))

    types = {"axis_types": (kind,) * 2}
    there = jax.make_mesh((4, 2), ("d", "t"), **types)
    weights = placed(lambda s, d, where: jnp.ones(s, d, device=where), there)
    state = jax.tree.leaves(mpx.init_optimizer(optimizer, weights))
    true = sum(x.addressable_shards[0].data.nbytes for x in state)

    absent = AbstractMesh((4, 2), ("d", "t"), **types)
    model = placed(
        lambda s, d, where: jax.ShapeDtypeStruct(s, d, sharding=where), absent
    )
    step = _steps.ForecastStep(
        lambda w: jnp.sum(w["a"]), optimizer, False, (model,), {}
    )
    lowered = step.lower(_steps.Variant("", {"enabled": False}), TARGETS["h100"])
    assert lowered.arguments["optimizer"] == true


@pytest.mark.slow
def test_the_largest_batch(on_cpu):
    asked = {"precisions": ("float32", "bfloat16"), "largest_batch": True, **on_cpu}
    limits = {"tpu-v5e": {"memory": 20_000_000}}
    report = mpx.forecast(loss, ADAM, constants=limits, **asked)(W, X)
    for one in report.estimates:
        assert one.largest_batch > 512
    assert any(c.source == "given" for c in report.constants if c.name == "memory")
    limits = {"tpu-v5e": {"memory": 100_000}}
    report = mpx.forecast(loss, ADAM, constants=limits, **asked)(W, X)
    assert {one.largest_batch for one in report.estimates} == {0}
    assert "does not fit: it needs" in report.sentences[0]
    with pytest.raises(ValueError, match="needs an array after the model"):
        mpx.forecast(lambda w: loss(w, w["b"]), ADAM, **asked)(W)


TWICE = ("delayed", mpx.DelayedScaling())
BANDWIDTH = {"h100": {"bandwith": 1}}
VALUE_ERRORS = {
    "got 'a100'": lambda: mpx.forecast(loss, targets="a100"),
    "must be of float32, .*; got str 'int4'": lambda: mpx.forecast(
        loss, ADAM, precisions="int4"
    ),
    "at least one; got none": lambda: mpx.forecast(loss, targets=()),
    "a different label; got \\['delayed', 'delayed'\\]": lambda: mpx.forecast(
        loss, ADAM, precisions=TWICE
    ),
    "at least one, each": lambda: mpx.forecast(loss, ADAM, precisions=()),
    "'bandwith'": lambda: mpx.forecast(loss, constants=BANDWIDTH),
    "must be of `targets`; got 'b200'": lambda: mpx.forecast(
        loss, constants={"b200": {}}
    ),
    "Pass the plain function": lambda: mpx.forecast(mpx.autocast(loss), ADAM)(W, X),
}
TYPE_ERRORS = {
    "needs a loss or a step; got int 3": lambda: mpx.forecast(3),
    "residuals only with an optimizer": lambda: mpx.forecast(loss, residuals="fast"),
    "needs the arguments": lambda: mpx.forecast(loss, ADAM)(),
    "Optax transformation": lambda: mpx.forecast(loss, 3)(W, X),
}


@pytest.mark.parametrize("match", [*VALUE_ERRORS, *TYPE_ERRORS])
def test_wrong_input(match):
    error, calls = ValueError, VALUE_ERRORS
    if match in TYPE_ERRORS:
        error, calls = TypeError, TYPE_ERRORS
    with pytest.raises(error, match=match):
        calls[match]()


def test_no_compiler_says_the_line_that_installs_it(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install libtpu"):
        mpx.forecast(loss, ADAM, targets="tpu-v5e")(W, X)
    with pytest.raises(RuntimeError, match=r'pip install "jax\[cuda12\]"'):
        mpx.forecast(loss, ADAM)(W, X)


@pytest.mark.slow
def test_forecast_is_not_imported_with_mpx():
    code = "import sys, mpx; assert not any('_forecast' in n for n in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_by_the_compiler_of_a_target(name):
    if why_missing(TARGETS[name]) is not None:
        pytest.skip(f"the compiler for {name} is not installed")
    asked = {"precisions": ("bfloat16", "delayed"), "targets": name}
    half, few = mpx.forecast(loss, ADAM, **asked)(W, X).estimates
    assert half.flops["16 bits"]
    assert few.quantizing
    assert any(group.source for group in half.top)
