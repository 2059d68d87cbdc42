"""`tensorcache serve`: keep a Triton running until SIGINT or SIGTERM, or say how to start one like it."""

import argparse
import contextlib
import shlex

from scripts.arguments import Verbs, add_verb
from scripts.console import complain, say
from scripts.errors import UsageError
from scripts.node_keys import ADMIN_KEY_FILE
from scripts.serving import CONFIG, Serving, add_serving, launch_from, supervised
from scripts.triton_runtime import door_flags, what_flags, where_flags

EXAMPLES = """
  tensorcache serve                                        # serves build/run on 127.0.0.1:8000 … 8002
  tensorcache serve --home /srv/tensorcache --host 0.0.0.0 --http-port 9000
  tensorcache serve --triton-flag=--log-verbose=1          # whatever else tritonserver takes
  tensorcache serve --print-flags                          # for a Triton of your own:
  eval "tritonserver $(tensorcache serve --print-flags | tr '\\n' ' ')"
"""
_PLACE = "THE-KEY"


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(verbs, "serve", summary="start Triton and keep every model alive", examples=EXAMPLES)
    add_serving(parser)
    parser.add_argument(
        "--print-flags",
        action="store_true",
        help="start nothing: print the flags for a Triton of your own, one per line, quoted for a shell",
    )
    parser.add_argument(
        "--with-key",
        action="store_true",
        help="with --print-flags: the admin key itself, instead of a shell's $(cat FILE)",
    )
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted: exit code 0."""
    if arguments.with_key and not arguments.print_flags:
        raise UsageError("--with-key goes with --print-flags")
    if arguments.print_flags:
        say("\n".join(printed_flags(arguments)))
        config = (arguments.home / CONFIG).resolve()
        complain(f"that Triton needs TENSORCACHE_CONFIG={config} in its environment, and wants umask 077")
        return 0
    with contextlib.suppress(KeyboardInterrupt), supervised(arguments) as serving:
        keep_serving(serving)
    say("stopped")
    return 0


def printed_flags(arguments: argparse.Namespace) -> list[str]:
    """What this verb starts Triton with, but for what only a supervisor needs: words for a shell.

    The key itself only if that was asked for: what is printed ends up in logs and on screens.
    """
    home = arguments.home.resolve()
    launch = launch_from(arguments, home)
    flags = [*what_flags(launch), *where_flags(launch.address), *launch.more_flags]
    if arguments.with_key:
        return [shlex.quote(flag) for flag in [*flags, *door_flags(launch.admin_key)]]
    doors = [shlex.quote(flag) for flag in door_flags(_PLACE)]
    key = f'"$(cat {shlex.quote(str(home / ADMIN_KEY_FILE))})"'
    return [*map(shlex.quote, flags), *(flag.replace(_PLACE, key) for flag in doors)]


def keep_serving(serving: Serving) -> None:
    """Say where, then look after it until interrupted."""
    address = serving.address
    say(
        f"serving {', '.join(serving.models)}: http://{address.client_host}:{address.http_port}, "
        f"gRPC {address.client_host}:{address.grpc_port}, "
        f"metrics http://{address.client_host}:{address.metrics_port}/metrics; Ctrl-C stops"
    )
    serving.supervisor.watch()
