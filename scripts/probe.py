"""`tensorcache probe`: the liveness check that Triton's own health is not: does a model give a token."""

import argparse

from scripts.arguments import Verbs, add_verb, path, port, seconds
from scripts.console import complain, say, seconds_text
from scripts.node_keys import probe_key
from scripts.repository import DEFAULT_HOME
from scripts.serving import CONFIG
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import TritonAddress

EXAMPLES = """
  tensorcache probe                                   # exit code 0 = alive, 1 = not
  tensorcache probe --model smollm2 --http-port 9000 --limit 5
  tensorcache probe --home /srv/llm                   # access control on: the node's secrets admit it
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "probe", summary="ask for one token; exit code 0 if it comes in time", examples=EXAMPLES
    )
    parser.add_argument(
        "--home",
        type=path,
        default=DEFAULT_HOME,
        help="serving home, whose tensorcache.toml says where the node's secrets lie (default %(default)s)",
    )
    parser.add_argument("--config", type=path, help="that tensorcache.toml, instead of a home's")
    parser.add_argument("--model", default="smollm2", help="model to ask (default %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="where Triton listens (default %(default)s)")
    parser.add_argument("--http-port", type=port, default=8000, metavar="PORT", help="default %(default)s")
    parser.add_argument("--limit", type=seconds, default=2.0, metavar="SECONDS", help="default %(default)s")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """One line and an exit code. A model that answers "no room" is alive."""
    address = TritonAddress(host=arguments.host, http_port=arguments.http_port)
    key = probe_key(arguments.config or arguments.home / CONFIG)
    server = TritonHttp(address, probe_key=key.credential)
    result = server.probe(arguments.model, limit_s=arguments.limit)
    verdict = "busy" if result.busy else "ok" if result.alive else "failed"
    say(f"{verdict} {arguments.model} {seconds_text(result.seconds)}: {result.detail}")
    if result.denied:
        complain(key.hint)
    return 0 if result.alive else 1
