"""The first bytes of a plan: refused step by step, or the plan is what the release says."""

import struct

from engines.errors import ReleaseError
from engines.manifest import TensorRTInfo
from engines.plan_header import check_plan
from tests.engines.conftest import TINY_FILES, tiny_manifest
from tests.fuzz.contract import plain

_INFO = TensorRTInfo(version="10.16.0.72", compute_capability="9.0", gpu_name="GPU", profiles=())
_MANIFEST = tiny_manifest(TINY_FILES, runtime="tensorrt", tensorrt=_INFO)
_HEADER = struct.Struct("<4sIqqBBBB4s")
_PLAN = _HEADER.pack(b"ftrt", 0, 2, 64, 10, 16, 0, 72, b"ftrt") + b"\n\0" * 16
EXAMPLES = (_PLAN, _PLAN[:31], _PLAN.replace(b"\n", b"\r\n"))


def target(data: bytes) -> None:
    try:
        check_plan(
            _MANIFEST, memoryview(data), library="10.16.0.72", compute_capability="9.0", gpu_name="GPU"
        )
    except ReleaseError as error:
        plain(error, begins=["plan: ", "plan size: ", "library version: "])
        return
    assert data[:4] == b"ftrt"
    assert data[24:28] == bytes((10, 16, 0, 72))
    assert int.from_bytes(data[16:24], "little") == len(data)
