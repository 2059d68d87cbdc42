"""The table of every input and output of a model: names, Triton types, shapes, and which may be left out.

One table serves three readers: auto-completion of config.pbtxt, the parser of requests, and the facade
model, so that they cannot disagree. Shapes are without a batch dimension (`max_batch_size: 0`).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np


class PortType(StrEnum):
    """Element type of an input or output; the value is Triton's name in config.pbtxt."""

    BYTES = "TYPE_STRING"
    BOOL = "TYPE_BOOL"
    INT32 = "TYPE_INT32"
    UINT32 = "TYPE_UINT32"
    UINT64 = "TYPE_UINT64"
    FP32 = "TYPE_FP32"

    @property
    def numpy(self) -> type[np.generic]:
        """The numpy scalar type that Triton hands over (object for BYTES)."""
        return _NUMPY[self]


_NUMPY: Final[dict[PortType, type[np.generic]]] = {
    PortType.BYTES: np.object_,
    PortType.BOOL: np.bool_,
    PortType.INT32: np.int32,
    PortType.UINT32: np.uint32,
    PortType.UINT64: np.uint64,
    PortType.FP32: np.float32,
}

ONE: Final = (1,)
MANY: Final = (-1,)


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output. `dims` is (1,) for a single value, (-1,) for a list of any length."""

    name: str
    type: PortType
    dims: tuple[int, ...] = ONE
    optional: bool = True

    def as_config(self) -> dict[str, object]:
        """What `add_input` and `add_output` of Triton's auto-completion take (inputs also "optional")."""
        return {"name": self.name, "data_type": self.type.value, "dims": list(self.dims)}


PROMPTS: Final[tuple[Port, ...]] = (
    Port("text_input", PortType.BYTES),
    Port("messages", PortType.BYTES),
    Port("input_ids", PortType.INT32, MANY),
)
"""Exactly one of these is given."""

OPTIONS: Final[tuple[Port, ...]] = (
    Port("max_tokens", PortType.INT32),
    Port("min_tokens", PortType.INT32),
    Port("stream", PortType.BOOL),
    Port("stop_words", PortType.BYTES, MANY),
    Port("temperature", PortType.FP32),
    Port("top_k", PortType.INT32),
    Port("top_p", PortType.FP32),
    Port("min_p", PortType.FP32),
    Port("repetition_penalty", PortType.FP32),
    Port("presence_penalty", PortType.FP32),
    Port("frequency_penalty", PortType.FP32),
    Port("seed", PortType.UINT64),
    Port("random_seed", PortType.UINT64),
    Port("ignore_eos", PortType.BOOL),
    Port("exclude_input_in_output", PortType.BOOL),
    Port("return_logprobs", PortType.BOOL),
    Port("cache_salt", PortType.BYTES),
    Port("no_cache", PortType.BOOL),
    Port("sampling_parameters", PortType.BYTES),
)

RESERVED: Final[tuple[Port, ...]] = (
    Port("lora_name", PortType.BYTES),
    Port("guided_decoding_guide", PortType.BYTES),
    Port("guided_decoding_guide_type", PortType.BYTES),
    Port("num_return_sequences", PortType.INT32),
    Port("beam_width", PortType.INT32),
    Port("image", PortType.BYTES, MANY),
)
"""Names kept for later: declared so that a client gets a clear answer, refused unless absent or neutral."""

INPUTS: Final[tuple[Port, ...]] = PROMPTS + OPTIONS + RESERVED

OUTPUTS: Final[tuple[Port, ...]] = (
    Port("text_output", PortType.BYTES),
    Port("output_ids", PortType.INT32, MANY),
    Port("finish_reason", PortType.BYTES),
    Port("num_input_tokens", PortType.UINT32),
    Port("num_output_tokens", PortType.UINT32),
    Port("num_cached_tokens", PortType.UINT32),
    Port("logprobs", PortType.FP32, MANY),
    Port("release", PortType.BYTES),
)
