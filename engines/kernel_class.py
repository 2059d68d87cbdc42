"""Names the CPU kernels that compute KV here: machines of one class make the same bits, others may not.

ONNX Runtime picks its matrix kernels by instruction set, and they round differently; its attention kernel
cuts the cache into blocks that fit the level-2 cache. The class is therefore the machine, the instruction
sets that kernels are chosen by, the size of that cache, and the runtime's version.
"""

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

_CHOOSING = {
    "x86_64": (
        "avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx512f", "avx512bw", "avx512dq",
        "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    ),
    "aarch64": (
        "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16", "sme", "sme2",
    ),
}  # fmt: skip
_SC_LEVEL2_CACHE_SIZE = 191  # glibc's number, which Python has no name for; what the runtime itself asks
_CPUINFO = Path("/proc/cpuinfo")


def kernel_class(
    *, cpuinfo: str | None = None, machine: str | None = None, level2_bytes: int | None = None
) -> str:
    """The class of this machine, such as "x86_64 avx avx2 … l2-1048576 onnxruntime-1.32.0".

    Arguments replace what it reads from the system.
    """
    machine = machine or platform.machine()
    present = _flags(_CPUINFO.read_text(encoding="utf-8", errors="replace") if cpuinfo is None else cpuinfo)
    level2 = os.sysconf(_SC_LEVEL2_CACHE_SIZE) if level2_bytes is None else level2_bytes
    chosen = [flag for flag in _CHOOSING.get(machine, ()) if flag in present]
    return " ".join([machine, *chosen, f"l2-{level2}", f"onnxruntime-{metadata.version('onnxruntime')}"])


def identity_here(kv_identity: bytes, *, built_for: str, here: str) -> bytes:
    """The 16-byte KV identity on this machine: the release's own where the class is equal, else one of the
    pair.
    """
    if built_for == here:
        return kv_identity
    return hashlib.blake2b(here.encode(), key=kv_identity, person=b"kernel class", digest_size=16).digest()


def exact_here(precision: str, *, cpuinfo: str | None = None, machine: str | None = None) -> bool:
    """False if a row gets other bits alone than among others here, whatever the graph does about it.

    Measured with ONNX Runtime 1.32 on x86: with AVX512-VNNI every precision keeps its bits; with AVX2 alone
    8-bit weights and float32 do, 4-bit weights do not.
    """
    if precision != "int4" or (machine or platform.machine()) != "x86_64":
        return True
    text = _CPUINFO.read_text(encoding="utf-8", errors="replace") if cpuinfo is None else cpuinfo
    return "avx512_vnni" in _flags(text)


def _flags(cpuinfo: str) -> frozenset[str]:
    # The intersection over all cores: on a hybrid machine a thread may run anywhere.
    cores = [
        frozenset(value.split())
        for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if key.strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*cores) if cores else frozenset()
