"""Reads one value of one field strictly: tensors by dtype and shape, then numbers, flags and texts by range.

Every reader takes the field's name and raises InvalidRequest with it, the limit and the value. Values from
JSON and from request parameters may be written as strings ("0.9"): clients of other backends do that. A bool
is never a number.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from backend.errors import InvalidRequest
from backend.io import MANY, Port, PortType
from backend.strict_json import check_text

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,20}")
_REAL: Final = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")

Reader = Callable[[str, object], Any]
"""(field, raw value) → checked value."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer in [low, high]."""

    low: int
    high: int

    def __call__(self, field: str, raw: object) -> int:
        """Read one."""
        value = int(raw) if isinstance(raw, str) and _WHOLE.fullmatch(raw) else raw
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise InvalidRequest(field, f"must be an integer in [{self.low}, {self.high}]", raw)
        return value


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number in [low, high], or in (low, high] where `above` is set."""

    low: float
    high: float
    above: bool = False

    def __call__(self, field: str, raw: object) -> float:
        """Read one."""
        value = float(raw) if isinstance(raw, str) and _REAL.fullmatch(raw) else raw
        if isinstance(value, bool) or not isinstance(value, int | float) or not self._holds(value):
            bracket = "(" if self.above else "["
            raise InvalidRequest(field, f"must be a number in {bracket}{self.low:g}, {self.high:g}]", raw)
        return float(value)

    def _holds(self, value: float) -> bool:  # comparisons with NaN are false; huge integers compare exactly
        return (self.low < value if self.above else self.low <= value) and value <= self.high


def flag(field: str, raw: object) -> bool:
    """True or false."""
    if isinstance(raw, bool):
        return raw
    if raw in ("true", "false"):
        return raw == "true"
    raise InvalidRequest(field, "must be true or false", raw)


@dataclass(frozen=True, slots=True)
class Text:
    """A string of at most `max_bytes` bytes of UTF-8."""

    max_bytes: int

    def __call__(self, field: str, raw: object) -> str:
        """Read one."""
        if not isinstance(raw, str):
            raise InvalidRequest(field, "must be a string", raw)
        check_text(raw, field=field)
        if len(raw.encode("utf-8")) > self.max_bytes:
            raise InvalidRequest(field, f"must have at most {self.max_bytes} bytes", len(raw.encode("utf-8")))
        return raw


@dataclass(frozen=True, slots=True)
class Texts:
    """A string or a list of at most `max_items` strings; empty ones are dropped."""

    max_items: int
    max_bytes: int

    def __call__(self, field: str, raw: object) -> tuple[str, ...]:
        """Read them."""
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, list):
            raise InvalidRequest(field, "must be a string or a list of strings", raw)
        if len(items) > self.max_items:
            raise InvalidRequest(field, f"must hold at most {self.max_items} strings", len(items))
        read = Text(self.max_bytes)
        texts = [read(field if item is raw else f"{field}[{i}]", item) for i, item in enumerate(items)]
        return tuple(text for text in texts if text)


def tensor_items(port: Port, tensor: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`tensor` after a check of dtype and shape; its elements are still unchecked."""
    if tensor.dtype != port.type.numpy:
        raise InvalidRequest(port.name, f"must be a tensor of {port.type.value}", str(tensor.dtype))
    if tensor.ndim != 1 or (port.dims != MANY and tensor.shape != port.dims):
        raise InvalidRequest(port.name, f"must have shape {list(port.dims)}", list(tensor.shape))
    return tensor


def tensor_value(port: Port, tensor: npt.NDArray[Any]) -> object:
    """The plain value of a tensor: a bool, int, float or str, or a list of those where the port takes many.

    FP32 becomes the shortest decimal that reads back as it: 0.9 is 0.9 whichever way a client sent it.
    """
    items = tensor_items(port, tensor)
    if port.type is PortType.BYTES:
        many = port.dims == MANY
        values: list[Any] = [_text(port.name, item, i if many else None) for i, item in enumerate(items)]
    elif port.type is PortType.FP32:
        values = [float(str(item)) for item in items.astype(np.float32)]
    else:
        values = items.tolist()
    return values if port.dims == MANY else values[0]


def _text(field: str, item: object, index: int | None) -> str:
    where = field if index is None else f"{field}[{index}]"
    if not isinstance(item, bytes):
        raise InvalidRequest(where, "must be bytes", item)
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"must be UTF-8; the byte at {error.start} is not"
        raise InvalidRequest(where, problem, item[error.start : error.start + 1]) from None
