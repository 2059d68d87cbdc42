"""The large files of a build: written one tensor at a time, read back as the page cache has them.

So a model of any size is built in little memory of our own.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engines.onnx_emit import EmittedGraph

Progress = Callable[[str, float], None]
"""Told what is being done and how much of it is done, 0 … 1."""


def write_weights(
    path: Path,
    graph: EmittedGraph,
    *,
    inside: Iterable[tuple[str, npt.NDArray[np.float32]]] = (),
    progress: Progress,
) -> str:
    """Write the file; the SHA-256 of all weights after quantisation, those `inside` the graph included.

    The digest is over names and values, not the file: rotary tables, whose length is an option, and the
    place of a tensor in the file do not change what KV means.
    """
    digest = hashlib.sha256()
    total = max(weight.offset + weight.length for weight in graph.weights)
    with path.open("wb") as file:
        for weight in graph.weights:
            progress("weights", weight.offset / total)
            data = weight.array().reshape(-1).view(np.uint8).data
            file.write(b"\0" * (weight.offset - file.tell()))
            file.write(data)
            if not weight.name.startswith("rope."):
                digest.update(f"{weight.name} {weight.element} {weight.shape} ".encode())
                digest.update(data)
    for name, values in inside:
        digest.update(f"{name} {values.shape} ".encode())
        digest.update(np.ascontiguousarray(values, dtype=np.float32).data)
    return digest.hexdigest()


def map_weights(path: Path, graph: EmittedGraph) -> Mapping[str, npt.NDArray[np.uint8]]:
    """The bytes of each tensor of a weights file."""
    data = np.frombuffer(map_file(path), dtype=np.uint8)
    return {weight.name: data[weight.offset : weight.offset + weight.length] for weight in graph.weights}


def map_file(path: Path) -> memoryview:
    """The content of a file, read-only; valid after the file lost its name."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
