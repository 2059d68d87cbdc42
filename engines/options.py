"""How a release is opened on this machine: choices that change speed and room, never bits."""

import msgspec


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`threads` 0 = one per core this process may use; None = what the release was built for.

    `max_prefill_tokens`: no prefill will be longer than this, so longer ones need no prewarm. `device` is the
    ordinal of the GPU, for engines that need one. `cuda_graphs` False launches every kernel by itself.
    """

    threads: int = 0
    lanes: int | None = None
    max_seq_len: int | None = None
    max_prefill_tokens: int | None = None
    device: int = 0
    cuda_graphs: bool = True
