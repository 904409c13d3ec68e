"""Reads the files of `mpx.export` from the texts of their formats alone.

Written from the specifications of safetensors, of compressed-tensors (its compressors
and `quantization/quant_scheme.py`) and of DeepSeek-V3 (README_WEIGHTS.md); it imports
nothing of mpx, nor of safetensors.
"""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "BOOL": np.bool_,
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of one safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert start % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    found, place = {}, 0
    for name, one in header.items():
        begin, end = one["data_offsets"]
        assert begin == place, "no holes"
        numbers = np.frombuffer(data[start + begin : start + end], DTYPES[one["dtype"]])
        found[name], place = numbers.reshape(one["shape"]), end
    assert start + place == len(data)
    return found


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a folder: of its one file, or of those in its index."""
    whole = folder / "model.safetensors"
    if whole.exists():
        return read(whole)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: read(folder / file) for file in set(index["weight_map"].values())}
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    assert len(found) == sum(map(len, files.values()))
    return found


def dequantized(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The quantized weights of a folder in float32, by the name of their layer."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    arrays = tensors(folder)
    names = {name.rpartition(".")[0] for name in arrays if ".weight_scale" in name}
    return {name: _layer(name, arrays, scheme_of(name, config)) for name in names}


def scheme_of(layer: str, config: dict[str, Any]) -> dict[str, Any]:
    """How the weight of a layer is quantized."""
    if config["quant_method"] == "fp8":
        assert layer not in config["modules_to_not_convert"]
        return {"strategy": "block", "block_structure": config["weight_block_size"]}
    assert config["quant_method"] == "compressed-tensors" and config["format"]
    assert layer not in config["ignore"]
    for group in config["config_groups"].values():
        if group["targets"] == ["Linear"] or layer in group["targets"]:
            return group["weights"]
    raise KeyError(layer)


def _layer(name: str, arrays: dict[str, np.ndarray], scheme: dict[str, Any]):
    get = {key.removeprefix(f"{name}."): x for key, x in arrays.items()}.get
    x = get("weight")
    if x is None:
        packed = arrays[f"{name}.weight_packed"]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        x = np.where(codes > 7, -1, 1).astype(np.float32) * E2M1[codes & 7]
    x, (rows, columns) = x.astype(np.float32), (len(x), x[0].size)
    if scheme["strategy"] == "block":
        down, right = scheme["block_structure"]
        scale = np.kron(get("weight_scale_inv"), np.ones((down, right), np.float32))
        return x * scale[:rows, :columns]
    scale, size = arrays[f"{name}.weight_scale"], scheme.get("group_size")
    wanted = {"tensor": (1,), "channel": (rows, 1)}.get(scheme["strategy"])
    assert scale.shape == (wanted or (rows, columns // size))
    if scale.dtype == np.uint8:
        scale = np.exp2(scale.astype(np.float32) - 127)
    elif scheme["strategy"] == "tensor_group":
        # Engines invert the divisor once, and keep it in float32.
        scale = scale.astype(np.float32) * (1 / get("weight_global_scale"))
    scale = np.repeat(scale, size, axis=1) if size else scale
    return x * scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
