"""The structured bodies of the bulk channel: requests, places, and how a request ended. msgpack, as arrays.

Invariant: whatever decodes is within its limits; anything else is a MalformedFrame, never another exception.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from cachemgr.cluster.bulk.frames import REQUEST_BLOCKS, MalformedFrame
from cachemgr.contract import BlockHash
from cachemgr.ring import Epoch, Version

NAME_NBYTES = 16
_Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_UInt = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Names = Annotated[bytes, msgspec.Meta(min_length=NAME_NBYTES, max_length=NAME_NBYTES * REQUEST_BLOCKS)]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Body of GET and PUT."""

    format_id: _Digest
    epoch: _UInt
    digest: _Digest
    budget_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]
    """What is left of the caller's deadline."""
    names: _Names
    """Block hashes, joined."""
    in_place: bool = False
    """GET: we may share a host, tell where the blocks lie."""

    def __post_init__(self) -> None:
        if len(self.names) % NAME_NBYTES:
            raise ValueError(f"names: must be a multiple of {NAME_NBYTES} bytes, got {len(self.names)}")

    @property
    def version(self) -> Version:
        """Of the ring that the sender goes by."""
        return Version(Epoch(self.epoch), self.digest)

    @property
    def blocks(self) -> list[BlockHash]:
        """The names one by one."""
        names = self.names
        return [BlockHash(names[at : at + NAME_NBYTES]) for at in range(0, len(names), NAME_NBYTES)]


class PlacedFile(msgspec.Struct, frozen=True, array_like=True):
    """An arena file as its owner sees it."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    device: _UInt
    inode: _UInt


class Places(msgspec.Struct, frozen=True, array_like=True):
    """Body of PLACES: where each asked block lies. A lease holds them until LEASE says they are read."""

    files: Annotated[tuple[PlacedFile, ...], msgspec.Meta(max_length=64)]
    file_of: Annotated[tuple[int, ...], msgspec.Meta(max_length=REQUEST_BLOCKS)]
    """Per asked block an index into `files`; −1 if the block is not here."""
    offsets: Annotated[tuple[_UInt, ...], msgspec.Meta(max_length=REQUEST_BLOCKS)]

    def __post_init__(self) -> None:
        if len(self.file_of) != len(self.offsets):
            raise ValueError(f"offsets: must be as many as file_of, got {len(self.offsets)}")
        if any(not -1 <= number < len(self.files) for number in self.file_of):
            raise ValueError(f"file_of: must be −1 to {len(self.files) - 1}")


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Body of END."""

    status: Literal["done", "busy", "unknown format", "cancelled"]
    epoch: _UInt
    digest: _Digest
    hot: dict[_Digest, Annotated[int, msgspec.Meta(ge=0, le=65535)]] | None = None
    """Segment → how many extra owners it has now; wire version 2."""

    @property
    def version(self) -> Version:
        """Of the ring that the answering node goes by."""
        return Version(Epoch(self.epoch), self.digest)


Message = TypeVar("Message", Request, Places, Ended)

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type, msgspec.msgpack.Decoder[object]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Request, Places, Ended)
}


def encode(message: Request | Places | Ended) -> bytes:
    """The body of its frame."""
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """MalformedFrame if `data` is no message of this kind, or one out of its limits."""
    try:
        message = _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedFrame(kind.__name__, "as its struct says", str(error)) from None
    assert isinstance(message, kind)
    return message


def join_names(names: Sequence[BlockHash]) -> bytes:
    """As Request has them."""
    return b"".join(names)
