"""`tensorcache verify`: run the load chain on a release without loading it."""

import argparse
from pathlib import Path

from scripts.arguments import Verbs, add_verb, path, positive
from scripts.console import say, show_table, size_text
from scripts.errors import UsageError
from scripts.refusals import engine_refusals

EXAMPLES = """
  tensorcache verify build/engine/smollm2 --key keys/release.pub
  tensorcache verify /models/smollm2 --key keys/release.pub --model smollm2 --min-release 3
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "verify", summary="check signature, name, age and every byte of a release", examples=EXAMPLES
    )
    parser.add_argument(
        "place", type=path, help="a release folder, or a model or version folder of a repository"
    )
    parser.add_argument(
        "--key", type=path, action="append", required=True, help="trusted public key; may be repeated"
    )
    parser.add_argument(
        "--model", help="the name it must be signed for (default: any; a model folder's own name)"
    )
    parser.add_argument("--min-release", type=positive, help="refuse an older release than this")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was verified, or exit 1 with the step that refused, what it expected and what it found."""
    from engines import TrustSettings, load_release, load_release_dir

    place, version, model = arguments.place, version_folder(arguments.place), arguments.model
    if version is not None and model is None:
        model = version.resolve().parent.name
    least = {model: arguments.min_release} if arguments.min_release and model else {}
    if arguments.min_release and not model:
        raise UsageError("--min-release needs --model: releases are counted per model")
    trust = TrustSettings(keys=tuple(arguments.key), min_release=least)
    with engine_refusals():
        if version is not None:
            release = load_release(version, model=model, trust=trust)
        else:
            release = load_release_dir(place, model=model, trust=trust)
    manifest = release.manifest
    rows = [(name, size_text(len(data))) for name, data in sorted(release.files.items())]
    show_table(
        f"{manifest.model} release {manifest.release} ({manifest.runtime}, {manifest.precision})",
        ("file", "size"),
        rows,
    )
    say(f"digest       {release.digest}")
    say(f"kv identity  {manifest.kv_identity}")
    say("verified     signature, name, age and the digest of every file")
    return 0


def version_folder(place: Path) -> Path | None:
    """`place` itself if it is a version folder, its newest version if it is a model's; None for a release."""
    if (place / "current").is_file():
        return place
    versions = [child for child in place.glob("*/current") if child.parent.name.isdigit()]
    return max(versions, key=lambda child: int(child.parent.name)).parent if versions else None
