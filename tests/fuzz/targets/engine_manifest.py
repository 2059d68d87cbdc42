"""engine.json: refused in one line that says where, or it is what it encodes to."""

from engines.errors import ReleaseError
from engines.manifest import TensorRTInfo, encode_manifest, parse_manifest
from tests.engines.conftest import TINY_FILES, tiny_manifest
from tests.fuzz.contract import plain

_INFO = TensorRTInfo(version="10.16.0.72", compute_capability="9.0", gpu_name="GPU", profiles=())
EXAMPLES = (
    encode_manifest(tiny_manifest(TINY_FILES)),
    encode_manifest(tiny_manifest(TINY_FILES, runtime="tensorrt", tensorrt=_INFO)),
    encode_manifest(tiny_manifest(TINY_FILES, release=-1)),
    b"[" * 20_000,
    b'{"files": ' * 5_000,
    b'{"release": ' + b"9" * 100_000 + b"}",
)


def target(data: bytes) -> None:
    try:
        manifest = parse_manifest(data)
    except ReleaseError as error:
        plain(error, begins=["manifest: "])
        return
    encoded = encode_manifest(manifest)
    assert parse_manifest(encoded) == manifest
    assert encode_manifest(parse_manifest(encoded)) == encoded
    assert 0 <= manifest.release < 2**63
    assert "/" not in manifest.model
