"""`mpx.compat.jmp` beside the real package, its README, and its mended defects."""

import dataclasses
import importlib.metadata
import inspect
import pickle

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import mpx
import mpx.compat.jmp as ours

POLICIES = [
    "half", "full", "float16", "bf16", "c=f16", "p=f16,c=f16", "p=f16,c=bf16", "o=bf16",
    "p=half", "params=float32,compute=float16,output=float32",
]  # fmt: skip


def test_every_public_name_is_there():
    assert importlib.metadata.version("jmp") == "0.0.4" == ours.__version__
    assert ours.__all__ == jmp.__all__
    assert all(hasattr(ours, name) for name in ours.__all__)


def public_callables(module):
    """Functions, classes and methods by name, but how a class is flattened."""
    for name in set(jmp.__all__) - {"LossScale"}:
        found = getattr(module, name)
        yield name, found
        for method, value in inspect.getmembers(found, inspect.isfunction):
            if not method.startswith(("_", "tree_")):
                yield f"{name}.{method}", value


def parameters(function):
    """Names, kinds and defaults, without what mpx reserves."""
    reserved = {"grad_dtype", "reduce_dtype", "gather_dtype"}
    return [
        (p.name, p.kind, _default(p.default))
        for p in inspect.signature(function).parameters.values()
        if p.name not in reserved
    ]


def _default(value):
    is_factory = type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
    return "made for each instance" if is_factory else value


def test_signatures_agree():
    theirs, here = (dict(public_callables(module)) for module in (jmp, ours))
    assert theirs.keys() <= here.keys() and len(theirs) > 15
    for name, function in theirs.items():
        assert parameters(here[name]) == parameters(function), name


KINDS = pytest.mark.parametrize("kind", ["StaticLossScale", "DynamicLossScale"])


@pytest.mark.parametrize("name", ["Policy", "StaticLossScale", "DynamicLossScale"])
def test_fields_agree(name):
    theirs, here = (dataclasses.fields(getattr(module, name)) for module in (jmp, ours))
    assert [f.name for f in theirs] == [f.name for f in here]


def test_defaults_of_the_dynamic_scale_agree():
    scales = [m.DynamicLossScale(jnp.float32(8)) for m in (jmp, ours)]
    theirs, here = (dataclasses.asdict(s) for s in scales)
    assert theirs == here
    for name in ("counter", "min_loss_scale"):
        assert theirs[name].dtype == here[name].dtype


@pytest.mark.parametrize("text", POLICIES)
def test_policies_are_read_and_written_alike(text):
    policy, theirs = ours.get_policy(text), jmp.get_policy(text)
    assert str(policy) == str(theirs)
    assert ours.get_policy(str(policy)) == policy
    for name in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(policy, name) == jnp.dtype(getattr(theirs, name))


def test_dtypes_of_a_policy_are_used_alike():
    """As keys, as constructors, and in the constructor of another policy."""
    for module in (jmp, ours):
        policy = module.get_policy("p=f32,c=f16,o=bf16")
        assert {jnp.float16: "a", jnp.bfloat16: "b"}[policy.compute_dtype] == "a"
        assert policy.output_dtype in {jnp.float16, jnp.bfloat16}
        assert policy.compute_dtype(3).dtype == jnp.float16
        assert module.half_dtype()(2**15).dtype == jnp.float16
        assert module.Policy(*dataclasses.astuple(policy)) == policy
        assert hash(policy) == hash(module.get_policy(str(policy)))
        assert policy == module.Policy(np.float32, jnp.float16, jnp.bfloat16)
        assert policy.cast_to_compute(x=jnp.ones(2)).dtype == jnp.float16
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_policy_serves_the_gradient_functions():
    policy = ours.get_policy("p=f32,c=bf16,o=f32")
    fun = lambda w: (w.sum().astype(jnp.float32), w)  # noqa: E731
    step = mpx.grad(fun, mpx.NoLossScaling(), has_aux=True, policy=policy)
    result = step(jnp.ones(2))
    assert result.aux.dtype == jnp.bfloat16 and result.grads.dtype == jnp.float32


@pytest.mark.parametrize(
    "text", ["", "fp16", "x=f16", "c=", "c=f16,", "c=f16=f16", "c=int8", "compute_f16"]
)
@pytest.mark.parametrize("module", [jmp, ours])
def test_a_text_that_is_no_policy_is_a_value_error_and_others_type_errors(text, module):
    with pytest.raises(ValueError):
        module.get_policy(text)
    with pytest.raises(TypeError):
        module.get_policy(None)


@pytest.mark.parametrize("cast", ["cast_to_full", "cast_to_half"])
def test_casts_agree(cast):
    tree = {"a": jnp.ones(3), "b": np.ones(2, np.float16), "c": jnp.arange(2), "d": "x"}
    result, expected = getattr(ours, cast)(tree), getattr(jmp, cast)(tree)
    assert jax.tree.map(_kind, result) == jax.tree.map(_kind, expected)


def _kind(leaf):
    return getattr(leaf, "dtype", leaf)


@pytest.mark.third_party
@given(
    st.lists(st.booleans(), max_size=30),
    st.integers(1, 4),
    st.integers(2, 4),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([jnp.float32, float]),
)
def test_dynamic_scale_takes_the_same_values(pattern, period, factor, floor, kind):
    fields = kind(2.0**10), np.int32(0), period, factor, np.float32(floor)
    scale, theirs = (m.DynamicLossScale(*fields) for m in (ours, jmp))
    for good in pattern:
        scale, theirs = (s.adjust(jnp.asarray(good)) for s in (scale, theirs))
        assert scale.loss_scale == theirs.loss_scale
        assert scale.counter == theirs.counter
        assert scale.loss_scale.dtype == theirs.loss_scale.dtype


@pytest.mark.third_party
@KINDS
def test_scale_and_unscale_agree(kind):
    scale, theirs = (getattr(m, kind)(jnp.float32(8.0)) for m in (ours, jmp))
    tree = {"a": jnp.arange(3.0), "b": jnp.ones(2, jnp.float16)}
    for method in ("scale", "unscale"):
        result, expected = (getattr(s, method)(tree) for s in (scale, theirs))
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        assert jax.tree.map(_kind, result) == jax.tree.map(_kind, expected)


@pytest.mark.parametrize("module", [jmp, ours])
def test_select_tree_takes_python_numbers(module):
    """Such as a step that is counted outside of jit."""
    a, b = {"step": 3, "rate": 0.5}, {"step": 2, "rate": 0.25}
    for pred in (True, False):
        chosen = module.select_tree(jnp.asarray(pred), a, b)
        assert {k: v.item() for k, v in chosen.items()} == (a if pred else b)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(chosen))
    assert module.select_tree(jnp.asarray(True), None, None) is None


@pytest.mark.parametrize("value", [8, jnp.int32(8), np.int64(8)])
def test_a_scale_that_is_an_integer_warns_and_does_not_adjust(value):
    for module in (jmp, ours):
        with pytest.warns(UserWarning, match="loss_scale.*int"):
            scale = module.DynamicLossScale(value)
        with pytest.raises(TypeError):
            scale.adjust(jnp.asarray(False))
        with pytest.warns(UserWarning, match="min_loss_scale.*int"):
            module.DynamicLossScale(jnp.float32(8), min_loss_scale=value)
        module.StaticLossScale(value)


def test_no_warning_from_inside_of_jit():
    with pytest.warns(UserWarning, match="min_loss_scale.*int") as warned:
        scale = ours.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.int32(2))
        assert len(warned) == 1
        # Traced, the fields are tracers; what comes out has the integer again.
        jax.jit(lambda s: s.adjust(jnp.asarray(False)).loss_scale)(scale)
        assert len(warned) == 1


def test_select_tree_and_all_finite_agree():
    a, b = {"w": jnp.ones(2)}, {"w": jnp.array([jnp.nan, 0.0])}
    for pred in (jnp.asarray(True), jnp.asarray(False)):
        chosen, theirs = (m.select_tree(pred, a, b) for m in (ours, jmp))
        np.testing.assert_array_equal(chosen["w"], theirs["w"])
    for tree in (a, b, {}):
        assert bool(ours.all_finite(tree)) == bool(jmp.all_finite(tree))


def test_readme_policies():
    half, full = jnp.float16, jnp.float32
    my_policy = ours.Policy(compute_dtype=half, param_dtype=full, output_dtype=half)

    def layer(params, x):
        params, x = my_policy.cast_to_compute((params, x))
        w, b = params
        y = x @ w + b
        return my_policy.cast_to_output(y)

    params = (jnp.ones((2, 3), my_policy.param_dtype), jnp.ones((3,)))
    y = layer(params, jnp.ones((3, 2)).T.reshape(3, 2)[0])
    assert y.dtype == half
    my_policy = my_policy.with_output_dtype(full)
    assert layer(params, jnp.ones(2)).dtype == full
    assert str(my_policy) == "p=full,c=f16,o=full"


def test_readme_no_op():
    loss_scale = ours.NoOpLossScale()
    loss = grads = object()
    assert loss is loss_scale.scale(loss)
    assert grads is loss_scale.unscale(grads)
    assert loss_scale is loss_scale.adjust(jnp.asarray(True))
    assert loss_scale.loss_scale == 1


@pytest.mark.third_party
def test_readme_training_in_haiku(getkey):
    """The kind of its worked example: a Haiku network, float16, dynamic scaling."""
    import haiku as hk

    policy = ours.get_policy("params=float32,compute=float16,output=float32")

    def forward(x):
        hk.mixed_precision.set_policy(hk.Linear, policy)
        return hk.nets.MLP([16, 1])(x)

    network = hk.without_apply_rng(hk.transform(forward))
    x = jax.random.normal(getkey(), (64, 4))
    y = jnp.sum(x, axis=1, keepdims=True)
    params = network.init(getkey(), x)
    optimizer = optax.adam(1e-2)

    def loss_fn(params, loss_scale):
        loss = jnp.mean((network.apply(params, x) - y) ** 2)
        return loss_scale.scale(loss), loss

    @jax.jit
    def train_step(params, opt_state, loss_scale):
        grads, loss = jax.grad(loss_fn, has_aux=True)(params, loss_scale)
        grads = loss_scale.unscale(grads)
        grads_finite = ours.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_state)
        params, opt_state = ours.select_tree(grads_finite, new, (params, opt_state))
        return params, opt_state, loss_scale, loss

    opt_state = optimizer.init(params)
    loss_scale = ours.DynamicLossScale(jnp.float32(2.0**15))
    losses = []
    for _ in range(100):
        params, opt_state, loss_scale, loss = train_step(params, opt_state, loss_scale)
        losses.append(float(loss))
    hk.mixed_precision.clear_policy(hk.Linear)
    assert losses[-1] < 0.1 * losses[0]


def adjusted(scale, *outcomes):
    for good in outcomes:
        scale = scale.adjust(jnp.asarray(good))
    return scale


class TestMendedDefects:
    def test_min_loss_scale_survives_jit(self):
        scale = ours.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.float32(4))
        for _ in range(4):
            scale = jax.jit(lambda s: s.adjust(jnp.asarray(False)))(scale)
        assert scale.loss_scale == 4

    @pytest.mark.parametrize(
        ("start", "factor", "largest"),
        [(jnp.float16(2**14), 2, 2**15), (jnp.float32(2.0**120), 2**4, 2.0**124)],
    )
    def test_a_scale_stays_finite(self, start, factor, largest):
        scale = ours.DynamicLossScale(start, period=1, factor=factor)
        scale = adjusted(scale, *[True] * 5)
        assert scale.loss_scale == largest and scale.loss_scale.dtype == start.dtype

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_the_readmes_half_precision_scale_works(self, dtype):
        """JMP's README starts with `jmp.half_dtype()(2 ** 15)`; its `adjust` raises."""
        scale = ours.DynamicLossScale(jnp.dtype(dtype).type(2**15), period=2)
        for good, expected in ((False, 2**14), (True, 2**14), (True, 2**15)):
            scale = adjusted(scale, good)
            assert scale.loss_scale == expected and scale.loss_scale.dtype == dtype

    @pytest.mark.parametrize(
        ("dtype", "smallest"), [(jnp.float16, 2.0**-14), (jnp.float32, 2.0**-126)]
    )
    def test_a_floor_of_zero_is_the_smallest_normal_number(self, dtype, smallest):
        scale = ours.DynamicLossScale(dtype(8), period=1, min_loss_scale=dtype(0))
        scale = adjusted(scale, *[False] * 200)
        assert scale.loss_scale == smallest
        assert np.isfinite(scale.unscale(jnp.ones((), dtype)))
        assert adjusted(scale, True).loss_scale == 2 * smallest

    def test_a_float_period_leaves_the_counter_an_integer(self):
        scale = ours.DynamicLossScale(jnp.float32(8), period=2.0, factor=2.0)
        for expected in (8, 16):
            scale = adjusted(scale, True)
            assert scale.loss_scale == expected
            assert scale.counter.dtype == jnp.int32

    def test_a_float64_scale_keeps_its_digits(self):
        with jax.enable_x64(True):
            scale = ours.DynamicLossScale(jnp.float64(3.0**20), period=1, factor=3)
            assert adjusted(scale, True).loss_scale == 3.0**21

    @pytest.mark.parametrize(
        ("text", "match"),
        [("c=f16,c=bf16", "repeated key 'c'"), ("f64", "jax_enable_x64")],
    )
    def test_a_repeated_key_and_a_switched_off_dtype_are_refused(self, text, match):
        with pytest.raises(ValueError, match=match):
            ours.get_policy(text)

    def test_a_policy_of_dtypes_and_names_has_a_text(self):
        policy = ours.Policy(np.dtype("float32"), "bfloat16", jnp.dtype("float16"))
        assert str(policy) == "p=full,c=bf16,o=f16"
        with pytest.raises(TypeError, match="int32"):
            ours.Policy(jnp.float32, jnp.int32, jnp.float32)

    def test_errors_are_no_assertions(self):
        with pytest.raises(TypeError, match="one boolean"):
            ours.select_tree(jnp.ones(1), None, None)
        with pytest.raises(TypeError, match="one boolean"):
            ours.DynamicLossScale(jnp.float32(1)).adjust(jnp.ones(1, bool))
        with pytest.raises(ValueError, match=r"\['w'\]"):
            ours.select_tree(True, {"w": jnp.ones(2)}, {"w": jnp.ones(3)})

    def test_casts_know_more_leaves(self):
        half = ours.get_policy("half").cast_to_compute
        code = jnp.ones(2, jnp.float8_e4m3fn)
        assert half(np.float32(1)).dtype == jnp.float16
        assert half(jax.ShapeDtypeStruct((2,), jnp.float32)).dtype == jnp.float16
        assert half(code) is code

    def test_static_scale_has_a_leaf(self):
        assert jax.tree.leaves(ours.StaticLossScale(jnp.float32(8))) == [8]
        assert jax.tree.leaves(jmp.StaticLossScale(jnp.float32(8))) == []

    @KINDS
    @pytest.mark.parametrize("value", [0.0, -2.0, np.nan, np.inf])
    def test_impossible_scales_are_refused(self, kind, value):
        with pytest.raises(ValueError, match="must be positive and finite"):
            getattr(ours, kind)(np.float32(value))
