"""Targets: what names mean, what is chosen without one, and which path follows."""

import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

import mpx
from mpx._quantize import Target, legs_of, target_from
from mpx._quantize._formats._target import on_target, target_of, this_cpu
from mpx._settings._ambient import settings_of
from mpx._tools._counter import TARGETS
from mpx._tools._forecast._forecast_views import Forecast
from mpx.quantization import AbstractRecipe, Leg, Role, TensorQuantizer
from tests.quantize.linear_cases import matrix_product

SPELLINGS = {
    ("cpu", "cpu", (0, 0)): ["cpu", "CPU", " cpu "],
    ("cpu bf16", "cpu", (1, 0)): ["cpu bf16", "CPU-BF16"],
    ("sm_90", "cuda", (9, 0)): ["sm_90", "sm_90a", "SM-90", "sm90"],
    ("sm_103", "cuda", (10, 3)): ["SM_103"],
    ("h100", "cuda", (9, 0)): ["H100", "h100", "NVIDIA H100 80GB HBM3", "nvidia-h100"],
    ("b200", "cuda", (10, 0)): ["B200", "NVIDIA B200"],
    ("l4", "cuda", (8, 9)): ["NVIDIA L4"],
    ("a100", "cuda", (8, 0)): ["a100", "A100-SXM4-40GB"],
    ("tpu v5e", "tpu", (5, 0)): [
        *("tpu v5e", "TPU v5e", "tpu-v5e", "tpu_v5e", "tpuv5e", "v5e", "V5E"),
        *("TPU v5 lite", "tpu v5 lite"),
    ],
    ("tpu v5p", "tpu", (5, 0)): ["TPU v5", "v5p", "tpu-v5p"],
    ("tpu v6e", "tpu", (6, 0)): ["TPU v6 lite", "v6e"],
    ("tpu7x", "tpu", (7, 0)): ["TPU7x", "tpu 7x", "tpu-7x", "TPU7", "v7x", "tpu v7x"],
    ("tpu8x", "tpu", (8, 0)): ["TPU8x"],
}
UNKNOWN = ["", "gpu", "sm_", "h1000", "80GB", "tpu", "cpu0", "v5z", "v10 0", "tpu v1"]


@pytest.mark.parametrize("target", SPELLINGS, ids=lambda target: target[0])
def test_names_are_read_in_every_spelling(target):
    name, platform, capability = target
    for spelling in SPELLINGS[target]:
        assert target_from(spelling) == Target(platform, name, capability)


# Every public function with such an argument.
CALLS = {
    "`target`": lambda name: mpx.autocast(jnp.sum, target=name),
    "`targets` of `mpx.forecast`": lambda name: mpx.forecast(jnp.sum, targets=name),
    "`constants` of `mpx.forecast`": lambda name: mpx.forecast(
        jnp.sum, targets="h100", constants={name: {}}
    ),
    "`target` of `where_it_pays`": lambda name: Forecast(
        "loss", (), (), {}, {}, {}
    ).where_it_pays("delayed", name),
}


@pytest.mark.parametrize("argument", CALLS)
def test_every_argument_refuses_unknown_names_in_one_way(argument):
    known = "".join(f'(?=.*"{name}")' for name in ("h100", "tpu v5e", "tpu7x"))
    for name in UNKNOWN[argument.startswith("`target` of") :]:
        with pytest.raises(ValueError, match=f"{argument} must be one of {known}"):
            CALLS[argument](name)
    with pytest.raises(TypeError, match=f"{argument} must be one of .*; got 90"):
        CALLS[argument](90)
    if " of " in argument:
        for name, read in (("NVIDIA A100", "a100"), ("GB300", "gb300"), ("cpu", "cpu")):
            why = f"got '{name}', but the rates of {read} are unknown"
            with pytest.raises(ValueError, match=f"{argument} must be .*; {why}"):
                CALLS[argument](name)


def test_every_argument_takes_every_spelling():
    for (name, *_), spellings in SPELLINGS.items():
        funcs = [mpx.autocast(jnp.sum, target=one) for one in spellings]
        assert len({getattr(settings_of(func), "target") for func in funcs}) == 1  # noqa: B009
        if name in ("h100", "b200", "tpu v5e", "tpu v5p", "tpu v6e", "tpu7x"):
            for one in spellings:
                mpx.forecast(jnp.sum, targets=one, constants={name.upper(): {}})


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_forecast_for_is_a_target_of_autocast(name):
    """The tables agree: names are the core's, and peaks are those of its hardware."""
    device, target = TARGETS[name], target_from(name)
    assert device.platform == target.platform
    assert (8 in device.roof.peaks) == target.has_fp8_units
    assert (4 in device.roof.peaks) == target.has_block_units
    if device.platform == "cuda":
        major, minor = target.capability
        assert f"major: {major} minor: {minor}" in " ".join(device.config.split())


def test_without_a_name_it_is_the_default_device():
    assert target_from(None) == this_cpu()
    with jax.default_device(jax.devices()[1]):
        assert target_from(None) == this_cpu()
    # A mesh of an abstract device is asked first.
    device = jax.sharding.AbstractDevice("NVIDIA B200", 1, "gpu")
    mesh = jax.sharding.AbstractMesh((4,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert target_from(None).capability == (10, 0)


@pytest.mark.parametrize(
    ("told", "has_units"),
    [
        ("vendor_id : GenuineIntel\nflags : fpu amx_bf16 amx_int8", True),
        ("vendor_id : AuthenticAMD\nflags : fpu avx512_bf16", True),
        ("vendor_id : GenuineIntel\nflags : fpu avx512_bf16", False),
        ("vendor_id : AuthenticAMD\nflags : fpu avx512f", False),
        ("Features : fp asimd", False),
        (None, False),  # no Linux
    ],
)
def test_a_cpu_with_units_is_known_by_what_linux_says(monkeypatch, told, has_units):
    def read(path):
        if told is None:
            raise FileNotFoundError(path)
        return told

    monkeypatch.setattr(pathlib.Path, "read_text", read)
    assert this_cpu.__wrapped__().name == ("cpu bf16" if has_units else "cpu")


def test_a_device_tells_its_capability():
    """A stand-in for `jax.Device`, of which none but CPUs are here."""

    def target(platform, kind, **more):
        device = types.SimpleNamespace(platform=platform, device_kind=kind, **more)
        return target_of(device)

    h200 = target("gpu", "NVIDIA H200", compute_capability="9.0")
    assert h200 == Target("cuda", "sm_90", (9, 0))
    assert target("tpu", "TPU v6 lite") == Target("tpu", "tpu v6e", (6, 0))
    assert not target("gpu", "MI300X", compute_capability="gfx942").has_fp8_units


CURRENT, MXFP8 = mpx.Float8CurrentScaling(), mpx.MXFP8BlockScaling()
NVFP4, BLOCKS = mpx.NVFP4BlockScaling(), mpx.Float8BlockScaling()
INT8 = mpx.Int8CurrentScaling()


def _weights_only(role: Role, leg: Leg):
    return TensorQuantizer() if role is Role.WEIGHT else None


@pytest.mark.parametrize(
    ("recipe", "target", "path", "why"),
    [
        (BLOCKS, "cpu", "emulated", "float32 matmuls on a CPU"),
        (BLOCKS, "cpu bf16", "emulated", "float32 matmuls on a CPU"),
        (CURRENT, "cpu bf16", "emulated", "bfloat16 matmuls on a CPU"),
        (CURRENT, "sm_90", "FP8 units", "cuBLASLt on sm_90"),
        (mpx.DelayedScaling(), "sm_89", "FP8 units", "cuBLASLt on sm_89"),
        (CURRENT, "tpu7x", "FP8 units", "XLA on tpu7x"),
        (CURRENT, "sm_80", "dequantized", "sm_80 has no FP8 hardware"),
        (CURRENT, "tpu v5e", "dequantized", "no FP8 hardware"),
        (MXFP8, "sm_100", "block-scaled units", "cuDNN on sm_100"),
        (NVFP4, "sm_100", "block-scaled units", "cuDNN on sm_100"),
        (MXFP8, "sm_90", "dequantized", "no hardware for scaled blocks"),
        (NVFP4, "tpu7x", "dequantized", "no hardware for scaled blocks"),
        (BLOCKS, "sm_90", "dequantized", "blocks of 128"),
        (mpx.CustomRecipe(_weights_only), "sm_90", "dequantized", "not quantized"),
        (INT8, "cpu", "emulated", "float32 matmuls on a CPU"),
        (INT8, "cpu bf16", "int8 units", "XLA on cpu bf16"),
        (INT8, "tpu v6e", "int8 units", "XLA on tpu v6e"),
        (INT8, "sm_90", "int8 units", "cuBLASLt on sm_90"),
        (INT8, "tpu7x", "dequantized", "tpu7x has no fast matmul of int8"),
    ],
)
def test_paths(recipe: AbstractRecipe, target: str, path: str, why: str):
    product = matrix_product(recipe, "bfloat16", target_from(target))
    found = legs_of(product)[Leg.FORWARD]
    assert found.path == path and why in found.why


BY_LEG = mpx.quantization.RecipeByLeg(forward=CURRENT, wgrad=NVFP4)
BACKWARD = mpx.quantization.RecipeByLeg(dgrad=INT8)


@pytest.mark.parametrize(
    ("recipe", "target", "formats"),
    [
        (CURRENT, "cpu", ("FP8", "FP8", "FP8")),
        (BY_LEG, "cpu", ("FP8", None, "NVFP4")),
        (BY_LEG, "sm_100", ("FP8", None, "NVFP4")),
        (BY_LEG, "sm_90", ("FP8", None, "")),
        (BACKWARD, "tpu v6e", (None, "INT8", None)),
        (BACKWARD, "cpu", (None, "INT8", None)),
        (BACKWARD, "tpu7x", (None, "", None)),
        (mpx.CustomRecipe(_weights_only), "cpu", ("", "", None)),
        (
            mpx.Float8CurrentScaling(backward_override="dequantized"),
            "sm_90",
            ("FP8", None, None),
        ),
    ],
)
def test_each_leg_has_its_format(recipe: AbstractRecipe, target: str, formats):
    """None: not quantized; "": quantized, and multiplied in another dtype."""
    found = legs_of(matrix_product(recipe, "bfloat16", target_from(target)))
    assert tuple(found[leg].format if leg in found else None for leg in Leg) == formats


def test_strict_looks_at_every_quantized_leg():
    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w))

    w = x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    strict = {"target": "tpu7x", "strict": True}
    with pytest.raises(ValueError, match="dgrad of the matmul .* no fast matmul of in"):
        jax.eval_shape(mpx.autocast(loss, recipe=BACKWARD, **strict), w, x)
    good = mpx.quantization.RecipeByLeg(dgrad=CURRENT)
    jax.eval_shape(mpx.autocast(loss, recipe=good, **strict), w, x)


# --- The forms of a program: `on_target` ----------------------------------------------

GPU = target_from("sm_90")


def form(target, x, tree, *, factor):
    """Another result for each form, which quantized products do not have."""
    return {"y": (x + tree["b"]) * (factor if target.is_met else -factor)}


def by_form(x, b):
    return on_target(GPU, form, x, {"b": b}, factor=3.0)["y"]


def by_default(x, b):
    return (x + b) * -3.0


def over_devices(f):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P("d"), jax.P()
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=jax.P("d"))


WAYS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: jax.vmap(f, (0, None)),
    "vmap of one": lambda f: lambda x, b: jax.vmap(f, (None, 0))(x, jnp.stack([b, b])),
    "scan": lambda f: lambda x, b: jax.lax.map(lambda row: f(row, b), x),
    "remat": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "shard_map": over_devices,
    "no jit": lambda f: lambda *given: jax.disable_jit()(f)(*given),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_for_a_gpu_is_the_other_one_on_a_cpu(way):
    x = jnp.arange(24.0).reshape(4, 3, 2)
    found, expected = (WAYS[way](f)(x, jnp.float32(2)) for f in (by_form, by_default))
    assert found.shape == expected.shape and (found == expected).all()


@pytest.mark.parametrize(
    ("platforms", "factors"),
    [(("cuda",), "+"), (("cpu",), "-"), (("tpu",), "-"), (("cpu", "cuda"), "+-")],
)
def test_a_lowered_program_has_the_forms_of_its_platforms(platforms, factors):
    x = jnp.ones((4, 3))
    text = jax.jit(by_form).trace(x, x).lower(lowering_platforms=platforms).as_text()
    found = {"+": "dense<3.0" in text, "-": "dense<-3.0" in text}
    assert "".join(sign for sign in found if found[sign]) == factors


def test_equal_forms_are_traced_once_and_exported_for_two_platforms():
    def four(x):
        return sum(by_form(x + i, x) for i in range(4))

    x = jnp.ones((4, 3))
    equations = jax.make_jaxpr(four)(x).eqns
    programs = [e.params["program"] for e in equations if "program" in e.params]
    assert len(programs) == 4 and len({id(one) for one in programs}) == 1
    exported = jax.export.export(jax.jit(four), platforms=("cpu", "cuda"))(x)
    assert (exported.call(x) == sum((x + i + x) * -3 for i in range(4))).all()
