"""safetensors files, one tensor at a time.

The package writes a file from all of its tensors at once, and reads FP8 into PyTorch
only (0.8.0, November 2026). So files are written here, and the package checks the
header of a file that is read.

A file is the length of the header in 8 bytes, the header in JSON, padded with spaces to
a multiple of 8 bytes, and the numbers. Source: Hugging Face, safetensors, README.
"""

import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._base.typing import Shape

_LETTERS = {"float": "F", "bfloat": "BF", "int": "I", "uint": "U", "bool": "BOOL"}


def _code(dtype: object) -> str:
    """Returns what a header calls a dtype: "BF16", "F8_E4M3"."""
    name = str(dtype).removesuffix("fn")
    word = name.rstrip("0123456789") if "_" not in name else "float"
    return name.replace(word, _LETTERS[word], 1).upper()


DTYPES = {
    _code(name): np.dtype(name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 bool "
        "int64 int32 int16 int8 uint64 uint32 uint16 uint8"
    ).split()
}
INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """The type of a tensor in a file.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
    """

    name: str
    dtype: np.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    folder: pathlib.Path,
    tensors: Iterable[Stored],
    arrays: Iterator[np.ndarray],
    shard_bytes: int,
) -> None:
    """Writes tensors to files, with an index if there are several.

    Args:
        folder: Where to write them.
        tensors: Their types.
        arrays: The tensors in the same order, each of which is written before the next
            one is asked for.
        shard_bytes: The size of a file, if no tensor is larger.
    """
    shards: list[list[Stored]] = [[]]
    for tensor in tensors:
        size = sum(one.nbytes for one in shards[-1])
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    places = {}
    for number, shard in enumerate(shards, start=1):
        part = f"-{number:05}-of-{len(shards):05}" * (len(shards) > 1)
        name = f"model{part}.safetensors"
        places |= {tensor.name: name for tensor in shard}
        with (folder / name).open("xb") as file:
            file.write(_header(shard))
            for _ in shard:
                array = np.ascontiguousarray(next(arrays))
                file.write(array.reshape(-1).view(np.uint8).data)
    if len(shards) > 1:
        size = sum(tensor.nbytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _header(shard: Iterable[Stored]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in shard:
        end = begin + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _code(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read(folder: pathlib.Path) -> Mapping[str, np.ndarray]:
    """Returns the tensors of a folder, which are read from the files when used.

    Raises:
        ModuleNotFoundError: The package safetensors is not installed.
        ValueError: A file is damaged or missing.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    found: dict[str, np.ndarray] = {}
    for path in files:
        try:
            with safe_open(path, "numpy"):  # checks the header against the file
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path.name} is damaged: {error}") from error
        raw = np.memmap(path, np.uint8, "r")
        size = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8:size].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = DTYPES[entry["dtype"]]
            numbers = raw[size + begin : size + end].view(dtype)
            found[name] = numbers.reshape(entry["shape"])
    return found
