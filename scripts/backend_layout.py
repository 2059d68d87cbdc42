"""Lays out what a Triton needs to serve: the backend's code, its node settings, the models' configuration.

<backends>/tensorcache/   model.py, backend/, engines/, cachemgr/; tensorcache.toml unless it lies elsewhere
<repository>/<model>/     config.pbtxt and the version folder 1/
"""

import importlib.util
import re
import shutil
from pathlib import Path

from cachemgr import complete_secrets
from scripts.errors import UsageError
from scripts.scratch import put_in_place, scratch_for
from scripts.whole_file import write_whole

PACKAGES = ("backend", "engines", "cachemgr")
BACKEND = "tensorcache"
TEMPLATES = Path(__file__).resolve().parent.parent / "model_repository"
TEMPLATE_MODEL = "smollm2"
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TIERS_BELOW = """
# Who may do what: README, "Who may do what". An acl.toml beside this file is obeyed without being named.
# [access]
# acl = "acl.toml"                   # made by: tensorcache acl new-key
# Tiers below, none unless configured: README, "Tiers below: Redis and a disk".
# [redis]
# url = "rediss://tensorcache-writer@redis.example:6379"   # the user that `tensorcache acl redis` makes
# password_file = "redis-passwords/tensorcache-writer"   # mode 0600
# ttl_s = 3600                       # after it was last read or offered
# [lmdb]
# path = "lmdb"                      # a folder on this node's own disk
# max_bytes = 34359738368            # of its files
# [log]
# level = "debug"                    # one line per prompt: what was where, at what cost, what was chosen
"""


def lay_out_backend(backends: Path) -> Path:
    """Copy the backend's code to `backends`/tensorcache; what else lies there (settings, keys) stays.

    All of it is copied before the first old folder is replaced: a full disk leaves the old backend whole.
    """
    destination = backends / BACKEND
    with scratch_for(destination, work="installation") as scratch:
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(_source_of(package), scratch / package, ignore=ignored)
        shutil.copyfile(_source_of("backend") / "model.py", scratch / "model.py")
        destination.mkdir(exist_ok=True)
        for package in PACKAGES:
            put_in_place(scratch / package, destination / package, scratch=scratch)
        (scratch / "model.py").replace(destination / "model.py")
    return destination


def _source_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"the package {package!r} is not installed: run `make setup`")
    return Path(next(iter(spec.submodule_search_locations)))


def write_node_config(
    config: Path, *, keys: tuple[Path, ...], cluster: str = "local", host_bytes: int | None = None
) -> list[Path]:
    """tensorcache.toml with public keys and secrets beside it; an existing file stays. The paths written."""
    written = complete_secrets(config.parent / "secrets")
    if config.exists():
        return written
    folder = config.parent / "keys"
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, key in enumerate(keys):
        if not key.is_file():
            raise UsageError(f"public key {key} is not a file")
        target = folder / (f"release-{number}.pub" if number else "release.pub")
        if not target.exists() or not target.samefile(key):
            write_whole(target, key.read_bytes())
        names.append(f'"keys/{target.name}"')
    text = (
        "# What this node trusts and where its secrets lie. Relative paths are relative to this file.\n"
        f'[node]\ncluster = "{cluster}"\nid = "node-1"\n\n'
        f"[trust]\nkeys = [{', '.join(names)}]\n\n"
        '[secrets]\ndir = "secrets"\n\n'
        f"[host]\n{'# ' if host_bytes is None else ''}bytes = {host_bytes or 1 << 30}\nttl_s = 3600\n"
    ) + _TIERS_BELOW
    write_whole(config, text.encode(), mode=0o600)
    return [*written, config]


def write_model_config(repository: Path, model: str, *, replace: bool = False) -> list[Path]:
    """config.pbtxt of a decoder and its facade `<model>_sync`, from the shipped ones; the paths written."""
    if not _MODEL_NAME.fullmatch(model):
        raise UsageError(
            f"a model name is letters, digits, '.', '_' and '-', up to 63 of them, got {model!r}"
        )
    written = []
    for suffix in ("", "_sync"):
        template = TEMPLATES / f"{TEMPLATE_MODEL}{suffix}" / "config.pbtxt"
        target = repository / f"{model}{suffix}" / "config.pbtxt"
        (target.parent / "1").mkdir(parents=True, exist_ok=True)
        if target.exists() and not replace:
            continue
        write_whole(target, template.read_text().replace(TEMPLATE_MODEL, model).encode())
        written.append(target)
    return written
