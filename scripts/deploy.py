"""`tensorcache deploy`: make a signed release the current one of a model, whole or not at all."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.arguments import Verbs, add_verb, path
from scripts.backend_layout import write_model_config
from scripts.console import say, working
from scripts.refusals import engine_refusals
from scripts.repository import add_repository, repository_from
from scripts.served_release import server_from
from scripts.switching import WAITING, add_waiting, carry_out

if TYPE_CHECKING:
    from engines import Switch, TrustSettings

EXAMPLES = """
  tensorcache deploy smollm2 build/engine/smollm2                         # into the home build/run
  tensorcache deploy smollm2 build/engine/smollm2 --home /srv/llm --wait 120
  tensorcache deploy smollm2 build/engine/smollm2 --model-repo /models --key keys/release.pub
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs,
        "deploy",
        summary="make a signed release the current one of a model",
        examples=EXAMPLES + WAITING,
    )
    parser.add_argument("model", help="model name; the release must be signed for it")
    parser.add_argument("release", type=path, help="signed release folder")
    add_repository(parser)
    add_waiting(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify, copy, verify the copy, switch `current` by one rename, then say what serves."""
    model, repository = arguments.model, repository_from(arguments)
    version_dir = repository.version_dir(model)

    def change() -> "Switch":
        return _published(
            model,
            arguments.release,
            repository=repository.folder,
            version_dir=version_dir,
            trust=repository.trust,
        )

    carry_out(
        change,
        version_dir=version_dir,
        server=server_from(arguments, model),
        wait_s=arguments.wait,
        log=repository.log,
    )
    return 0


def publish(model: str, release: Path, *, repository: Path, keys: tuple[Path, ...]) -> str:
    """The digest that is current afterwards, for who lays out a repository without a server."""
    from engines import TrustSettings

    trust = TrustSettings(keys=keys)
    version_dir = repository / model / "1"
    return _published(model, release, repository=repository, version_dir=version_dir, trust=trust).digest


def _published(
    model: str, release: Path, *, repository: Path, version_dir: Path, trust: "TrustSettings"
) -> "Switch":
    """A model that is new to the repository gets its config.pbtxt."""
    from engines import publish_release

    with engine_refusals(), working(f"deploy {model}"):
        done = publish_release(release, version_dir, model=model, trust=trust)
    for written in write_model_config(repository, model):
        say(f"configured   {written}")
    return done
