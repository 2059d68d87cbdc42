"""Where a model's releases lie, and whose signatures and which age are accepted: arguments, defaults.

A serving home has both: HOME/model_repository and HOME/tensorcache.toml, whose [trust] table is the one that
the server itself goes by. For another Triton, name the two: --model-repo with --config, or with --key.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.arguments import path
from scripts.errors import UsageError

if TYPE_CHECKING:
    from engines import TrustSettings

DEFAULT_HOME = Path("build/run")
LOG = "triton.log"


@dataclass(frozen=True, slots=True)
class Repository:
    """A Triton model repository; `log` is where its server's messages are, if it is a serving home's."""

    folder: Path
    trust: "TrustSettings"
    log: Path | None

    def version_dir(self, model: str) -> Path:
        """The version folder of `model`: the newest that has a current release, else the first."""
        from engines.manifest import MODEL_NAME, MODEL_NAME_RULE

        if not MODEL_NAME.fullmatch(model):
            raise UsageError(f"model: must be {MODEL_NAME_RULE}, got {model!r}")
        return version_folder(self.folder / model) or self.folder / model / "1"


def add_repository(parser: argparse.ArgumentParser) -> None:
    """--home, or --model-repo; --config, --key."""
    group = parser.add_argument_group("where releases lie, and whom to trust")
    group.add_argument(
        "--home",
        type=path,
        default=DEFAULT_HOME,
        help="serving home: model_repository/ and tensorcache.toml (default %(default)s)",
    )
    group.add_argument("--model-repo", type=path, help="Triton's model repository, instead of a home's")
    group.add_argument(
        "--config", type=path, help="tensorcache.toml with the [trust] to go by (default: the home's)"
    )
    group.add_argument(
        "--key", type=path, action="append", help="trusted public key, instead of the config's; repeatable"
    )


def repository_from(arguments: argparse.Namespace) -> Repository:
    """What the arguments name. UsageError if it is not there."""
    at_home = arguments.model_repo is None
    folder: Path = arguments.home / "model_repository" if at_home else arguments.model_repo
    if not folder.is_dir():
        hint = " (name a serving home with --home, or a repository with --model-repo)" if at_home else ""
        raise UsageError(f"model repository {folder} is not a folder{hint}")
    log = arguments.home / LOG if at_home else None
    return Repository(folder, trust_from(arguments), log)


def trust_from(arguments: argparse.Namespace) -> "TrustSettings":
    """Keys and lowest releases: of the config, with --key instead of its keys."""
    from engines import TrustSettings

    config = config_from(arguments)
    keys, least = tuple(arguments.key or ()), {}
    if config is not None:
        from backend.settings import read_node_settings

        trust = read_node_settings(config).trust
        keys, least = keys or trust.keys, trust.min_release
    if not keys:
        raise UsageError("no key to trust: name one with --key, or a tensorcache.toml with --config")
    return TrustSettings(keys=keys, min_release=least)


def config_from(arguments: argparse.Namespace) -> Path | None:
    """The tensorcache.toml that the arguments name, or the home's; None if there is none."""
    if arguments.config is not None:
        given: Path = arguments.config
        return given
    beside: Path = arguments.home / "tensorcache.toml"
    return beside if arguments.model_repo is None and beside.exists() else None


def version_folder(place: Path) -> Path | None:
    """`place` itself if it is a version folder, its newest version if it is a model's; None for a release."""
    if (place / "current").is_file():
        return place
    versions = [child for child in place.glob("*/current") if child.parent.name.isdigit()]
    return max(versions, key=lambda child: int(child.parent.name)).parent if versions else None
