"""What `init_scaling` gives is what the gradient functions need, for every function.

And float16 without loss scaling is said aloud.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
import mpx.compat.jaxamp as jaxamp
import mpx.nnx

from ..helpers import unchecked_annotations

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
DYNAMIC, NONE = mpx.DynamicLossScaling, mpx.NoLossScaling
WARNING = "computes in float16 with `mpx.NoLossScaling`: gradients below 6e-8"


def plain(w, x):
    return mpx.force_full_precision(jnp.mean, jnp.float32)(x @ w)


def kind(func, *args, **options):
    return type(mpx.init_scaling(func, *(args or (W, X)), **options))


@mpx.autocast()
def with_region(w, x):
    with mpx.autocast(dtype=jnp.float16):
        y = x @ w
    return jnp.mean((y @ w).astype(jnp.float32))


def as_float16(candidate, operands):
    return [x.astype(jnp.float16) for x in operands], dict(
        candidate.equation.params, preferred_element_type=np.dtype(np.float16)
    )


RULES = mpx.Rules(mpx.Rule(as_float16, primitive="dot_general"))


class Model(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return plain(self.weight, x)

    @mpx.autocast(dtype=jnp.float16)
    def half(self, x):
        return jnp.mean(x @ self.weight)


class Plain:
    @mpx.autocast(dtype=jnp.float16)
    def loss(self, w, x):
        return jnp.mean(x @ w)


HALF = mpx.autocast(plain, jnp.float16)
NESTED = lambda w, x: HALF(w, x)  # noqa: E731
POLICY = "params=float32,compute={},output=float32"


def half_by_itself(w, x):
    return plain(w.astype(jnp.float16), x.astype(jnp.float16))


# A function, what it is called with, and options.
FLOAT16 = {
    "explicit": (plain, (W, X)),
    "partial of explicit": (functools.partial(plain, x=X), (W,)),
    "policy": (plain, (W, X), POLICY.format("float16")),
    "autocast": (HALF, (W, X)),
    "jitted": (jax.jit(HALF), (W, X)),
    "filter_jitted": (eqx.filter_jit(HALF), (W, X)),
    "checkpointed": (jax.checkpoint(HALF), (W, X)),
    "partial": (functools.partial(HALF, x=X), (W,)),
    "called inside": (NESTED, (W, X)),
    "autocast around autocast": (mpx.autocast(NESTED), (W, X)),
    "region": (with_region, (W, X)),
    "rule": (mpx.autocast(plain, rules=RULES), (W, X)),
    "method": (Plain().loss, (W, X)),
    "module": (Model(W), (X,)),
    "method of a module": (Model(W).half, (X,)),
    "autocast of a module": (mpx.autocast(Model(W), jnp.float16), (X,)),
    "half by its own": (half_by_itself, (W, X), POLICY.format("float32")),
}
OFF = mpx.autocast(plain, jnp.float16, enabled=False)
OTHERS = {
    "policy": (plain, (W, X), POLICY.format("bfloat16")),
    "policy object": (plain, (W, X), mpx.get_policy("full")),
    "autocast": (mpx.autocast(plain), (W, X)),
    "jitted": (jax.jit(mpx.autocast(plain)), (W, X)),
    "called inside": (lambda w, x: mpx.autocast(plain)(w, x), (W, X)),
    "switched off": (OFF, (W, X)),
    "switched off inside": (lambda w, x: OFF(w, x), (W, X)),
    "float32": (mpx.autocast(plain, jnp.float32), (W, X)),
}


@pytest.mark.parametrize(
    ("case", "expected"),
    [(c, DYNAMIC) for c in FLOAT16.values()] + [(c, NONE) for c in OTHERS.values()],
    ids=[*FLOAT16, *(f"other {name}" for name in OTHERS)],
)
def test_whatever_computes_in_float16_gets_dynamic_scaling(case, expected):
    func, args, *policy = case
    options = {"policy": policy[0]} if policy else {}
    assert kind(func, *args, **options) is expected


def test_a_recipe_without_a_state_has_no_scales_but_says_what_it_quantizes():
    current = mpx.autocast(plain, recipe=mpx.Float8CurrentScaling())
    scaling = mpx.init_scaling(current, W, X)
    assert type(scaling.loss) is NONE and scaling.scales == scaling.amaxes == ()
    assert len(scaling.quantized) == 1


def test_the_half_precision_of_the_explicit_style_counts():
    with mpx.half_precision("bfloat16"):
        assert kind(plain) is NONE
    assert kind(plain) is DYNAMIC
    with mpx.autocast(dtype=jnp.float16, ambient=True):
        assert kind(mpx.autocast(plain)) is DYNAMIC
        with mpx.autocast(enabled=False, ambient=True):
            assert kind(mpx.autocast(plain)) is NONE


def test_models_of_frameworks():
    dense = nn.Dense(4)
    params = dense.init(jax.random.key(0), X)
    linen = lambda params, x: jnp.mean(dense.apply(params, x))  # noqa: E731
    assert kind(linen, params, X) is DYNAMIC
    assert kind(mpx.autocast(linen), params, X) is NONE
    half = nn.Dense(4, dtype=jnp.float16)
    linen = mpx.autocast(lambda p, x: jnp.mean(half.apply(p, x).astype(jnp.float32)))
    assert kind(linen, params, X) is DYNAMIC

    haiku = hk.without_apply_rng(hk.transform(lambda x: jnp.mean(hk.Linear(4)(x))))
    params = haiku.init(jax.random.key(0), X)
    assert kind(haiku.apply, params, X) is DYNAMIC
    assert kind(mpx.autocast(haiku.apply), params, X) is NONE


@pytest.mark.slow
@pytest.mark.third_party
def test_models_of_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    net = Net(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(net, nnx.BatchStat))
    loss = lambda net, x: jnp.mean(net(x).astype(jnp.float32))  # noqa: E731
    assert kind(loss, net, X) is DYNAMIC
    assert kind(mpx.autocast(loss), net, X) is NONE
    after = nnx.state(net, nnx.BatchStat)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, after))
    with pytest.warns(UserWarning, match="`mpx.nnx.grad` computes in float16"):
        mpx.nnx.grad(loss, NONE())(net, X)


def test_a_policy_that_is_none():
    refused = pytest.raises(TypeError, match="`policy` of `mpx.init_scaling`.*partial")
    with unchecked_annotations(), refused:
        kind(plain, policy=3)
    with pytest.raises(ValueError, match="an autocast function.*Omit it"):
        kind(mpx.autocast(plain), policy="full")


# --- The line that was forgotten ------------------------------------------------------


def test_training_goes_on_without_the_line_that_says_autocast():
    """In float16 then, and scaled: gradients of 1e-7 arrive."""
    loss = lambda w, x: plain(w, x) * 1e-7  # noqa: E731
    result = mpx.filter_grad(loss, mpx.init_scaling(loss, W, X))(W, X)
    np.testing.assert_allclose(result.grads, jax.grad(loss)(W, X), rtol=2e-3)


GRADIENTS = {
    "filter_grad": mpx.filter_grad,
    "filter_value_and_grad": mpx.filter_value_and_grad,
    "grad": mpx.grad,
    "value_and_grad": mpx.value_and_grad,
    "calculate_scaled_grad": mpx.calculate_scaled_grad,
    "accumulate": functools.partial(mpx.filter_grad, accumulate=2),
    "accumulate_dtype": functools.partial(mpx.filter_grad, accumulate_dtype="float32"),
    "skip=False": lambda f, s: mpx.filter_grad(f, NONE(skip=False)),
}
WARNED = ("explicit", "autocast", "jitted", "region", "rule", "autocast", "explicit")


@pytest.mark.parametrize(
    ("gradient", "name"),
    [*zip(GRADIENTS, WARNED, strict=False), ("skip=False", "jitted")],
)
def test_float16_without_loss_scaling_gets_a_warning(gradient, name):
    func = FLOAT16[name][0]
    with pytest.warns(UserWarning, match=WARNING) as caught:
        GRADIENTS[gradient](func, NONE())(W, X)
    assert [str(w.filename) for w in caught] == [__file__]


def test_the_warning_says_what_to_do_at_the_line_of_the_call():
    with pytest.warns(UserWarning) as caught:
        line = warn_here()
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line)
    text = str(warning.message)
    for remedy in (
        "mpx.DynamicLossScaling()",
        "mpx.init_scaling(func, *args)",
        "mpx.autocast(func)",
        'policy="bfloat16"',
        "mpx.StaticLossScaling(1.0)",
    ):
        assert remedy in text


def warn_here():
    mpx.filter_grad(plain, NONE())(W, X)
    return warn_here.__code__.co_firstlineno + 1


def test_a_line_warns_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import jax, jax.numpy as jnp, mpx\n"
        "step = lambda w, s: mpx.filter_grad(lambda w: jnp.sum(w), s)(w)\n"
        "for _ in range(3):\n"
        "    step(jnp.ones(2), mpx.NoLossScaling())\n"
        "    jax.jit(step)(jnp.ones(2), mpx.NoLossScaling())\n"
    )
    options = {"capture_output": True, "text": True, "check": True}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, str(script)], env=environment, **options)
    assert found.stderr.count("UserWarning") == 1
    assert f"{script}:2: UserWarning" in found.stderr


control = functools.partial(mpx.filter_grad, use_mixed_precision=False)
QUIET = {
    "dynamic": lambda: mpx.filter_grad(plain, DYNAMIC()),
    "a static scale of one": lambda: mpx.filter_grad(plain, mpx.StaticLossScaling(1.0)),
    "bfloat16": lambda: mpx.filter_grad(plain, NONE(), policy="bfloat16"),
    "autocast": lambda: mpx.filter_grad(mpx.autocast(plain), NONE()),
    "switched off": lambda: mpx.filter_grad(OFF, NONE()),
    "control": lambda: control(plain, NONE()),
    "control of autocast": lambda: control(HALF, NONE()),
}


@pytest.mark.parametrize("name", QUIET)
def test_where_nothing_can_vanish_there_is_no_warning(name):
    QUIET[name]()(W, X)


@pytest.mark.third_party
def test_drop_ins_keep_quiet_where_their_predecessors_do():
    amp = jaxamp.amp(plain, compute_dtype=jnp.float16)
    jax.grad(amp)(W, X)
    scaled = jaxamp.dynamic_scale_grad(amp)
    scaled(W, X, dynamic_scaler_state=jaxamp.DynamicScalerState())


def test_a_report_finds_gradients_that_nothing_scales():
    def count(func, *args):
        found = [o.finding for o in mpx.explain(func)(*(args or (W, X))).findings]
        finding = "float16 gradients without loss scaling"
        return sum(text.startswith(finding) for text in found)

    assert count(jax.grad(HALF)) == count(jax.grad(with_region)) == 1
    assert count(HALF) == 0  # no gradient
    assert count(jax.grad(mpx.autocast(plain))) == 0
    step = lambda s, w, x: mpx.filter_grad(HALF, s)(w, x).grads  # noqa: E731
    assert count(step, DYNAMIC(), W, X) == 0
    assert count(step, mpx.StaticLossScaling(1.0), W, X) == 0
    with pytest.warns(UserWarning, match=WARNING):
        assert count(step, NONE(), W, X) == 1
    by_hand = lambda w, x, scale: scale * HALF(w, x)  # noqa: E731
    assert count(jax.grad(by_hand), W, X, jnp.float32(1024)) == 0
    assert count(jax.grad(lambda w, x: 1024 * HALF(w, x))) == 0
    assert count(jax.grad(lambda w, x: HALF(w, x) / 3)) == 1
