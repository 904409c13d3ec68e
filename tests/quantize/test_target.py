"""Targets: what names mean, what is chosen without one, and which path follows."""

import types

import jax
import pytest

import mpx
from mpx._quantize import Target, path_of, target_from
from mpx._quantize._target import target_of
from mpx.quantization import AbstractRecipe, Role, TensorQuantizer
from tests.quantize.linear_cases import CPU, matrix_product


@pytest.mark.parametrize(
    ("name", "platform", "capability"),
    [
        ("cpu", "cpu", (0, 0)),
        ("sm_90", "cuda", (9, 0)),
        ("sm_90a", "cuda", (9, 0)),
        ("SM_103", "cuda", (10, 3)),
        ("NVIDIA H100 80GB HBM3", "cuda", (9, 0)),
        ("B200", "cuda", (10, 0)),
        ("NVIDIA L4", "cuda", (8, 9)),
        ("a100", "cuda", (8, 0)),
        ("tpu v5e", "tpu", (5, 0)),
        ("v6e", "tpu", (6, 0)),
        ("TPU v5 lite", "tpu", (5, 0)),
        ("TPU7x", "tpu", (7, 0)),
    ],
)
def test_names(name: str, platform: str, capability: tuple[int, int]):
    found = target_from(name)
    assert (found.platform, found.capability) == (platform, capability)


@pytest.mark.parametrize("name", ["", "gpu", "sm_", "h1000", "80GB", "tpu", "cpu0"])
def test_unknown_names_are_refused_with_those_known(name: str):
    with pytest.raises(ValueError, match=r'`target`.*"sm_90".*h100.*"tpu v5e"'):
        target_from(name)


def test_a_target_is_a_name():
    with pytest.raises(TypeError, match="`target` is None or one of"):
        target_from(90)  # pyright: ignore[reportArgumentType]


def test_without_a_name_it_is_the_default_device():
    assert target_from(None) == CPU
    with jax.default_device(jax.devices()[1]):
        assert target_from(None) == CPU


def test_a_device_tells_its_capability():
    """A stand-in for `jax.Device`, of which none but CPUs are here."""
    gpu = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0"
    )
    rocm = types.SimpleNamespace(
        platform="gpu", device_kind="MI300X", compute_capability="gfx942"
    )
    tpu = types.SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
    assert target_of(gpu) == Target("cuda", "sm_90", (9, 0))
    assert target_of(tpu) == Target("tpu", "tpu v6 lite", (6, 0))
    assert not target_of(rocm).has_fp8_units


def test_a_mesh_of_an_abstract_device_tells_first():
    device = jax.sharding.AbstractDevice("NVIDIA B200", 1, "gpu")
    mesh = jax.sharding.AbstractMesh((4,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert target_from(None).capability == (10, 0)


CURRENT, MXFP8 = mpx.Float8CurrentScaling(), mpx.MXFP8BlockScaling()
NVFP4, BLOCKS = mpx.NVFP4BlockScaling(), mpx.Float8BlockScaling()


def _weights_only(role: Role, for_wgrad: bool):
    return TensorQuantizer() if role is Role.WEIGHT else None


@pytest.mark.parametrize(
    ("recipe", "target", "path", "why"),
    [
        (CURRENT, "cpu", "emulated", "float32"),
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
    ],
)
def test_paths(recipe: AbstractRecipe, target: str, path: str, why: str):
    product = matrix_product(recipe, "bfloat16", target_from(target))
    found, reason = path_of(product)
    assert found == path and why in reason
