"""Chats: a JSON list of messages, checked field by field, rendered by the template that came with the model.

Templates are Jinja programs written for Hugging Face tokenizers; they get what those expect and run in
Jinja's immutable sandbox, with a bound on output and time. The template is part of a signed release; the
messages are a stranger's.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from backend.errors import ConfigError, InvalidRequest
from backend.printable import printable
from backend.strict_json import read_json

Message = dict[str, str]
"""role, content and perhaps name."""

MAX_MESSAGES: Final = 1024
RENDER_SECONDS: Final = 2.0

_ROLE: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELDS: Final = ("role", "content", "name")


def read_messages(text: str) -> list[Message]:
    """Decode and check `messages`; InvalidRequest names messages[i].field, what it must be and what it is."""
    value = read_json(text, field="messages")
    if not isinstance(value, list):
        raise InvalidRequest("messages", "must be a JSON list of messages", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"must hold 1 to {MAX_MESSAGES} messages", len(value))
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _read_message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest(where, "must be a JSON object with role and content", value)
    for key in value:
        if key not in _FIELDS:
            raise InvalidRequest(f"{where}.{key}", f"is not known; messages have {', '.join(_FIELDS)}")
    for key in ("role", "content"):
        if key not in value:
            raise InvalidRequest(f"{where}.{key}", "is missing")
    message = {
        "role": _matching(value["role"], _ROLE, f"{where}.role"),
        "content": _content(value["content"], f"{where}.content"),
    }
    if "name" in value:
        message["name"] = _matching(value["name"], _NAME, f"{where}.name")
    return message


def _matching(value: object, pattern: re.Pattern[str], where: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise InvalidRequest(where, f"must be a string that matches {pattern.pattern}", value)
    return value


def _content(value: object, where: str) -> str:
    """A string, or a list of text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(where, "must be a string or a list of text parts", value)
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(where, 'must be {"type": "text", "text": …}', part)
    if part.get("type") != "text":
        raise InvalidRequest(f"{where}.type", 'must be "text"', part.get("type"))
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text", "must be a string", text)
    if len(part) != 2:
        raise InvalidRequest(where, "must hold type and text alone", sorted(part))
    return text


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it only shows its body."""

    tags: Final = {"generation"}  # type: ignore[misc]  # Jinja declares it as a plain set on the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Drop both tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template. Immutable; any thread."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`special_tokens` become variables (bos_token …). ConfigError if `source` is no template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat_template: expected a Jinja template, got: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._clock = clock

    def render(
        self, messages: Sequence[Message], *, max_bytes: int, add_generation_prompt: bool = True
    ) -> str:
        """The prompt. InvalidRequest where the template refuses the messages, or it grows past a bound."""
        pieces: list[str] = []
        size, deadline = 0, self._clock() + RENDER_SECONDS
        variables = {"messages": messages, "tools": None, "documents": None, **self._special_tokens}
        try:
            for piece in self._template.generate(variables, add_generation_prompt=add_generation_prompt):
                pieces.append(piece)
                size += len(piece.encode("utf-8"))
                if size > max_bytes:
                    raise InvalidRequest("messages", f"the chat prompt exceeds {max_bytes} bytes")
                if self._clock() > deadline:
                    raise InvalidRequest("messages", f"the chat template took more than {RENDER_SECONDS} s")
        except InvalidRequest:
            raise
        except _TemplateRefusal as refusal:
            said = printable(refusal.message or "")  # it may quote the messages
            raise InvalidRequest("messages", f"refused by the chat template: {said}") from None
        except Exception as error:  # a template is a program and can raise anything
            problem = f"the chat template failed on them: {_one_line(error)}"
            raise InvalidRequest("messages", problem) from None
        return "".join(pieces)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which prompts must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {printable(' '.join(str(error).split()))}"
