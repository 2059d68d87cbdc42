"""Reads tensors from safetensors files as float32, lazily and without torch, also those stored as bfloat16.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
bytes. The format carries no code. A folder holds one file, or several with an index of which tensor is where.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from engines.errors import BuildError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of a float32
}

FloatArray: TypeAlias = npt.NDArray[np.float32]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its shape, and where its bytes lie in the mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def as_float32(self) -> FloatArray:
        """The values; a view of the file for float32, a copy otherwise. Do not write into it."""
        stored = self.data.view(_STORED[self.dtype]).reshape(self.shape)
        if self.dtype == "BF16":
            return np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)
        return np.asarray(stored, dtype=np.float32)


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, mapped and not read; BuildError names the file that is wrong."""
    if (folder / SINGLE).is_file():
        return open_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _open_indexed(folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return open_file(folder / found[0])
    raise BuildError(f"weights: {len(found)} *.safetensors in {folder.name}, supported: {SINGLE} or {INDEX}")


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file by name; checks that header, shapes and offsets agree with the file's size."""
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise BuildError(f"{path.name}: {error}, supported: a readable safetensors file") from None
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if len(mapped) < 8 or length > min(_HEADER_LIMIT, len(mapped) - 8):
        raise BuildError(f"{path.name}: header of {length} bytes in {len(mapped)}, supported: safetensors")
    data = mapped[8 + length :]
    entries = _decode_header(path.name, mapped[8 : 8 + length].tobytes())
    return {name: _tensor(path.name, name, entry, data) for name, entry in entries.items()}


def _decode_header(file_name: str, raw: bytes) -> Mapping[str, _Header]:
    try:
        parsed = json.loads(raw)
        if isinstance(parsed, dict):
            parsed.pop("__metadata__", None)
        return msgspec.convert(parsed, dict[str, _Header])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise BuildError(f"{file_name}: header: {error}, supported: safetensors") from None


def _tensor(file_name: str, name: str, entry: _Header, data: npt.NDArray[np.uint8]) -> StoredTensor:
    where = f"{file_name}: {name}"
    stored = _STORED.get(entry.dtype)
    if stored is None:
        raise BuildError(f"{where}: dtype {entry.dtype}, supported: {', '.join(_STORED)}")
    begin, end = entry.data_offsets
    size = math.prod(entry.shape) * stored.itemsize
    inside = 0 <= begin <= end <= len(data)
    if not (inside and end - begin == size and all(dim >= 0 for dim in entry.shape)):
        raise BuildError(f"{where}: bytes {begin}…{end} of {len(data)}, supported: {size} bytes inside them")
    return StoredTensor(name=name, dtype=entry.dtype, shape=entry.shape, data=data[begin:end])


def _open_indexed(folder: Path) -> dict[str, StoredTensor]:
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError) as error:
        raise BuildError(f"{INDEX}: {error}, supported: a weight_map of tensor to file name") from None
    files = {}
    for file_name in sorted(set(index.weight_map.values())):
        if Path(file_name).name != file_name:
            raise BuildError(f"{INDEX}: file {file_name!r}, supported: plain names in the same folder")
        files[file_name] = open_file(folder / file_name)
    for name, file_name in index.weight_map.items():
        if name not in files[file_name]:
            raise BuildError(f"{INDEX}: {name} is not in {file_name}")
    return {name: files[file_name][name] for name, file_name in index.weight_map.items()}
