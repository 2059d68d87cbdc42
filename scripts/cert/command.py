"""The verbs of `tensorcache cert` and their options."""

import argparse

from scripts.arguments import Verbs, add_verb, path, positive
from scripts.console import say
from scripts.errors import RejectedError

EXAMPLES = """
  tensorcache cert ca ca/ --cluster prod                   # once: ca/ca.crt, and ca/ca.key (0600)
  tensorcache cert node gpu-7/ --ca ca/ --cluster prod --node gpu-7 --host 10.0.0.7
  tensorcache cert show gpu-7/node.crt

Keep ca.key off the nodes. A node takes new files while it runs: no restart.
"""
_CA = """
  tensorcache cert ca ca/ --cluster prod

To change to another authority: make one in a new folder; give every node both (cat old/ca.crt new/ca.crt) as
its tls_ca; then a certificate of the new one to each node; then the new ca.crt alone.
"""
_NODE = """
  tensorcache cert node gpu-7/ --ca ca/ --cluster prod --node gpu-7 --host 10.0.0.7 --host gpu-7.example
  tensorcache cert node gpu-7/ --ca ca/ --cluster prod --node gpu-7 --host 10.0.0.7 --renew

--cluster and --node are cluster and id under [node] in its tensorcache.toml: by them nodes know each
other. Hosts are for `tensorcache ring --at HOST:PORT`. A new key wants a new folder.
"""
_SHOW = """
  tensorcache cert show gpu-7/node.crt          # with node.key and ca.crt beside it: all that a node checks
  tensorcache cert show ca/ca.crt
  tensorcache cert show a.pem --key a-key.pem --ca both.pem
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    summary = "make and check the certificates of a cluster's nodes"
    cert = add_verb(verbs, "cert", summary=summary, examples=EXAMPLES)
    parts = cert.add_subparsers(dest="part", required=True, metavar="PART")
    ca = add_verb(parts, "ca", summary="make the authority of a cluster", examples=_CA)
    node = add_verb(parts, "node", summary="make a node's key and certificate", examples=_NODE)
    for parser, days in ((ca, 3650), (node, 365)):
        parser.add_argument("folder", type=path, metavar="DIR", help="where to write; never overwrites a key")
        parser.add_argument("--cluster", required=True, metavar="NAME", help="[node] cluster of its nodes")
        parser.add_argument(
            "--days", type=positive, default=days, metavar="N", help="until it ends (default %(default)s)"
        )
    node.add_argument("--ca", type=path, required=True, metavar="DIR", help="folder of `tensorcache cert ca`")
    node.add_argument("--node", required=True, metavar="ID", help="[node] id: its name on the ring")
    node.add_argument(
        "--host", action="append", default=[], metavar="HOST", help="name or address it is reached at; repeat"
    )
    node.add_argument("--renew", action="store_true", help="a new certificate for the key that is there")
    show = add_verb(parts, "show", summary="whose a certificate is, and if it is sound", examples=_SHOW)
    show.add_argument("file", type=path, metavar="FILE", help="one or more certificates, PEM")
    show.add_argument("--key", type=path, metavar="FILE", help="its key (default: FILE's name with .key)")
    show.add_argument("--ca", type=path, metavar="FILE", help="authorities (default: ca.crt beside FILE)")
    ca.set_defaults(handler=run_ca)
    node.set_defaults(handler=run_node)
    show.set_defaults(handler=run_show)


def run_ca(arguments: argparse.Namespace) -> int:
    """Make an authority."""
    from scripts.cert.issuing import make_authority

    certificate, key = make_authority(arguments.folder, cluster=arguments.cluster, days=arguments.days)
    say(f"authority    {certificate}  (give it to every node of cluster {arguments.cluster})")
    say(f"its key      {key}  (signs certificates: keep it off the nodes)")
    return 0


def run_node(arguments: argparse.Namespace) -> int:
    """Make a certificate, and say how to use it."""
    from scripts.cert.issuing import Wanted, make_node

    wanted = Wanted(arguments.cluster, arguments.node, tuple(arguments.host), arguments.days)
    made = make_node(arguments.folder, arguments.ca, wanted, renew=arguments.renew)
    say(f"certificate  {made.cert}")
    say(f"its key      {made.key}  (stays on this node)")
    say(f"authority    {made.ca}")
    say("")
    say("into this node's tensorcache.toml:")
    say("[cluster]")
    for name, file in (("tls_cert", made.cert), ("tls_key", made.key), ("tls_ca", made.ca)):
        say(f'{name} = "{_quoted(file)}"')
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Exit code 1 if something is wrong with it."""
    from scripts.cert.show import shown

    lines, wrong = shown(arguments.file, key=arguments.key, ca=arguments.ca)
    for line in lines:
        say(line)
    if wrong:
        raise RejectedError(f"{arguments.file}: {wrong}")
    return 0


def _quoted(file: str) -> str:
    """Inside a TOML string."""
    return file.replace("\\", "\\\\").replace('"', '\\"')
