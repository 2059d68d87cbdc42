"""`tensorcache serve`: keep a Triton running until SIGINT or SIGTERM."""

import argparse
import contextlib

from scripts.arguments import Verbs, add_verb
from scripts.console import say
from scripts.serving import Serving, add_serving, supervised

EXAMPLES = """
  tensorcache serve                                        # serves build/run on 127.0.0.1:8000 … 8002
  tensorcache serve --home /srv/tensorcache --host 0.0.0.0 --http-port 9000
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(verbs, "serve", summary="start Triton and keep every model alive", examples=EXAMPLES)
    add_serving(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted: exit code 0."""
    with contextlib.suppress(KeyboardInterrupt), supervised(arguments) as serving:
        keep_serving(serving)
    say("stopped")
    return 0


def keep_serving(serving: Serving) -> None:
    """Say where, then look after it until interrupted."""
    address = serving.address
    say(
        f"serving {', '.join(serving.models)}: http://{address.client_host}:{address.http_port}, "
        f"gRPC {address.client_host}:{address.grpc_port}, "
        f"metrics http://{address.client_host}:{address.metrics_port}/metrics; Ctrl-C stops"
    )
    serving.supervisor.watch()
