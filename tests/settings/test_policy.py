"""Policies and their text grammar."""

import dataclasses
import itertools
import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import EIGHT_BITS, WIDE, assert_same_bits

_policy = mpx.Policy

GRAMMAR = [
    ("float16", ("float16", "float16", "float16")),
    ("f16", ("float16", "float16", "float16")),
    (" bf16 ", ("bfloat16", "bfloat16", "bfloat16")),
    ("half", ("float16", "float16", "float16")),
    ("full", ("float32", "float32", "float32")),
    (
        "params=float32,compute=float16,output=float32",
        ("float32", "float16", "float32"),
    ),
    ("p=f32,c=bf16,o=f32", ("float32", "bfloat16", "float32")),
    ("p = f32 , c = bf16 , o = f16", ("float32", "bfloat16", "float16")),
    ("o=f32,c=f16", ("float32", "float16", "float32")),
    ("c=f16", ("float32", "float16", "float16")),
    ("p=bf16", ("bfloat16", "bfloat16", "bfloat16")),
    ("p=f16,o=f32", ("float16", "float16", "float32")),
    ("c=half,o=full", ("float32", "float16", "float32")),
    ("compute=float8_e4m3fn", ("float32", "float8_e4m3fn", "float8_e4m3fn")),
]


@pytest.mark.parametrize(("text", "dtypes"), GRAMMAR)
def test_grammar(text, dtypes):
    policy = mpx.get_policy(text)
    assert policy == _policy(*dtypes)
    assert str(policy) == "params={},compute={},output={}".format(*dtypes)


def test_half_follows_the_setting():
    with mpx.half_precision("bfloat16"):
        policy = mpx.get_policy("params=full,compute=half")
    assert str(policy) == "params=float32,compute=bfloat16,output=bfloat16"


def test_float64_with_x64():
    with jax.enable_x64(True):
        policy = mpx.get_policy("f64")
        assert policy.cast_to_compute(jnp.ones(2, jnp.float32)).dtype == np.float64


@hypothesis.given(*[st.sampled_from([*WIDE, *EIGHT_BITS])] * 3)
def test_text_round_trip(param, compute, output):
    policy = _policy(param, compute, output)
    assert mpx.get_policy(str(policy)) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_equal_however_it_was_spelled():
    spellings = [
        _policy("f32", "bf16", "full"),
        _policy(jnp.float32, jnp.bfloat16, np.float32),
        _policy(np.dtype("float32"), jnp.dtype("bfloat16"), "float32"),
        mpx.get_policy("c=bf16,o=f32"),
    ]
    assert len(set(spellings)) == 1


def test_immutable_and_static_under_jit():
    policy = mpx.get_policy("p=f32,c=f16,o=f32")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute_dtype = "float32"
    cast = jax.jit(lambda x, policy: policy.cast_to_compute(x), static_argnums=1)
    assert cast(jnp.ones(2), policy).dtype == np.float16


def test_casts_are_cast_tree():
    policy = _policy("float32", "bfloat16", "float16")
    tree = {"w": jnp.array([1 / 3, 7e4]), "n": jnp.arange(2), "s": "text"}
    assert_same_bits(policy.cast_to_param(tree), mpx.cast_tree(tree, "float32"))
    assert_same_bits(policy.cast_to_compute(tree), mpx.cast_tree(tree, "bfloat16"))
    assert_same_bits(policy.cast_to_output(tree), mpx.cast_tree(tree, "float16"))
    assert policy.cast_to_param(tree)["w"] is tree["w"]


def test_with_output_dtype_is_a_copy():
    policy = mpx.get_policy("p=f32,c=f16,o=f32")
    other = policy.with_output_dtype("f16")
    assert str(other) == "params=float32,compute=float16,output=float16"
    assert policy.output_dtype == np.float32


TRAVELLING = "params=float32,compute=bfloat16,output=float32"


@pytest.mark.parametrize(
    "more", ["", ",grad=bfloat16", ",reduce=bfloat16,gather=float32", ",reduce=float32"]
)
def test_what_travels_is_part_of_a_policy(more):
    """Of its text, its equality, its copies; fields are three, as JMP has them."""
    policy = mpx.get_policy(TRAVELLING + more)
    assert str(policy) == TRAVELLING + more
    assert mpx.get_policy(str(policy)) == policy
    for copy in (pickle.loads(pickle.dumps(policy)), policy.with_output_dtype("f32")):
        assert copy == policy and hash(copy) == hash(policy)
    assert (policy == mpx.get_policy(TRAVELLING)) == (not more)
    names = more.replace("=", "_dtype='").replace(",", "', ")
    assert repr(policy).endswith(f"{names or ''}')".removeprefix("', "))
    assert len(dataclasses.fields(policy)) == 3


def test_gradients_come_in_the_dtype_that_the_policy_says():
    options = {"policy": mpx.get_policy(f"{TRAVELLING},grad=bfloat16")}
    for accumulate, loss in itertools.product((1, 2), (jnp.sum, mpx.autocast(jnp.sum))):
        options["accumulate"] = accumulate
        call = mpx.filter_grad(loss, mpx.NoLossScaling(), **options)
        assert call(jnp.ones(4)).grads.dtype == jnp.bfloat16


def test_a_policy_and_autocast_have_to_agree():
    loss = mpx.autocast(jnp.sum, jnp.float16)
    policy = mpx.get_policy(f"{TRAVELLING},reduce=float32")
    match = "computes in bfloat16, but the autocast function"
    with pytest.raises(ValueError, match=match):
        mpx.filter_grad(loss, mpx.DynamicLossScaling(), policy=policy)
