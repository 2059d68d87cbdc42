"""Section [lmdb] of a node: where on its disk blocks are kept, how much of it, how carefully."""

from typing import Annotated, Literal

import msgspec

from cachemgr.errors import SettingsError

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_MIB = 1 << 20


class LmdbTierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Without `path` there is no such tier, and nothing of it is imported.

    path           a folder of this node's own disk; made if it is not there. Never a network file system
    max_bytes      bound of the files in it; a smaller one than they have by now begins anew
    batch_writes, batch_s, batch_bytes    a transaction is written when one of them is reached
    queue_blocks   blocks that may wait to be written; more are dropped and counted
    admit_seen     how often a block must have been seen to be kept here
    sync           when the disk is told, and so what a power cut or a crash of the kernel loses (a killed
                   process loses what waits to be written, and nothing else, either way):
        "batch"    each transaction waits for the disk: what waits, and the transaction under way
        "lazy"     the kernel writes when it likes: everything, because what it left would not be known to be
                   whole; the folder is begun anew. Less waiting for the disk
    retry_s        how long a disk in trouble is left alone
    call_s         a read that makes no progress for so long: the disk is not asked until it has ended
    close_s        what closing may take to write what waits
    """

    path: str = ""
    max_bytes: Annotated[int, msgspec.Meta(ge=4 * _MIB, le=1 << 46)] = 32 << 30
    batch_writes: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 500
    batch_s: _Seconds = 1.0
    batch_bytes: Annotated[int, msgspec.Meta(ge=_MIB, le=1 << 30)] = 64 * _MIB
    queue_blocks: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 4096
    admit_seen: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    sync: Literal["batch", "lazy"] = "batch"
    retry_s: _Seconds = 5.0
    call_s: _Seconds = 1.0
    close_s: _Seconds = 5.0

    def __post_init__(self) -> None:
        if "\0" in self.path:
            raise SettingsError("path", "must have no zero bytes", self.path)

    @property
    def enabled(self) -> bool:
        """True if there is such a tier."""
        return bool(self.path)
