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


FLOAT16 = {
    "explicit": (plain, {}),
    "partial of explicit": (functools.partial(plain, x=X), {"args": (W,)}),
    "policy": (plain, {"policy": "params=float32,compute=float16,output=float32"}),
    "autocast": (mpx.autocast(plain, jnp.float16), {}),
    "jitted": (jax.jit(mpx.autocast(plain, jnp.float16)), {}),
    "filter_jitted": (eqx.filter_jit(mpx.autocast(plain, jnp.float16)), {}),
    "checkpointed": (jax.checkpoint(mpx.autocast(plain, jnp.float16)), {}),
    "partial": (
        functools.partial(mpx.autocast(plain, jnp.float16), x=X),
        {"args": (W,)},
    ),
    "called inside": (lambda w, x: mpx.autocast(plain, jnp.float16)(w, x), {}),
    "autocast around autocast": (
        mpx.autocast(lambda w, x: mpx.autocast(plain, jnp.float16)(w, x)),
        {},
    ),
    "region": (with_region, {}),
    "rule": (mpx.autocast(plain, rules=RULES), {}),
    "method": (Plain().loss, {}),
    "module": (Model(W), {"args": (X,)}),
    "method of a module": (Model(W).half, {"args": (X,)}),
    "autocast of a module": (mpx.autocast(Model(W), jnp.float16), {"args": (X,)}),
    "half by its own": (
        lambda w, x: plain(w.astype(jnp.float16), x.astype(jnp.float16)),
        {"policy": "params=float32,compute=float32,output=float32"},
    ),
}
OTHERS = {
    "policy": (plain, {"policy": "params=float32,compute=bfloat16,output=float32"}),
    "policy object": (plain, {"policy": mpx.get_policy("full")}),
    "autocast": (mpx.autocast(plain), {}),
    "jitted": (jax.jit(mpx.autocast(plain)), {}),
    "called inside": (lambda w, x: mpx.autocast(plain)(w, x), {}),
    "switched off": (mpx.autocast(plain, jnp.float16, enabled=False), {}),
    "switched off inside": (
        lambda w, x: mpx.autocast(plain, jnp.float16, enabled=False)(w, x),
        {},
    ),
    "float32": (mpx.autocast(plain, jnp.float32), {}),
}


@pytest.mark.parametrize("name", FLOAT16)
def test_whatever_computes_in_float16_gets_dynamic_scaling(name):
    func, options = FLOAT16[name]
    assert kind(func, *options.pop("args", ()), **options) is DYNAMIC


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_does_not_gets_none(name):
    func, options = OTHERS[name]
    assert kind(func, **options) is NONE


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
    with unchecked_annotations():
        with pytest.raises(TypeError, match="`policy` of `mpx.init_scaling`.*partial"):
            kind(plain, policy=3)
    with pytest.raises(ValueError, match="an autocast function.*Omit it"):
        kind(mpx.autocast(plain), policy="full")


def test_a_state_of_recipes_has_the_scaling_of_its_precision():
    loss = lambda w, x: jnp.mean((x @ w) @ w)  # noqa: E731
    recipe = mpx.DelayedScaling(amax_history_len=2)
    half = mpx.autocast(loss, jnp.float16, recipe=recipe)
    w = jnp.ones((16, 16))
    assert isinstance(mpx.init_scaling(half, w, w).loss, DYNAMIC)
    assert isinstance(
        mpx.init_scaling(mpx.autocast(loss, recipe=recipe), w, w).loss, NONE
    )


# --- The line that was forgotten ------------------------------------------------------


def test_training_goes_on_without_the_line_that_says_autocast():
    """In float16 then, and scaled: gradients of 1e-7 arrive."""

    def loss(w, x):
        return plain(w, x) * 1e-7

    scaling = mpx.init_scaling(loss, W, X)
    result = mpx.filter_grad(loss, scaling)(W, X)
    exact = jax.grad(loss)(W, X)
    np.testing.assert_allclose(result.grads, exact, rtol=2e-3)


GRADIENTS = {
    "filter_grad": lambda f, s: mpx.filter_grad(f, s),
    "filter_value_and_grad": lambda f, s: mpx.filter_value_and_grad(f, s),
    "grad": lambda f, s: mpx.grad(f, s),
    "value_and_grad": lambda f, s: mpx.value_and_grad(f, s),
    "calculate_scaled_grad": lambda f, s: mpx.calculate_scaled_grad(f, s),
    "accumulate": lambda f, s: mpx.filter_grad(f, s, accumulate=2),
    "accumulate_dtype": lambda f, s: mpx.filter_grad(f, s, accumulate_dtype="float32"),
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
    """As Python shows it to a user."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import jax, jax.numpy as jnp, mpx
step = lambda w, s: mpx.filter_grad(lambda w: jnp.sum(w), s)(w)
for _ in range(3):
    step(jnp.ones(2), mpx.NoLossScaling())
    jax.jit(step)(jnp.ones(2), mpx.NoLossScaling())
"""
    )
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert found.count("UserWarning") == 1 and f"{script}:3: UserWarning" in found


QUIET = {
    "dynamic": lambda: mpx.filter_grad(plain, DYNAMIC()),
    "a static scale of one": lambda: mpx.filter_grad(plain, mpx.StaticLossScaling(1.0)),
    "bfloat16": lambda: mpx.filter_grad(plain, NONE(), policy="bfloat16"),
    "autocast": lambda: mpx.filter_grad(mpx.autocast(plain), NONE()),
    "switched off": lambda: mpx.filter_grad(
        mpx.autocast(plain, jnp.float16, enabled=False), NONE()
    ),
    "control": lambda: mpx.filter_grad(plain, NONE(), use_mixed_precision=False),
    "control of autocast": lambda: mpx.filter_grad(
        mpx.autocast(plain, jnp.float16), NONE(), use_mixed_precision=False
    ),
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
    half = mpx.autocast(plain, jnp.float16)
    finding = "float16 gradients without loss scaling"

    def findings(func, *args):
        report = mpx.explain(func)(*args)
        return [o.finding for o in report.findings if o.finding.startswith(finding)]

    assert len(findings(jax.grad(half), W, X)) == 1
    assert len(findings(jax.grad(with_region), W, X)) == 1
    assert not findings(half, W, X)  # no gradient
    assert not findings(jax.grad(mpx.autocast(plain)), W, X)
    step = lambda s, w, x: mpx.filter_grad(half, s)(w, x).grads  # noqa: E731
    assert not findings(step, DYNAMIC(), W, X)
    assert not findings(step, mpx.StaticLossScaling(1.0), W, X)
    with pytest.warns(UserWarning, match=WARNING):
        assert len(findings(step, NONE(), W, X)) == 1
    by_hand = lambda w, x, scale: scale * half(w, x)  # noqa: E731
    assert not findings(jax.grad(by_hand), W, X, jnp.float32(1024))
    assert not findings(jax.grad(lambda w, x: 1024 * half(w, x)), W, X)
    assert len(findings(jax.grad(lambda w, x: half(w, x) / 3), W, X)) == 1
