"""How a release is opened on this machine: choices that change speed and room, never bits."""

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`threads` 0 = one per core this process may use; `lanes` None = what the release was built for."""

    threads: int = 0
    lanes: int | None = None
    max_seq_len: int | None = None
