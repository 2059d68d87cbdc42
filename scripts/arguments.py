"""Argument types and groups that several verbs share."""

import argparse
from pathlib import Path
from typing import Any

from scripts.triton_runtime import TritonAddress

Verbs = Any  # argparse's own type for sub-parsers is private


def add_verb(verbs: Verbs, name: str, *, summary: str, examples: str) -> argparse.ArgumentParser:
    """A sub-parser whose --help ends with examples to paste."""
    added: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=summary,
        epilog="examples:\n" + examples.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return added


def port(text: str) -> int:
    """A TCP port."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, got {text!r}") from None
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, got {number}")
    return number


def positive(text: str) -> int:
    """An integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def seconds(text: str) -> float:
    """A time limit in seconds, above 0."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}") from None
    if not 0 < number <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 86400, got {text}")
    return number


def path(text: str) -> Path:
    """A path with ~ expanded."""
    return Path(text).expanduser()


def add_address(parser: argparse.ArgumentParser) -> None:
    """--host and the three ports."""
    group = parser.add_argument_group("where Triton listens")
    group.add_argument(
        "--host", default="127.0.0.1", help="address (default %(default)s; 0.0.0.0 = every interface)"
    )
    group.add_argument("--http-port", type=port, default=8000, metavar="PORT", help="default %(default)s")
    group.add_argument("--grpc-port", type=port, default=8001, metavar="PORT", help="default %(default)s")
    group.add_argument("--metrics-port", type=port, default=8002, metavar="PORT", help="default %(default)s")


def address_from(arguments: argparse.Namespace) -> TritonAddress:
    """The address that `add_address` parsed."""
    return TritonAddress(
        host=arguments.host,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
    )
