"""Lays out a serving home per node: backend, release, settings; release key and secrets are one for all.

<home>/keys/, secrets/   shared: what one node seals, the others open
<home>/<node>/           backends/, model_repository/, tensorcache.toml; cluster/ with the ring it keeps

Invariants
- Settings are written anew each time: they follow from the plan.
- The ring that nodes keep on disk belongs to the members it was made of. With other members, or at other
  ports, the cluster is a new one and its first ring is made anew; blocks in the arenas stay.
"""

import json
import os
import shutil
import tomllib
from pathlib import Path

from cachemgr import complete_secrets
from scripts.backend_layout import lay_out_backend, write_model_config
from scripts.cluster.plan import ClusterPlan, NodePlan
from scripts.deploy import publish
from scripts.errors import UsageError
from scripts.whole_file import write_whole

ARENAS = Path("/dev/shm")
_STATE = "cluster"

LOOKUP_S = 0.5


def lay_out_cluster(plan: ClusterPlan) -> None:
    """Make or renew the homes of all nodes. UsageError for a key that is not there or too little memory."""
    if not plan.key.is_file():
        raise UsageError(f"public key {plan.key} is not a file: run `make sign`, or see --key")
    require_room(plan)
    (plan.home / "keys").mkdir(parents=True, exist_ok=True)
    write_whole(plan.home / "keys" / "release.pub", plan.key.read_bytes())
    complete_secrets(plan.home / "secrets")
    changed = [_write_settings(plan, node) for node in plan.nodes]
    for node in plan.nodes:
        if any(changed):
            shutil.rmtree(node.home / _STATE, ignore_errors=True)
        lay_out_backend(node.home / "backends")
        _lay_out_model(plan, node.home / "model_repository")


def require_room(plan: ClusterPlan, folder: Path = ARENAS) -> None:
    """UsageError if the host tiers of all nodes do not fit; the arenas they have already count as room."""
    space = os.statvfs(folder)
    held = sum(arena.stat().st_size for node in plan.nodes for arena in arenas_of(plan, node, folder))
    room, need = space.f_bavail * space.f_frsize + held, plan.count * plan.host_bytes
    if need > room:
        raise UsageError(
            f"{plan.count} nodes with {plan.host_bytes} bytes each do not fit into the {room} bytes free in "
            f"{folder}: use fewer --nodes, or --host-bytes {room // plan.count}"
        )


def arenas_of(plan: ClusterPlan, node: NodePlan, folder: Path = ARENAS) -> list[Path]:
    """The arena files that a node left or uses."""
    return sorted(folder.glob(f"tensorcache_{plan.cluster}_{node.id}_*"))


def settings_text(plan: ClusterPlan, node: NodePlan) -> str:
    """tensorcache.toml of one node. A JSON string is a TOML string."""
    members = "".join(
        f"    {{id = {json.dumps(member.id)}, address = {json.dumps(member.control)}}},\n"
        for member in plan.nodes
    )
    return (
        "# Written by `tensorcache cluster`: changes are lost when it lays out the cluster again.\n"
        f"[node]\ncluster = {json.dumps(plan.cluster)}\nid = {json.dumps(node.id)}\n\n"
        '[trust]\nkeys = ["../keys/release.pub"]\n\n'
        '[secrets]\ndir = "../secrets"\n\n'
        f"[host]\nbytes = {plan.host_bytes}\nttl_s = 3600\n\n"
        f"[cluster]\nlisten = {json.dumps(node.control)}\nmembers = [\n{members}]\n"
        f"lookup_s = {LOOKUP_S}  # these servers share the processors of one machine\n"
    )


def _write_settings(plan: ClusterPlan, node: NodePlan) -> bool:
    """True if it is in another cluster than before: the ring that it kept is that one's."""
    node.home.mkdir(parents=True, exist_ok=True)
    path = node.home / "tensorcache.toml"
    text = settings_text(plan, node)
    before = path.read_text() if path.exists() else ""
    if before != text:
        write_whole(path, text.encode(), mode=0o600)
    return _cluster_of(before) != _cluster_of(text)


def _cluster_of(settings: str) -> tuple[object, ...]:
    """Name of the cluster, where the node listens, who the members are."""
    told = tomllib.loads(settings)
    cluster = told.get("cluster", {})
    return told.get("node", {}).get("cluster"), cluster.get("listen"), str(cluster.get("members"))


def _lay_out_model(plan: ClusterPlan, repository: Path) -> None:
    publish(plan.model, plan.release, repository=repository, keys=(plan.key,))
    write_model_config(repository, plan.model, replace=True)
    config = repository / plan.model / "config.pbtxt"
    added = "".join(
        f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}\n"
        for key, value in plan.parameters.items()
    )
    write_whole(config, (config.read_text() + added).encode())
