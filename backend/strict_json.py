"""JSON as requests may carry it: no key twice, no NaN or Infinity, no lone surrogates, no deep nesting."""

import json
from typing import Final, NoReturn

from backend.errors import InvalidRequest

MAX_DEPTH: Final = 32


def read_json(text: str, *, field: str) -> object:
    """Decode `text`; InvalidRequest names `field` and the first thing that is wrong."""

    def object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InvalidRequest(field, "must not give a key twice", twice)
        return result

    def refuse_constant(name: str) -> NoReturn:
        raise InvalidRequest(field, "must hold finite numbers", name)

    try:
        value = json.loads(text, object_pairs_hook=object_of, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidRequest(field, f"must be JSON: {error.msg} at character {error.pos}", text) from None
    except (RecursionError, ValueError) as error:  # ValueError: more digits than Python converts
        problem = "nested too deep" if isinstance(error, RecursionError) else "a number is too long"
        raise InvalidRequest(field, f"must be JSON within reason: {problem}") from None
    _check(value, field, MAX_DEPTH)
    return value


def _check(value: object, field: str, depth: int) -> None:
    if depth == 0:
        raise InvalidRequest(field, f"must be nested at most {MAX_DEPTH} deep")
    if isinstance(value, str):
        check_text(value, field=field)
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_text(key, field=field)
            _check(inner, field, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, field, depth - 1)


def check_text(text: str, *, field: str) -> None:
    """Refuse what UTF-8 cannot carry: lone surrogates, which JSON escapes can smuggle in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "must not hold lone surrogates", text[error.start]) from None
