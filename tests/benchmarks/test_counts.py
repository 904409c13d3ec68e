"""Counting memory and traffic of programs whose counts are known by hand."""

from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from benchmarks.counter import counter
from benchmarks.counts import program as counts, rewrites
from benchmarks.fingerprint import fingerprint
from tests.contrib.kernels import filter_deprecation, lowered_for_b200

FLOAT = 4  # bytes


def shaped(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def result_of(shape):
    return counter.Instruction("x", shape, "add", (), "")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[]", 4),
        ("bf16[8,4]{1,0:T(8,128)(2,1)}", 64),
        ("pred[3]{0}", 3),
        ("s4[3]{0}", 2),
        ("f8e4m3fn[5]{0}", 5),
        ("f8e8m0fnu[5]{0}", 5),
        ("c64[2]", 16),
        ("(f32[2,3]{1,0}, (s32[], pred[7]{0}))", 24 + 4 + 7),
        ("token[]", 0),
        ("f32[<=4]{0}", 16),
    ],
)
def test_bytes_of_shape(text, size):
    assert result_of(text).bytes == size


def test_unknown_type_is_an_error():
    with pytest.raises(ValueError, match=r"must have known HLO types; got 'q7'"):
        assert result_of("q7[3]").bytes


def test_memory_counts_donated_buffers_once():
    for options, times in (({}, 2), ({"donate_argnums": 0}, 1)):
        compiled = jax.jit(lambda x: x + 1, **options).lower(shaped(1000)).compile()
        found = counts.count(compiled, {})
        assert found["memory"] == times * 1000 * FLOAT + found["temporaries"]


def test_cost_analysis_gives_traffic_or_else_operands_and_results():
    compiled = jax.jit(jnp.dot).lower(shaped(8, 16), shaped(16, 4)).compile()
    traffic = counts.count(compiled, {})["traffic"]
    assert traffic == (8 * 16 + 16 * 4 + 8 * 4) * FLOAT
    compiled = jax.jit(lambda x: x * 2).lower(shaped(100)).compile()
    on_tpu = counts.counter.Program(compiled.as_text(), memory=7, temporaries=5)
    found = {"memory": 7, "temporaries": 5, "traffic": 2 * 100 * FLOAT}
    assert counts.count(on_tpu, {"target": "v5e"}) == found
    like_cuda = SimpleNamespace(cost_analysis=lambda: None, as_text=compiled.as_text)
    like_cuda.memory_analysis = compiled.memory_analysis
    assert counts.count(like_cuda, {})["traffic"] == 2 * 100 * FLOAT


MODULE = """
HloModule m, is_scheduled=true

%add (a.0: f32[], b.0: f32[]) -> f32[] {
  %a.0 = f32[] parameter(0)
  %b.0 = f32[] parameter(1)
  ROOT %sum.0 = f32[] add(%a.0, %b.0)
}

%body (state: (s32[], f32[10])) -> (s32[], f32[10]) {
  %state = (s32[], f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[10]{0} get-tuple-element(%state), index=1
  %twice = f32[10]{0} fusion(%x), kind=kLoop, calls=%add
  ROOT %next = (s32[], f32[10]{0}) tuple(%i, %twice)
}

%condition (state.1: (s32[], f32[10])) -> pred[] {
  %state.1 = (s32[], f32[10]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%small (s: f32[10]) -> f32[10] {
  %s = f32[10]{0} parameter(0)
  ROOT %neg = f32[10]{0} negate(%s)
}

%large (l: f32[10]) -> f32[10] {
  %l = f32[10]{0} parameter(0)
  %one = f32[10]{0} negate(%l)
  ROOT %two = f32[10]{0} negate(%one)
}

ENTRY %main (p: f32[10], c: s32[]) -> f32[10] {
  %p = f32[10]{0} parameter(0)
  %c = s32[] parameter(1)
  %init = (s32[], f32[10]{0}) tuple(%c, %p)
  %loop = (s32[], f32[10]{0}) while(%init), condition=%condition, body=%body, TRIPS
  %result = f32[10]{0} get-tuple-element(%loop), index=1
  %sent = (f32[10]{0}, f32[10]{0}, u32[]) copy-start(%result)
  %copied = f32[10]{0} copy-done(%sent)
  ROOT %end = f32[10]{0} conditional(%c, %copied, %copied), branch_computations={%small, %large}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("trips", "times"),
    [('backend_config={"known_trip_count":{"n":"5"}}', 5), ("frontend={}", 1)],
)
def test_loops_branches_and_copies(trips, times):
    text = MODULE.replace("TRIPS", trips)
    loop = times * 2 * 10 * FLOAT
    copy = 2 * 10 * FLOAT + 4
    branch = 4 * 10 * FLOAT  # the larger one
    assert counts.operand_and_result_bytes(text) == loop + copy + branch
    with pytest.raises(ValueError, match="must have an ENTRY computation"):
        counts.operand_and_result_bytes("nothing here")


def test_a_compiled_loop_counts_its_trips():
    def program(count):
        def run(x, w):
            def body(carry, _):
                return jnp.tanh(carry @ w), None

            return jax.lax.scan(body, x, None, length=count)[0]

        compiled = jax.jit(run).lower(shaped(64, 64), shaped(64, 64)).compile()
        return counts.operand_and_result_bytes(compiled.as_text())

    # Each trip reads two matrices and writes one, and reads and writes for tanh.
    trip = 5 * 64 * 64 * FLOAT
    assert abs(program(10) - program(5) - 5 * trip) < 5 * 100


def test_module_without_entry_is_an_error():
    with pytest.raises(ValueError, match="must have an ENTRY computation"):
        counts.operand_and_result_bytes("nothing here")


def test_fingerprint_sees_the_program_and_not_its_place():
    def double(x):
        return x * 2

    def triple(x):
        return x * 3

    triple.__name__ = "double"
    here = fingerprint(jax.jit(double).lower(shaped(3)))
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    placed = jax.ShapeDtypeStruct((3,), np.float32, sharding=device)
    assert fingerprint(jax.jit(double).lower(placed)) == here
    traced = jax.jit(double).trace(shaped(3))
    assert fingerprint(traced.lower(lowering_platforms=("cuda",))) == here
    assert fingerprint(jax.jit(triple).lower(shaped(3))) != here


@filter_deprecation
def test_fingerprint_sees_a_kernel_and_not_its_lines():
    """A kernel of Pallas is bytes in the program, with its source lines and paths."""

    def of_kernel(source, lines):
        names = {}
        code = "\n" * lines + f"def kernel(x, y): y[...] = {source}"
        exec(compile(code, f"file_{lines}.py", "exec"), names)

        def call(x):
            options = {"compiler_params": triton.CompilerParams(), "out_shape": x}
            return pl.pallas_call(names["kernel"], **options)(x)

        return lowered_for_b200(call, shaped(16))

    here, moved = of_kernel("x[...] * 2", 1), of_kernel("x[...] * 2", 30)
    assert fingerprint(here) == fingerprint(moved)
    assert fingerprint(here) != fingerprint(of_kernel("x[...] * 3", 1))


@pytest.mark.parametrize("name", rewrites.OFF)
def test_what_switches_a_rewrite_off_is_in_mpx(name):
    assert rewrites.STEPS[name]
    for path, value in rewrites.OFF[name].items():
        with mock.patch(f"mpx.{path}", value):
            pass
