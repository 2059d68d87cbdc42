"""`tensorcache verify`: run the load chain on a release without loading it."""

import argparse

import msgspec

from scripts.arguments import Verbs, add_verb, path, positive
from scripts.console import say, show_table, size_text
from scripts.errors import UsageError
from scripts.refusals import engine_refusals
from scripts.repository import add_repository, repository_from, trust_from, version_folder
from scripts.served_release import add_server, server_from
from scripts.verify_running import verify_running

EXAMPLES = """
  tensorcache verify build/engine/smollm2 --key keys/release.pub
  tensorcache verify /models/smollm2 --key keys/release.pub --model smollm2 --min-release 3
  tensorcache verify --running smollm2 --rate 50    # what a server serves, from the home build/run
"""
DEFAULT_RATE = 100


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs, "verify", summary="check signature, name, age and every byte of a release", examples=EXAMPLES
    )
    parser.add_argument(
        "place",
        help="a release folder, or a model or version folder of a repository; with --running a model's name",
    )
    parser.add_argument(
        "--running", action="store_true", help="read the folder of the release that a server serves now"
    )
    parser.add_argument(
        "--rate",
        type=positive,
        default=DEFAULT_RATE,
        metavar="MB/S",
        help="read no faster than this, with --running (default %(default)s)",
    )
    parser.add_argument(
        "--model", help="the name it must be signed for (default: any; a model folder's own name)"
    )
    parser.add_argument("--min-release", type=positive, help="refuse an older release than this")
    add_repository(parser)
    add_server(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was verified, or exit 1 with the step that refused, what it expected and what it found."""
    if arguments.running:
        verify_running(
            arguments.place,
            repository=repository_from(arguments),
            server=server_from(arguments, arguments.place),
            bytes_per_s=arguments.rate * 1e6,
        )
        return 0
    return _verify_place(arguments)


def _verify_place(arguments: argparse.Namespace) -> int:
    from engines import load_release, load_release_dir

    place = path(arguments.place)
    version, model = version_folder(place), arguments.model
    if version is not None and model is None:
        model = version.resolve().parent.name
    trust = trust_from(arguments)
    if arguments.min_release and not model:
        raise UsageError("--min-release needs --model: releases are counted per model")
    if arguments.min_release:
        least = {**trust.min_release, model: arguments.min_release}
        trust = msgspec.structs.replace(trust, min_release=least)
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
