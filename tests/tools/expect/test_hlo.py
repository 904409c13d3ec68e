"""Reading HLO text, of platforms that are not here, too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx
from mpx._tools._counter import _hlo
from mpx._tools._expect import _operations

from .cases import BF16, F32, broken

# In the form that XLA's CUDA compiler prints, abridged; written by hand.
CUDA = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, \
may-alias), {1}: (2, {}, must-alias) }, entry_computation_layout={(f32[8]{0})->f32[]}

FileNames
1 "/home/me/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=6 end_column=27}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%gemm_fusion (p.0: bf16[16,32], p.1: bf16[32,8]) -> bf16[16,8] {
  %p.0 = bf16[16,32]{1,0} parameter(0)
  %p.1 = bf16[32,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[16,8]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

ENTRY %main (w: bf16[4,8], x: f8e4m3fn[16,32], y: f8e4m3fn[8,32]) -> (bf16[16,8]) {
  %w = bf16[4,8]{1,0} parameter(0), metadata={op_name="w[\\'a\\']"}
  %x = f8e4m3fn[16,32]{1,0} parameter(1), metadata={op_name="x"}
  %y = f8e4m3fn[8,32]{1,0} parameter(2), metadata={op_name="y"}
  %one = f32[] constant(1)
  %all-gather-start = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%w), \
dimensions={0}, metadata={op_name="jit(step)/embed/gather" stack_frame_id=1}
  %all-gather-done = bf16[32,8]{1,0} all-gather-done(%all-gather-start)
  %cublas = (bf16[16,8]{1,0}, s8[33554432]{0}) custom-call(%x, %y, %one, %one), \
custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(step)/mlp/dot" \
source_file="old.py" source_line=3}, backend_config={"gemm_backend_config":{"beta":0}}
  %solve = bf16[4,8]{1,0} custom-call(%w, %w), \
custom_call_target="__cublas$triangularSolve"
  %plain = (bf16[16,8]{1,0}, s8[1]{0}) custom-call(bf16[16,32]{1,0} %h, bf16[8] %v), \
custom_call_target="__cublas$gemm"
  %fusion = bf16[16,8]{1,0} fusion(%h, %all-gather-done), kind=kCustom, \
calls=%gemm_fusion, metadata={op_name="jit(step)/head/dot" stack_frame_id=1}
  ROOT %tuple = (bf16[16,8]{1,0}) tuple(%fusion)
}
"""


@pytest.fixture(scope="module")
def cuda():
    return _hlo.parse(CUDA)


def test_products_by_libraries_and_in_fusions(cuda):
    found = {x.kind: x for x in _operations.compiled_products(cuda)}
    assert found.keys() == {"__cublas$lt$matmul$f8", "__cublas$gemm", "dot"}
    calls, gemm = found["__cublas$lt$matmul$f8"], found["__cublas$gemm"]
    assert calls.dtypes == ("float8_e4m3fn", "float8_e4m3fn")
    assert (calls.op_name, calls.source) == ("jit(step)/mlp/dot", "old.py:3")
    assert gemm.results[0] == _hlo.ArrayType("bf16", (16, 8))
    # The product itself lost its metadata; the fusion has them.
    fused = found["dot"]
    assert fused.op_name == "jit(step)/head/dot"
    assert fused.source == "/home/me/model.py:7"
    assert fused.is_within("head")


def test_asynchronous_collectives_aliases_and_names_of_arguments(cuda):
    (gather,) = _operations.collectives(cuda)
    assert (gather.kind, gather.dtypes) == ("all-gather", ("bfloat16",))
    assert str(gather).startswith("all-gather: bfloat16[4,8] -> bfloat16[4,8], bf")
    assert str(gather).endswith("in `jit(step)/embed/gather`, at /home/me/model.py:7")
    assert cuda.aliased == {0, 2}
    assert [cuda.parameters[i].op_name for i in range(3)] == ["w['a']", "x", "y"]
    assert _hlo.parse("ENTRY %main (x: f32[]) -> f32[] {\n}\n").aliased == set()
    with pytest.raises(ValueError, match=r"must have an ENTRY computation; found none"):
        _hlo.parse("HloModule nothing")


def test_host_transfers_and_block_scaled_products():
    text = """ENTRY main {
  token.0 = token[] after-all()
  send.1 = (f32[3]{0}, u32[], token[]) send(x.1, token.0), is_host_transfer=true
  send.2 = (f32[3]{0}, u32[], token[]) send(x.1, token.0), channel_id=2
  ROOT out = token[] outfeed(x.1, token.0)
}"""
    found = _operations.host_transfers(_hlo.parse(text))
    assert [x.kind for x in found] == ["send", "outfeed"]


def test_what_makes_no_array_is_not_among_the_largest():
    """A barrier's result is its operand, and a second half's is that of the first."""
    text = """ENTRY main {
  a = f32[64]{0} parameter(0)
  b = f32[64]{0} negate(a)
  c = (f32[64]{0}) opt-barrier(b)
  d = (f32[64]{0}, f32[64]{0}, u32[]) copy-start(c)
  e = f32[64]{0} copy-done(d)
  f = f32[128]{0} constant({...})
  ROOT g = f32[32]{0} slice(e), slice={[0:32]}
}"""
    found = _operations.largest_results(_hlo.parse(text), 9)
    assert [x.kind for x in found] == ["copy-start", "negate", "slice"]


def test_block_scaled_products():
    text = """ENTRY main {
  a = f8e4m3fn[2,16,64]{2,1,0} parameter(0)
  b = f8e4m3fn[2,8,64]{2,1,0} parameter(1)
  s = f8e8m0fnu[2,16,2]{2,1,0} parameter(2)
  ROOT c = f32[2,16,8]{2,1,0} custom-call(a, b, s, s), \
custom_call_target="__op$block_scaled_dot"
}"""
    (product,) = _operations.products(_hlo.parse(text))
    assert product.dtypes == ("float8_e4m3fn", "float8_e4m3fn")
    assert product.flops == 2 * (2 * 16 * 8) * 64


@pytest.mark.parametrize(
    ("text", "arrays", "bits"),
    [
        ("f32[]", ["float32[]"], 32),
        ("bf16[8,4]{1,0:T(8,128)(2,1)}", ["bfloat16[8,4]"], 512),
        ("f8e8m0fnu[5]{0}", ["float8_e8m0fnu[5]"], 40),
        ("f4e2m1fn[2]", ["float4_e2m1fn[2]"], 8),
        ("(s4[3], (u8[2]{0}, pred[]))", ["int4[3]", "uint8[2]", "bool[]"], 36),
        ("c64[<=4]", ["complex64[4]"], 256),
        ("(f32[2], token[])", ["float32[2]", "token[]"], 64),
        ("()", [], 0),
    ],
)
def test_types(text, arrays, bits):
    found = _hlo.arrays_of(text)
    assert [str(array) for array in found] == arrays
    assert sum(array.bits for array in found) == bits


def test_flops_are_those_that_xla_counts():
    """Of a program that is nothing but products."""

    def products(a, b):
        return jnp.einsum("bij,bjk->bik", a, b), jnp.einsum("bij,bkj->ki", a, a)

    args = [jax.ShapeDtypeStruct((2, 3, 4), F32), jax.ShapeDtypeStruct((2, 4, 5), F32)]
    lowered = jax.jit(products).lower(*args)
    module = _hlo.parse(lowered.as_text(dialect="hlo", debug_info=True))
    counted = sum(x.flops for x in _operations.products(module))
    assert counted == lowered.cost_analysis()["flops"] == 2 * (2 * 60) + 2 * (2 * 36)


@pytest.mark.libtpu
# What an earlier run left in the cache can be read only where the device is.
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_a_program_for_a_tpu():
    """Products, gathers, scatters and callbacks of a step sharded over four chips."""
    from mpx._tools import _counter

    chips = _counter.compile_only_devices(_counter.TARGETS["v5e"], 4)
    place = NamedSharding(Mesh(np.array(chips), ("d",)), P("d"))

    def loss(w, x):
        with jax.named_scope("layer"):
            h = jnp.tanh(x @ w)
        return jnp.sum((h @ w).astype(F32) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        return w - jax.grad(loss)(w, x)

    w = jax.ShapeDtypeStruct((256, 256), BF16, sharding=place)
    lowered = step.lower(w, w)
    mpx.expect(
        lowered,
        products=BF16,
        product_calls="convolution",  # a TPU's word for a product
        collectives={"all-gather": BF16, "reduce-scatter": BF16, "all-reduce": ()},
        donated_are_aliased=True,
        host_callbacks=False,
        memory_at_most=10**6,
    )
    (violation,), text = broken(lowered, collectives={"all-gather": F32})
    assert violation.operations[0].is_within("layer") and "test_hlo.py" in text
    broken(lowered, collectives={"reduce-scatter": ()})

    def talks(x):
        jax.debug.print("{}", x[0, 0])
        return x

    chip = jax.sharding.SingleDeviceSharding(chips[0])
    x = jax.ShapeDtypeStruct((256, 256), F32, sharding=chip)
    _, text = broken(jax.jit(talks), x, host_callbacks=False)
    assert "debug_print" in text


def test_quantized_products_of_one_shape_have_the_lines_that_call_for_them():
    def loss(w, x):
        x = jnp.tanh(x @ w)
        x = jnp.tanh(x @ w)
        # A number of its own: JAX's cache of programs does not look at lines.
        return jnp.sum(x @ w) * loss.__code__.co_firstlineno

    low = jax.jit(mpx.autocast(loss, recipe=mpx.Float8CurrentScaling()))
    ones = jnp.ones((32, 32))
    module = _hlo.parse(low.lower(ones, ones).compile().as_text())
    found = {x.source for x in _operations.compiled_products(module)}
    first = loss.__code__.co_firstlineno
    assert found == {f"{__file__}:{first + i}" for i in (1, 2, 4)}
