"""What is read from a compiled program, in texts whose counts are known by hand."""

# ruff: noqa: E501 (lines of HLO)

import pytest

from mpx._memory import _codes, _master_weights
from mpx._step import _optimizer
from mpx._tools._counter import TARGETS, kernels_of, messages, parse
from mpx._tools._counter._kernels import roof_seconds
from mpx._tools._forecast._estimate import (
    kind_of,
    quantizing_bytes,
    seconds,
    temporaries_by_part,
    times_of,
)

H100 = TARGETS["h100"].roof
SCORES = '"intermediate_tensor_shape": {"dimensions": ["2", "4", "16", "16"]}'
PROGRAM = f"""
HloModule step, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/site-packages/optax/transform.py"

FunctionNames
1 "loss"
2 "update_fn"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7}}
2 {{file_name_id=2 function_name_id=2 line=30}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

%cast (p: bf16[64,32]) -> f8e4m3fn[64,32] {{
  %p = bf16[64,32]{{1,0}} parameter(0)
  ROOT %c = f8e4m3fn[64,32]{{1,0}} convert(%p)
}}

%update (p: f32[32,32], g: f32[32,32]) -> f32[32,32] {{
  %p = f32[32,32]{{1,0}} parameter(0)
  %g = f32[32,32]{{1,0}} parameter(1)
  ROOT %s = f32[32,32]{{1,0}} subtract(%p, %g)
}}

ENTRY %main (x: bf16[64,32], w: f8e4m3fn[32,32], m: f32[32,32]) -> f32[32,32] {{
  %x = bf16[64,32]{{1,0}} parameter(0)
  %w = f8e4m3fn[32,32]{{1,0}} parameter(1)
  %m = f32[32,32]{{1,0}} parameter(2)
  %q = bf16[2,16,4,8]{{3,2,1,0}} bitcast(%x)
  %cast.1 = f8e4m3fn[64,32]{{1,0}} fusion(%x), kind=kLoop, calls=%cast, metadata={{op_name="jit(step)/jvp(encoder)/convert" stack_frame_id=1}}
  %dot.1 = (bf16[64,32]{{1,0}}, s8[4096]{{0}}) custom-call(%cast.1, %w), custom_call_target="__cublas$lt$matmul$f8", metadata={{op_name="jit(step)/jvp(encoder)/dot_general" stack_frame_id=1}}, backend_config={{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}
  %fmha = (bf16[2,4,16,8]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={{{SCORES}, "mask_type": "CAUSAL"}}
  %gather = f32[32,32]{{1,0}} all-reduce(%m), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
  ROOT %new = f32[32,32]{{1,0}} fusion(%m, %gather), kind=kLoop, calls=%update, metadata={{op_name="jit(step)/sub" stack_frame_id=2}}
}}
"""


@pytest.fixture
def kernels():
    frames = parse(PROGRAM).frames
    found = kernels_of(PROGRAM)
    return {k.name: (k, kind_of(k, frames.get(k.frame, ()))) for k in found}


def test_kernels_have_kinds(kernels):
    assert {name: kind for name, (_, kind) in kernels.items()} == {
        "cast.1": "quantizing",
        "dot.1": "matmul, 8 bits",
        "fmha": "attention",
        "gather": "collective",
        "new": "optimizer",
    }
    # A state in few bits is of the optimizer.
    kernel, _ = kernels["new"]
    for module in (_codes, _master_weights, _optimizer):
        assert kind_of(kernel, [(module.__file__, "encode", 1)]) == "optimizer"


def test_operations_and_bytes(kernels):
    dot, fmha, cast = (kernels[name][0] for name in ("dot.1", "fmha", "cast.1"))
    assert dot.operations == 2 * 64 * 32 * 32
    assert dot.bytes == 64 * 32 + 32 * 32 + 2 * 64 * 32  # no scratch
    # Two products of [16, 8] by [8, 16], half of each below the diagonal.
    assert fmha.further == 2 * 2 * (2 * 4 * 16 * 16) * 8 // 2
    assert cast.bytes == 3 * 64 * 32 == quantizing_bytes(cast, "quantizing")
    assert quantizing_bytes(dot, "matmul, 8 bits") == 0


def test_lines_of_code():
    frames = parse(PROGRAM).frames
    assert frames[1] == [("/home/me/train.py", "loss", 7)]
    assert [line for _, _, line in frames[2]] == [30, 7]
    (message,) = messages(PROGRAM, 4)
    assert (message.kind, message.dtype, message.devices) == ("all-reduce", "f32", 4)
    assert message.sent == 2 * 4096 * 3 / 4


def test_times(kernels):
    dot, fmha = kernels["dot.1"][0], kernels["fmha"][0]
    assert seconds(dot, H100) == max(dot.bytes / 3.35e12, dot.operations / 1979e12)
    slow = dot.bytes / (3.35e12 * H100.reads[1]) + 2e-6
    assert seconds(dot, H100, 1) == pytest.approx(slow)
    times = times_of(list(kernels.values()), H100, sent=900e9)
    assert times.range[0] == 2.0  # sending takes longest, and hides all else
    assert times.range[1] > 2.0
    assert sum(times.by_kind.values()) == pytest.approx(1.0)
    # Committed benchmarks count matmuls only.
    both = roof_seconds([dot, fmha], H100)
    assert both == seconds(dot, H100) + fmha.bytes / 3.35e12


def test_units_for_fewer_bits_and_sources_of_numbers():
    assert H100.peak(8) == 1979e12
    assert H100.peak(4) == 1979e12  # no units of 4 bits
    v5e, tpu7x = TARGETS["v5e"].roof, TARGETS["tpu7x"].roof
    assert v5e.peak(8) == v5e.peak(16) == v5e.peak(16, True)  # FP8 is emulated
    assert v5e.peak(8, True) == 393e12
    assert tpu7x.peak(8) == 2 * tpu7x.peak(8, True)
    for target in TARGETS.values():
        own = vars(target.roof).items()
        assert set(target.sources) == {name for name, value in own if value != {}}


PEAK = """
HloModule step, is_scheduled=true

ENTRY %main (x: f32[65536]) -> f32[65536] {
  %x = f32[65536]{0} parameter(0)
  %kept = f32[65536]{0} add(%x, %x), metadata={op_name="jit(f)/jvp()/add"}
  %loss = f32[32768]{0} slice(%kept), metadata={op_name="jit(f)/jvp()/slice"}
  %grad = f32[65536]{0} multiply(%kept, %loss), metadata={op_name="jit(f)/transpose(jvp())/mul"}
  %work = f32[65536]{0} negate(%kept), metadata={op_name="jit(f)/transpose(jvp())/neg"}
  ROOT %new = f32[65536]{0} subtract(%x, %grad), metadata={op_name="jit(f)/sub"}
}
"""


def test_every_collective_is_sent():
    """A ragged one's further operands are its results' place, offsets and sizes."""
    text = """ENTRY %main (x: f32[64], o: f32[64], i: s32[4]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %o = f32[64]{0} parameter(1)
  %i = s32[4]{0} parameter(2)
  %r = f32[64]{0} ragged-all-to-all(%x, %o, %i, %i, %i, %i), replica_groups={{0,1,2,3}}
  ROOT %b = f32[64]{0} collective-broadcast(%r), replica_groups={{0,1,2,3}}
}"""
    found = messages(text, 4)
    assert [x.kind for x in found] == ["ragged-all-to-all", "collective-broadcast"]
    assert [x.sent for x in found] == [256 * 3 / 4] * 2
    assert {kind_of(x, ()) for x in kernels_of(text)} == {"collective"}


def test_temporaries_by_part():
    size = 4 * 65536
    parts = temporaries_by_part(parse(PEAK), 4 * size, frozenset({size}))
    assert parts == {
        "activations": size,
        "gradients": size,
        "working memory": 2 * size,  # what the compiler has more than is alive, too
    }


def test_parts_never_exceed_what_the_compiler_says():
    size = 4 * 65536
    parts = temporaries_by_part(parse(PEAK), size, frozenset({size}))
    assert sum(parts.values()) == size
    assert parts["working memory"] >= 0


def test_a_fusion_of_many_arrays_is_read_in_linear_time():
    """A chain of 2,000 sums, each of which reads one array more."""
    count = 2000
    lines = [f"  %p{i} = f32[8]{{0}} parameter({i})" for i in range(count)]
    lines += ["  %s0 = f32[8]{0} add(%p0, %p0)"]
    lines += [f"  %s{i} = f32[8]{{0}} add(%s{i - 1}, %p{i})" for i in range(1, count)]
    lines[-1] = lines[-1].replace("  %", "  ROOT %")
    given = ", ".join(f"%a{i}" for i in range(count))
    arguments = [f"  %a{i} = f32[8]{{0}} parameter({i})" for i in range(count)]
    fusion = f"  ROOT %f = f32[8]{{0}} fusion({given}), kind=kLoop, calls=%sum"
    text = ["HloModule step, is_scheduled=true", "", "%sum (p: f32[8]) -> f32[8] {"]
    text += [*lines, "}", "", "ENTRY %main (a: f32[8]) -> f32[8] {"]
    (kernel,) = kernels_of("\n".join([*text, *arguments, fusion, "}"]))
    assert kernel.bytes == 4 * 8 * (count + 1)
