"""`tensorcache deploy`: publish a signed release as the current one of a model in a Triton repository."""

import argparse
from pathlib import Path

from scripts.arguments import Verbs, add_verb, path
from scripts.backend_layout import write_model_config
from scripts.console import say, working
from scripts.errors import UsageError
from scripts.refusals import engine_refusals

EXAMPLES = """
  tensorcache deploy smollm2 build/engine/smollm2 --model-repo /models --key keys/release.pub
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "deploy", summary="publish a signed release into a Triton model repository", examples=EXAMPLES
    )
    parser.add_argument("model", help="model name; the release must be signed for it")
    parser.add_argument("release", type=path, help="signed release folder")
    parser.add_argument("--model-repo", type=path, required=True, help="Triton's model repository")
    parser.add_argument(
        "--key", type=path, action="append", required=True, help="trusted public key; may be repeated"
    )
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify, copy, verify the copy, then switch `current` by one rename."""
    repository: Path = arguments.model_repo
    if not repository.is_dir():
        raise UsageError(f"model repository {repository} is not a folder")
    digest = publish(arguments.model, arguments.release, repository=repository, keys=tuple(arguments.key))
    say(f"published    {repository / arguments.model / '1'} → {digest}")
    return 0


def publish(model: str, release: Path, *, repository: Path, keys: tuple[Path, ...]) -> str:
    """The digest that is current afterwards. A model that is new to the repository gets its config.pbtxt."""
    from engines import TrustSettings, publish_release

    with engine_refusals(), working(f"deploy {model}"):
        trust = TrustSettings(keys=keys)
        digest = publish_release(release, repository / model / "1", model=model, trust=trust).digest
    for written in write_model_config(repository, model):
        say(f"configured   {written}")
    return digest
