"""Weights as safetensors: refused, or every tensor lies inside the file and has the size that it says."""

import json

from engines.errors import BuildError
from engines.safetensors_files import open_file, open_folder
from tests.fuzz.contract import plain, scratch


def _file(header: object, data: bytes = bytes(range(64))) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


EXAMPLES = (
    b"\x00"
    + _file(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [32, 40]},
            "c": {"dtype": "F16", "shape": [], "data_offsets": [40, 42]},
        }
    ),
    b"\x00" + _file({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**62]}}),
    b"\x00" + _file({"a": {"dtype": "F32", "shape": [0, 5], "data_offsets": [8, 8]}}),
    b"\x00" + _file({"a": {"dtype": "F32", "shape": [8], "data_offsets": [48, 80]}}),
    b"\x01" + json.dumps({"weight_map": {"a": "one.safetensors"}}).encode(),
    b"\x01" + json.dumps({"weight_map": {"a": "../one.safetensors"}}).encode(),
    b"\x00" + (20_000).to_bytes(8, "little") + b"[" * 20_000,
)


def target(data: bytes) -> None:
    folder = scratch() / "weights"
    folder.mkdir(exist_ok=True)
    kind, rest = data[:1], data[1:]
    try:
        if kind == b"\x01":
            (folder / "model.safetensors.index.json").write_bytes(rest)
            (folder / "one.safetensors").write_bytes(_file({}))
            tensors = open_folder(folder)
        else:
            (folder / "fuzzed.safetensors").write_bytes(rest)
            tensors = open_file(folder / "fuzzed.safetensors")
    except BuildError as error:
        plain(error)
        return
    for tensor in tensors.values():
        values = tensor.as_float32()
        assert values.shape == tensor.shape
        assert values.nbytes <= 2 * len(data)
