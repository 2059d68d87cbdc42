"""Logits on a GPU as their `__cuda_array_interface__` describes them: checked before torch takes the address.

The interface (version 3): `shape`, `typestr`, `data` = (address, read-only), `strides` (None: C order) and
`stream`: the address of the stream that writes the data, 1 for the legacy default stream, 2 for the
per-thread one, None where nothing has to be waited for; 0 is forbidden, as it could mean either default.

torch reads shape, typestr, data and strides, refuses a read-only flag, and does not look at `stream`: work
on the data must be put on that stream by us.
"""

from typing import Any, Final

from backend.errors import EngineFailed

_VERSION: Final = 3  # the first with `stream`
_LEGACY_DEFAULT: Final = 1
_NO_STREAMS: Final = (0, 2)


def is_device_array(logits: Any) -> bool:
    """Whether `logits` say that they lie on a GPU."""
    return hasattr(logits, "__cuda_array_interface__")


def stream_of(logits: Any, *, rows: int, vocab_size: int) -> int | None:
    """The stream that writes `logits`; None for the default one.

    Raises EngineFailed if the logits are not as agreed.
    """
    told = logits.__cuda_array_interface__
    shape, strides = (rows, vocab_size), (4 * vocab_size, 4)
    version, stream = told.get("version", 0), told.get("stream")
    _expect("version", version >= _VERSION, expected=f"{_VERSION} or later", found=version)
    _expect("shape", tuple(told["shape"]) == shape, expected=shape, found=told["shape"])
    _expect("typestr", told["typestr"] == "<f4", expected="<f4", found=told["typestr"])
    found = told.get("strides")
    _expect("strides", found is None or tuple(found) == strides, expected=strides, found=found)
    address, read_only = told["data"]
    _expect("data", bool(address) and not read_only, expected="(address, False)", found=told["data"])
    _expect("stream", stream not in _NO_STREAMS, expected="the address of a stream, 1 or None", found=stream)
    return None if stream == _LEGACY_DEFAULT else stream


def _expect(name: str, holds: bool, *, expected: object, found: object) -> None:
    if not holds:
        raise EngineFailed(f"logits on the device: {name}: expected {expected}, found {found}")
