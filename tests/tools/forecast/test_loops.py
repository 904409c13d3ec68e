"""Loops, convolutions and kernels of TPUs, in texts whose counts are known by hand."""

# ruff: noqa: E501 (lines of HLO)

import pytest

from mpx._tools._counter import (
    TARGETS,
    kernels_of,
    of_few_bits,
    parse,
    roof_seconds,
)
from mpx._tools._forecast._estimate import _findings

STATE = "(s32[], f32[65536], s32[])"
BYTES = 2 * 4 * 65536
LESS = "ROOT %c = pred[] compare(%i, %n), direction=LT"
UP = "%j = s32[] add(%i, %one)"
LOOP = """
HloModule m, is_scheduled=true

%compared (p: s32[], q: s32[]) -> pred[] {{
  %p = s32[]{{:T(128)}} parameter(0)
  %q = s32[]{{:T(128)}} parameter(1)
  ROOT %c = pred[]{{:T(512)}} compare(%q, %p), direction=GT
}}

%stepped (p: s32[]) -> s32[] {{
  %p = s32[]{{:T(128)}} parameter(0)
  %three = s32[]{{:T(128)}} constant(3)
  ROOT %j = s32[]{{:T(128)}} add(%p, %three)
}}

%condition (state: {STATE}) -> pred[] {{
  %state = {STATE} parameter(0)
  %n = s32[]{{:T(128)}} constant({bound})
  %i = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %m = s32[]{{:T(128)}} get-tuple-element(%state), index=2
  {condition}
}}

%body (state.1: {STATE}) -> {STATE} {{
  %one = s32[]{{:T(128)}} constant(1)
  %two = s32[]{{:T(128)}} constant(2)
  %state.1 = {STATE} parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%state.1), index=0
  %x = f32[65536]{{0}} get-tuple-element(%state.1), index=1
  %m = s32[]{{:T(128)}} get-tuple-element(%state.1), index=2
  {step}
  %y = f32[65536]{{0}} negate(%x)
  ROOT %next = {STATE} tuple(%j, %y, %m)
}}

ENTRY %main (x: f32[65536], k: s32[]) -> f32[65536] {{
  %x = f32[65536]{{0}} parameter(0)
  %k = s32[]{{:T(128)}} parameter(1)
  %start = s32[]{{:T(128)}} constant({start})
  %copy.1 = s32[]{{:T(128)}} copy(%start)
  %seven = s32[]{{:T(128)}} constant(7)
  %init = {STATE} tuple(%copy.1, %x, {other})
  %loop = {STATE} while(%init), condition=%condition, body=%body{known}
  ROOT %y = f32[65536]{{0}} get-tuple-element(%loop), index=1
}}
"""
KNOWN = ', backend_config={"known_trip_count":{"n":"5"}}'
FORMS = {
    "up": (12, {}),
    "from a start": (9, {"start": 3}),
    "by threes": (4, {"step": "%j = s32[] fusion(%i), kind=kLoop, calls=%stepped"}),
    "less or equal": (13, {"condition": LESS.replace("LT", "LE")}),
    "swapped": (13, {"condition": "ROOT %c = pred[] compare(%n, %i), direction=GE"}),
    "not equal": (12, {"condition": LESS.replace("LT", "NE")}),
    "in a fusion": (
        12,
        {"condition": "ROOT %c = pred[] fusion(%i, %n), kind=kLoop, calls=%compared"},
    ),
    "down": (
        5,
        {"condition": LESS.replace("LT", "GT"), "bound": 2, "start": 11}
        | {"step": "%j = s32[] subtract(%i, %two)"},
    ),
    "doubled": (4, {"start": 1, "step": "%j = s32[] multiply(%i, %two)"}),
    "a bound in the state": (7, {"condition": LESS.replace("%n", "%m")}),
    "never": (0, {"start": 40}),
    "said by the compiler": (5, {"known": KNOWN}),
    "a bound of the caller": (
        None,
        {"condition": LESS.replace("%n", "%m"), "other": "%k"},
    ),
    "for ever": (None, {"step": "%j = s32[] subtract(%i, %one)"}),
    "by data": (None, {"condition": "ROOT %c = pred[] custom-call(%i)"}),
}


def text_of(bound=12, start=0, condition=LESS, step=UP, other="%seven", known=""):
    return LOOP.format(STATE=STATE, **locals())


@pytest.mark.parametrize("form", FORMS)
def test_a_loop_counts_as_often_as_it_runs_or_says_that_it_is_unknown(form):
    trips, options = FORMS[form]
    text = text_of(**options)
    kernels = [k for k in kernels_of(text) if k.name == "y"]
    assert [(k.bytes, k.times) for k in kernels] == [
        (BYTES, 1 if trips is None else trips)
    ]
    found = list(_findings(parse(text), [], {}))
    assert [one.startswith("Loops that run an unknown") for one in found] == [True] * (
        trips is None
    )


def program(*lines):
    return "\n".join(
        ["HloModule m", "", "ENTRY %main (a: f32[1]) -> f32[1] {", *lines, "}"]
    )


A, B = "bf16[8,1024,16,128]", "bf16[8,1024,16,128]"
CONVOLUTIONS = {
    # A matmul of 8 x 16 pairs, as XLA:TPU writes it.
    "batch": (2 * 8 * 16 * 1024 * 1024 * 128, A, B, "bf16[8,16,1024,1024]")
    + ("window={size=8x16 stride=7x15 lhs_dilate=8x16}, dim_labels=0b1f_0o1i->01bf",),
    "matmul": (2 * 64 * 32 * 16, "bf16[64,32]", "bf16[32,16]", "bf16[64,16]")
    + ("dim_labels=bf_io->bf",),
    "integers": (2 * 64 * 32 * 16, "s8[64,32]", "s8[32,16]", "s32[64,16]")
    + ("dim_labels=bf_io->bf",),
    # Of three places at each of 64 pixels, two are outside.
    "same": (2 * 8 * (3 * 64 - 2) ** 2 * 16 * 32, "f32[8,64,64,16]")
    + ("f32[3,3,16,32]", "f32[8,64,64,32]")
    + ("window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",),
    # The gradient of a stride: of three places one or two are numbers.
    "dilated": (2 * 8 * (3 * 32 - 1) ** 2 * 32 * 16, "f32[8,32,32,32]")
    + ("f32[3,3,16,32]", "f32[8,64,64,16]")
    + ("window={size=3x3 pad=2_1x2_1 lhs_dilate=2x2}, dim_labels=b01f_01oi->b01f",),
    # Four groups: the kernel has the inputs of one.
    "groups": (2 * 64 * 32 * 4, "f32[64,16]", "f32[4,32]", "f32[64,32]")
    + ("dim_labels=bf_io->bf, feature_group_count=4",),
}


@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_what_meets_in_a_convolution_counts(form):
    operations, left, right, result, window = CONVOLUTIONS[form]
    lines = (
        f"  %a = {left} parameter(0)",
        f"  %b = {right} parameter(1)",
        f"  ROOT %c = {result} convolution(%a, %b), {window}",
    )
    (kernel,) = kernels_of(program(*lines))
    assert kernel.further == operations
    assert kernel.is_of_integers == (form == "integers")
    assert bool(of_few_bits([kernel])) == (form == "integers")
    peak = 393e12 if form == "integers" else 197e12
    seconds = max(operations / peak, kernel.bytes / 819e9)
    assert roof_seconds([kernel], TARGETS["v5e"].roof) == seconds


def test_pallas_kernels_have_their_estimate_or_are_a_finding():
    call = 'custom-call(%a), custom_call_target="tpu_custom_call", backend_config='
    text = program(
        "  %a = bf16[64,64]{1,0} parameter(0)",
        f'  %known = bf16[64,64] {call}{{"cost_estimate":{{"flops":"123"}}}}',
        f"  ROOT %other = bf16[64,64] {call}{{}}",
    )
    kernels = kernels_of(text)
    assert [(k.name, k.further, k.bits) for k in kernels] == [
        ("known", 123, 16),
        ("other", 0, 0),
    ]
    (finding,) = _findings(parse(text), [(k, "") for k in kernels], {})
    assert finding.startswith("Pallas kernels without a `cost_estimate`")


def test_slices_to_the_chip_and_gathers_count_what_they_read():
    text = """
HloModule m

%slice (p: f32[64,1024]) -> f32[8,1024] {
  %p = f32[64,1024]{1,0:T(8,128)} parameter(0)
  ROOT %s = f32[8,1024]{1,0:T(8,128)S(1)} slice(%p), slice={[0:8], [0:1024]}
}

%rows (p: f32[64,1024], i: s32[4]) -> f32[4,1024] {
  %p = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %i = s32[4]{0:T(128)} parameter(1)
  ROOT %g = f32[4,1024]{1,0:T(8,128)} gather(%p, %i), offset_dims={1}
}

ENTRY %main (x: f32[64,1024], i: s32[4]) -> f32[4,1024] {
  %x = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %i = s32[4]{0:T(128)} parameter(1)
  %start = ((f32[64,1024]{1,0:T(8,128)}), f32[8,1024]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) async-start(%x), calls=%slice
  %done = f32[8,1024]{1,0:T(8,128)S(1)} async-done(%start)
  ROOT %rows.1 = f32[4,1024]{1,0:T(8,128)} fusion(%x, %i), kind=kLoop, calls=%rows
}
"""
    assert {k.name: k.bytes for k in kernels_of(text)} == {
        "s": 4 * 8 * 1024,
        "rows.1": 2 * 4 * 4 * 1024 + 4 * 4,
    }
