"""What inference engines call quantized weights, and how they store them.

Two descriptions are in use, and both are `quantization_config` of a model's
`config.json`: that of the package compressed-tensors, which vLLM, SGLang and
Transformers read; and that of DeepSeek-V3 for FP8 in blocks of 128 x 128. A weight is
[out, in], as PyTorch stores it:

| scheme | arrays |
|---|---|
| one scale | `weight`, `weight_scale` [1] |
| a scale for each row | `weight`, `weight_scale` [out, 1] |
| blocks of 128 x 128 | `weight`, `weight_scale_inv` [out / 128, in / 128] |
| MXFP8 | `weight`, `weight_scale` [out, in / 32], the exponents as uint8 |
| NVFP4 | `weight_packed` [out, in / 2], `weight_scale` [out, in / 16] in E4M3, \
`weight_global_scale` [1] |

A dequantized weight is `weight * weight_scale`, in NVFP4 `weight * weight_scale /
weight_global_scale`. `input_scale` [1] is there if the scale of the input is known.

Source: compressed-tensors, `quantization/quant_scheme.py` and `compressors/`, August
2026; DeepSeek-AI, DeepSeek-V3, README_WEIGHTS.md.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.typing import AnyArray, Shape
from ..._quantize import Format, QuantizedArray, Quantizer

# By format, the length of blocks (0: none, or rows), and the dtype of scales: the name.
_NAMES = {
    (Format.E4M3, 0, "float32"): "float-quantized",
    (Format.INT8, 0, "float32"): "int-quantized",
    (Format.E4M3, 32, "float8_e8m0fnu"): "mxfp8-quantized",
    (Format.E2M1, 32, "float8_e8m0fnu"): "mxfp4-pack-quantized",
    (Format.E2M1, 16, "float8_e4m3fn"): "nvfp4-pack-quantized",
    (Format.E4M3, 128, "float32"): "fp8",
}


def group_of(
    weight: QuantizedArray, shape: Shape, inputs: Quantizer | None, has_state: bool
) -> dict[str, Any]:
    """Returns how a weight and its input are quantized: a "config group".

    Args:
        weight: Matrices [*batch, out, in].
        shape: The shape of one, without padding.
        inputs: The quantizer of the other operand; None if it is not quantized.
        has_state: Whether its scale is known, if that is from a history.

    Raises:
        ValueError: No engine reads such a weight.
    """
    block, format, axes = weight.block, weight.format, len(weight.axes)
    name = _NAMES.get((format, block, str(weight.inverse_scale.dtype)))
    if name is None or weight.rotated or (name == "fp8" and axes != 2):
        raise ValueError(f"no engine reads {format.name} in blocks of {block}")
    if name != "fp8" and block and shape[1] % block:
        raise ValueError(f"{shape[1]} is not a multiple of its blocks of {block}")
    rows = "channel" if axes == 1 else "tensor"
    group = {"format": name, "weights": _options(format, block, rows, False)}
    group |= {"input_activations": None, "output_activations": None}
    # A 4-bit input needs a static global scale, which a training run has not.
    if inputs is not None and inputs.format.bits == 8:
        is_known = has_state and inputs.scale_from == "history"
        rows = "token" if inputs.block_dimensions == 1 else "tensor"
        options = _options(inputs.format, inputs.block, rows, not is_known)
        group["input_activations"] = options
    return group


def _options(
    format: Format, block: int, strategy: str, is_dynamic: bool
) -> dict[str, Any]:
    options = {"num_bits": format.bits, "symmetric": True, "dynamic": is_dynamic}
    options["type"] = "int" if format is Format.INT8 else "float"
    if block:
        strategy = "tensor_group" if block == 16 else "group"
        options["group_size"] = block
    if block in (16, 32):
        options["scale_dtype"] = f"torch.{'float8_e4m3fn' if block == 16 else 'uint8'}"
    return options | {"strategy": strategy}


def configuration(
    groups: Mapping[str, dict[str, Any]], plain: list[str]
) -> dict[str, Any] | None:
    """Returns the `quantization_config`; None if nothing is quantized.

    Args:
        groups: The group of each quantized layer by its name.
        plain: The layers whose matrices are not quantized.

    Raises:
        ValueError: Only some layers are in blocks of 128 x 128.
    """
    kinds: list[dict[str, Any]] = []
    for group in groups.values():
        kinds += [group] * (group not in kinds)
    formats = sorted({kind["format"] for kind in kinds})
    if formats == ["fp8"]:
        config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        blocks = {"weight_block_size": [128, 128], "modules_to_not_convert": plain}
        return config | blocks
    if "fp8" in formats:
        raise ValueError(
            "`mpx.export`: engines read FP8 in blocks of 128 x 128 only if all "
            f"quantized weights have them; got {', '.join(formats)}."
        )
    if not kinds:
        return None
    members = [[name for name in groups if groups[name] == kind] for kind in kinds]
    targets = members if len(kinds) > 1 else [["Linear"]]
    pairs = enumerate(zip(targets, kinds, strict=False))
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": {"targets": t, **k} for i, (t, k) in pairs},
        "ignore": plain,
    }


def arrays_of(weight: QuantizedArray, shape: Shape) -> dict[str, AnyArray]:
    """Returns the arrays of matrices, each with the axes of the batch first.

    Args:
        weight: Matrices [*batch, out, in], padded to whole blocks.
        shape: The shape of one in the file, without padding.
    """
    rows, columns, packed = shape[0], math.prod(shape[1:]), 8 // weight.format.bits
    payload, scale, block = weight.payload, weight.inverse_scale, weight.block
    batch = payload.shape[:-2]
    if len(weight.axes) != 1 and not block:
        scale = jnp.broadcast_to(scale.reshape(*scale.shape[:-2], 1), (*batch, 1))
    elif block < 128:
        # The rows of square blocks repeat their scales.
        scale = jnp.repeat(scale, block if len(weight.axes) == 2 else 1, axis=-2)
        scale = scale[..., :rows, :]
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    payload = payload[..., :rows, : columns // packed]
    payload = payload if packed == 2 else payload.reshape(*batch, *shape)
    arrays = {"weight_packed" if packed == 2 else "weight": payload}
    arrays["weight_scale_inv" if block == 128 else "weight_scale"] = scale
    if weight.tensor_inverse_scale is not None:
        tensor = weight.tensor_inverse_scale.reshape(1)
        arrays["weight_global_scale"] = jnp.broadcast_to(tensor, (*batch, 1))
    return arrays


def inverted(x: np.ndarray) -> np.ndarray:
    """Returns float32 numbers whose reciprocals, rounded, are `x` exactly.

    There are some, since `x` is such a reciprocal itself.
    """
    near = np.float32(1) / x
    both = np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))
    return next(y for y in (near, *both) if np.array_equal(np.float32(1) / y, x))


def dequantized(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the float32 numbers of a quantized weight."""
    if (packed := arrays.get("weight_packed")) is not None:
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        x = np.concatenate([sizes, -sizes])[codes]
    else:
        x = arrays["weight"].astype(np.float32)
    scale = arrays.get("weight_scale_inv", arrays.get("weight_scale"))
    assert scale is not None
    if scale.dtype == np.uint8:
        scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
    if "weight_global_scale" in arrays:
        tensor = np.float32(1) / arrays["weight_global_scale"]
        scale = scale.astype(np.float32) * tensor
    for axis, length in enumerate(x.shape if scale.ndim > 1 else ()):
        block = 128 if "weight_scale_inv" in arrays else length // scale.shape[axis]
        scale = np.take(np.repeat(scale, block, axis), np.arange(length), axis)
    return x * scale
