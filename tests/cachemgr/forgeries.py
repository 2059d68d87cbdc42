"""Shards that somebody tampered with, and what each must be found to be: for all readers of foreign bytes.

A forgery is made of two shards of one chain, of equal length: the one that is asked for, and its neighbour.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cachemgr import BlockFormat
from cachemgr.shard import (
    HEADER_DTYPE,
    HEADER_NBYTES,
    BlockAddress,
    ShardOpener,
    ShardSealer,
    Verdict,
)
from tests.cachemgr.host import SECRETS

UNKNOWN_KEY_ID = 99


@dataclass(frozen=True)
class Forgery:
    """`forge(shard, neighbour)`: the whole shard in its place, 128 header bytes and the payload."""

    name: str
    verdict: Verdict
    forge: Callable[[bytes, bytes], bytes]


def forgeries(block_format: BlockFormat, *, tags: Mapping[int, bytes]) -> list[Forgery]:
    """Everything that keeps the length of a shard; `tags` are the reader's; the highest sealed it."""
    return [*_mixed(), *_fields(tags), *_resealed(block_format, max(tags))]


def cuts(nbytes: int) -> list[int]:
    """Lengths that a shard of `nbytes` may be cut to: around every border of a field, and of the payload."""
    offsets = [int(HEADER_DTYPE.fields[name][1]) for name in HEADER_DTYPE.names]  # type: ignore[index, union-attr]
    borders = {*offsets, HEADER_NBYTES, (HEADER_NBYTES + nbytes) // 2, nbytes}
    return sorted({cut for at in borders for cut in (at - 1, at, at + 1) if 0 <= cut < nbytes})


def _mixed() -> Iterator[Forgery]:
    def mix(name: str, forge: Callable[[bytes, bytes], bytes]) -> Forgery:
        return Forgery(name, Verdict.CORRUPT, forge)

    yield mix("another block, whole", lambda shard, other: other)
    yield mix("its header over another payload", lambda shard, other: shard[:128] + other[128:])
    yield mix("another header over its payload", lambda shard, other: other[:128] + shard[128:])
    yield mix("the tag of another", lambda shard, other: shard[:112] + other[112:128] + shard[128:])
    yield mix("the nonce of another", lambda shard, other: shard[:88] + other[88:96] + shard[96:])
    yield mix("the address of another", lambda shard, other: shard[:24] + other[24:80] + shard[80:])
    yield mix("its payload moved by a byte", lambda shard, other: shard[:128] + shard[129:] + shard[128:129])
    yield mix("one bit of the payload", lambda shard, other: shard[:-1] + bytes([shard[-1] ^ 1]))
    yield mix("zeros for a payload", lambda shard, other: shard[:128] + bytes(len(shard) - 128))
    yield mix("zeros", lambda shard, other: bytes(len(shard)))
    yield mix("ones", lambda shard, other: b"\xff" * len(shard))
    yield mix("text", lambda shard, other: (b"GET / HTTP/1.1\r\n" * len(shard))[: len(shard)])


def _fields(tags: Mapping[int, bytes]) -> Iterator[Forgery]:
    """Every field of the header at nothing, one, one more, one less, the most, and its highest bit turned."""
    for name in HEADER_DTYPE.names or ():
        kind, offset = HEADER_DTYPE.fields[name][:2]  # type: ignore[index]
        size, start = int(kind.itemsize), int(offset)
        for title, change in _changes(size):

            def forge(
                shard: bytes, _: bytes, start: int = start, size: int = size, change: "_Change" = change
            ) -> bytes:
                value = change(int.from_bytes(shard[start : start + size], "little"))
                return shard[:start] + value.to_bytes(size, "little") + shard[start + size :]

            unknown = name == "version" or (name == "key_id" and change(max(tags)) not in tags)
            verdict = Verdict.UNREADABLE if unknown else Verdict.CORRUPT
            yield Forgery(f"{name}: {title}", verdict, forge)


_Change = Callable[[int], int]


def _changes(size: int) -> list[tuple[str, _Change]]:
    most = 256**size - 1
    return [
        ("nothing", lambda value: 0),
        ("one", lambda value: 1),
        ("one more", lambda value: (value + 1) & most),
        ("one less", lambda value: (value - 1) & most),
        ("the most", lambda value: most),
        ("highest bit", lambda value: value ^ (most // 2 + 1)),
    ]


def _resealed(block_format: BlockFormat, key_id: int) -> Iterator[Forgery]:
    """What somebody made who knows everything but the tag secret."""

    def resealed(name: str, verdict: Verdict, key_id: int, secret: bytes) -> Forgery:
        sealer = ShardSealer(block_format, {key_id: secret})

        def forge(shard: bytes, _: bytes) -> bytes:
            row = np.frombuffer(shard[:HEADER_NBYTES], HEADER_DTYPE)[0]
            address = BlockAddress(
                bytes(row["hash"]),
                bytes(row["parent"]),
                bytes(row["segment"]),
                int(row["index"]),  # type: ignore[arg-type]
            )
            payload = np.frombuffer(b"\x77" * (len(shard) - HEADER_NBYTES), np.uint8)
            return sealer.seal(address, payload) + payload.tobytes()

        return Forgery(name, verdict, forge)

    yield resealed("under a guessed secret", Verdict.CORRUPT, key_id, bytes(32))
    yield resealed("under the naming secret", Verdict.CORRUPT, key_id, SECRETS.naming)
    yield resealed("under a key id nobody has", Verdict.UNREADABLE, UNKNOWN_KEY_ID, bytes(32))


def judge(shard: bytes, address: BlockAddress, opener: ShardOpener) -> Verdict:
    """What a reader that has the whole of it finds."""
    check = opener.begin(shard[:HEADER_NBYTES], address)
    if isinstance(check, Verdict):
        return check
    check.update(shard[HEADER_NBYTES:])
    return Verdict.WHOLE if check.passed() else Verdict.CORRUPT
