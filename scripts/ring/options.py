"""Which cluster a verb is about: --at, --config, --cluster, --timeout."""

import argparse
from pathlib import Path

from scripts.arguments import path, seconds

DEFAULT_CONFIG = Path("build/run/tensorcache.toml")


def add_entry(parser: argparse.ArgumentParser) -> None:
    """--at, --config, --cluster, --timeout."""
    group = parser.add_argument_group("which cluster")
    group.add_argument("--at", metavar="HOST:PORT", help="control service of any of its nodes")
    group.add_argument(
        "--config",
        type=path,
        metavar="FILE",
        help=f"a node's tensorcache.toml: address, cluster, certificates (default {DEFAULT_CONFIG})",
    )
    group.add_argument("--cluster", metavar="NAME", help="its name (default: the config's)")
    group.add_argument(
        "--timeout", type=seconds, default=2.0, metavar="S", help="to wait for a node (default %(default)s)"
    )
