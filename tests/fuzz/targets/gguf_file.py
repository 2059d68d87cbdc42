"""Weights as GGUF, which only a build reads: BuildError, or a decoder whose weights can be had."""

import functools

from engines.errors import BuildError
from engines.gguf import load_gguf
from tests.engines.gguf_files import metadata, tensors, write
from tests.engines.random_decoder import random_decoder
from tests.fuzz.contract import plain, scratch


@functools.cache
def _small() -> bytes:
    decoder = random_decoder()
    meta = metadata(decoder, "llama")
    few = {name: value[:4] for name, value in meta.items() if isinstance(value, list)}
    meta |= few | {"tokenizer.ggml.merges": []}
    weights = {name: array for name, array in tensors(decoder, permuted=True).items() if array.ndim == 1}
    weights = {name: weights[name] for name in sorted(weights)[:2]}
    return write(scratch() / "small.gguf", "llama", meta, weights).read_bytes()


_HEAD = b"GGUF" + (3).to_bytes(4, "little")
EXAMPLES = (
    _small(),
    _HEAD + (2**62).to_bytes(8, "little") * 2,
    _HEAD + bytes(8) + (1).to_bytes(8, "little") + (2**40).to_bytes(8, "little") + b"x",
    _HEAD + bytes(16),
)


def target(data: bytes) -> None:
    path = scratch() / "fuzzed.gguf"
    path.write_bytes(data)
    try:
        decoder = load_gguf(path)
        for name in decoder.weights:
            assert decoder.weights[name].size <= 8 * len(data)
    except BuildError as error:
        plain(error)
