"""`tensorcache cluster`: several servers on this machine, their cache nodes one cluster."""

import argparse
import contextlib
from pathlib import Path

from scripts.arguments import Verbs, add_address, add_verb, address_from, path, port, positive
from scripts.backend_layout import TEMPLATE_MODEL
from scripts.cluster.demo import show
from scripts.cluster.node import LOG, NodeServer
from scripts.cluster.plan import MOST_NODES, PORT_STEP, ClusterPlan
from scripts.cluster.running import look_after, running
from scripts.console import say, show_table
from scripts.errors import UsageError
from scripts.interruption import Interruption

EXAMPLES = """
  tensorcache cluster up                      # three servers: HTTP on 8000, 8010, 8020; until Ctrl-C
  tensorcache cluster up --nodes 5 --http-port 9000 --grpc-port 9001 --metrics-port 9002 --control-port 9005
  tensorcache cluster demo                    # what one computed the others restore; exit code 1 if not so
"""
_DEMO_NODES = 3


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "cluster", summary="run several servers here that share their caches", examples=EXAMPLES
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="up|demo")
    up = add_verb(parts, "up", summary="start the servers and keep them until Ctrl-C", examples=EXAMPLES)
    up.add_argument(
        "--nodes", type=positive, default=3, metavar="N", help=f"1 to {MOST_NODES} (default %(default)s)"
    )
    up.set_defaults(handler=run_up)
    demo = add_verb(parts, "demo", summary="show that what one computed, any restores", examples=EXAMPLES)
    demo.set_defaults(handler=run_demo, nodes=_DEMO_NODES)
    for part in (up, demo):
        _add_options(part)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--home", type=path, default=Path("build/cluster"), help="folder of all homes (default %(default)s)"
    )
    parser.add_argument("--model", default=TEMPLATE_MODEL, help="name to serve under (default %(default)s)")
    parser.add_argument(
        "--release", type=path, help="signed release folder (default build/engine/MODEL)", metavar="FOLDER"
    )
    parser.add_argument(
        "--key", type=path, default=Path("build/keys/release.pub"), help="its key (default %(default)s)"
    )
    parser.add_argument("--cluster", default="demo", help="name of the cluster (default %(default)s)")
    parser.add_argument(
        "--host-bytes", type=positive, default=256 << 20, help="host tier of each (default %(default)s)"
    )
    parser.add_argument("--lanes", type=positive, default=4, help="lanes of each (default %(default)s)")
    add_address(parser)
    parser.add_argument(
        "--control-port",
        type=port,
        default=8005,
        metavar="PORT",
        help=f"of the nodes' control service (default %(default)s); all ports: +{PORT_STEP} a node",
    )


def plan_from(arguments: argparse.Namespace) -> ClusterPlan:
    """The plan that the arguments describe."""
    release: Path = arguments.release or Path("build/engine") / arguments.model
    if not release.is_dir():
        raise UsageError(f"release {release} is not a folder: run `make sign`, or see --release")
    return ClusterPlan(
        home=arguments.home.resolve(),
        count=arguments.nodes,
        release=release,
        key=arguments.key,
        model=arguments.model,
        cluster=arguments.cluster,
        first=address_from(arguments),
        control_port=arguments.control_port,
        host_bytes=arguments.host_bytes,
        lanes=arguments.lanes,
    )


def run_up(arguments: argparse.Namespace) -> int:
    """Serve until interrupted: exit code 0."""
    plan = plan_from(arguments)
    interruption = Interruption()
    interruption.install()
    with contextlib.suppress(KeyboardInterrupt), running(plan, interruption=interruption) as servers:
        show_servers(plan, servers)
        look_after(servers, interruption=interruption)
    say("stopped")
    return 0


def run_demo(arguments: argparse.Namespace) -> int:
    """Exit code 0 only if every step held."""
    plan = plan_from(arguments)
    interruption = Interruption()
    interruption.install()
    with contextlib.suppress(KeyboardInterrupt), running(plan, interruption=interruption) as servers:
        show(servers, model=plan.model, interruption=interruption)
        return 0
    return 130


def show_servers(plan: ClusterPlan, servers: list[NodeServer]) -> None:
    """A table of who listens where, and what to paste."""
    rows = [
        (
            server.plan.id, str(server.plan.address.http_port), str(server.plan.address.grpc_port),
            str(server.plan.address.metrics_port), server.plan.control,
        )
        for server in servers
    ]  # fmt: skip
    show_table("nodes", ("node", "HTTP", "gRPC", "metrics", "control"), rows)
    text = '{"text_input": "The capital of France is", "max_tokens": 16}'
    for server in servers:
        url = f"http://{server.plan.address.client_host}:{server.plan.address.http_port}"
        say(f"curl -s {url}/v2/models/{plan.model}/generate -d '{text}'")
    say(f"tensorcache ring show --config {servers[0].plan.home / 'tensorcache.toml'}")
    say(f"logs: {plan.home}/node-*/{LOG} and triton.log; Ctrl-C stops all")
