"""The verbs of `tensorcache public` and their options: one line per server, the worst exit code."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from scripts.acl.where import add_key_file, credential_in
from scripts.arguments import Verbs, add_verb, path, seconds
from scripts.console import complain, say
from scripts.errors import CommandError, DiskError, UsageError
from scripts.public.asking import Desk
from scripts.served_release import server_url
from scripts.triton_runtime import TritonAddress

EXAMPLES = """
  tensorcache public add handbook --model smollm2 --file prompt.txt --key-file ops.key
  tensorcache public add persona --model smollm2 --messages chat.json --key-file ops.key
  tensorcache public list --model smollm2 --key-file ops.key
  tensorcache public remove handbook --model smollm2 --key-file ops.key \\
      --url 10.0.0.1:8000 --url 10.0.0.2:8000

Whole blocks at the beginning of prompts that begin with it are then computed once for all namespaces; what
follows stays private. Register nothing that is a secret: by the time an answer takes everybody can tell that
it is there. The key (verb admin) travels over HTTP as it is: reach other machines through a tunnel or TLS.
"""

_MAX_BYTES = 8 << 20


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    public = add_verb(verbs, "public", summary="prefixes that all tenants share", examples=EXAMPLES)
    parts = public.add_subparsers(dest="part", required=True, metavar="PART")
    add = add_verb(parts, "add", summary="make a prefix public", examples=EXAMPLES)
    add.add_argument("name", help="its name: a-z, 0-9, ., _ and -")
    what = add.add_mutually_exclusive_group(required=True)
    what.add_argument("--file", type=path, metavar="FILE", help="text, as text_input: to the last byte")
    what.add_argument("--messages", type=path, metavar="FILE", help="JSON list of messages, as messages")
    what.add_argument("--ids", type=path, metavar="FILE", help="JSON list of tokens, as input_ids")
    _finish(add, _add)
    listed = add_verb(parts, "list", summary="what is public", examples=EXAMPLES)
    _finish(listed, _list)
    remove = add_verb(parts, "remove", summary="make it private again", examples=EXAMPLES)
    remove.add_argument("name")
    _finish(remove, _remove)


def _finish(parser: argparse.ArgumentParser, handler: Callable[[argparse.Namespace], int]) -> None:
    default = TritonAddress()
    parser.add_argument("--model", required=True, metavar="M", help="the decoder")
    parser.add_argument(
        "--url", type=server_url, action="append", metavar="HOST:PORT",
        help=f"a node's HTTP endpoint; may be repeated (default {default.host}:{default.http_port})",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=seconds, default=30.0, metavar="SECONDS", help="for each node (default %(default)s)"
    )
    add_key_file(parser, required=True)
    parser.set_defaults(handler=handler)


def _add(arguments: argparse.Namespace) -> int:
    command = {"command": "public.add", "name": arguments.name}
    return _each(arguments, command, _added_line, prompt=_prompt(arguments))


def _list(arguments: argparse.Namespace) -> int:
    return _each(arguments, {"command": "public.list"}, _listed_lines)


def _remove(arguments: argparse.Namespace) -> int:
    command = {"command": "public.remove", "name": arguments.name}
    return _each(arguments, command, lambda said: f"removed {said['removed']}")


def _added_line(said: Mapping[str, Any]) -> str:
    verb = "added" if said["added"] else "was public already:"
    return f"{verb} {said['name']}, {said['tokens']} tokens, {said['blocks']} blocks are shared"


def _listed_lines(said: Mapping[str, Any]) -> str:
    lines = [
        f"{one['name']:<24} {one['tokens']:>7} tokens  {one['registered']}  by {one['by']}"
        for one in said["public"]
    ]
    return "\n".join([f"{len(lines)} public", *(f"  {line}" for line in lines)])


def _each(
    arguments: argparse.Namespace,
    command: Mapping[str, str],
    shown: Callable[[Mapping[str, Any]], str],
    *,
    prompt: Mapping[str, Any] | None = None,
) -> int:
    """Tell every server; one that says no keeps the others from nothing."""
    credential = credential_in(arguments.key_file)
    worst = 0
    for address in arguments.url or [TritonAddress()]:
        desk = Desk(address, quote(arguments.model, safe=""), arguments.limit)
        try:
            said = desk.tell(command, credential=credential, prompt=prompt)
            say(f"{desk.url}  {shown(said)}")
        except CommandError as error:
            complain(f"{desk.url}: {error}")
            worst = max(worst, error.exit_code)
        except (KeyError, TypeError, ValueError):
            complain(f"{desk.url}: the answer is none of this version of TensorCache")
            worst = max(worst, 1)
    return worst


def _prompt(arguments: argparse.Namespace) -> dict[str, Any]:
    """The prompt input that the file holds."""
    if arguments.file is not None:
        return {"text_input": _text(arguments.file)}
    file = arguments.messages or arguments.ids
    try:
        value = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: expected JSON, found: {error}") from None
    if not isinstance(value, list) or not value:
        raise UsageError(f"{file}: expected a JSON list that is not empty, found {type(value).__name__}")
    if arguments.messages is not None:
        return {"messages": json.dumps(value, ensure_ascii=False)}
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise UsageError(f"{file}: expected token ids, whole numbers from 0 to {(1 << 31) - 1}")
    return {"input_ids": value}


def _text(file: Path) -> str:
    try:
        with file.open("rb") as source:
            content = source.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DiskError.of(error) from None
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{file}: must have at most {_MAX_BYTES} bytes, found more")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: expected UTF-8, found another byte at {error.start}") from None
