"""`tensorcache rollback`: make an earlier release of a model the current one again."""

import argparse
from typing import TYPE_CHECKING

from scripts.arguments import Verbs, add_verb
from scripts.console import working
from scripts.refusals import engine_refusals
from scripts.repository import add_repository, repository_from
from scripts.served_release import server_from
from scripts.switching import WAITING, add_waiting, carry_out

if TYPE_CHECKING:
    from engines import Switch

EXAMPLES = """
  tensorcache rollback smollm2                     # to what was current before; once more comes back
  tensorcache rollback smollm2 --to 3              # to release number 3
  tensorcache rollback smollm2 --to 9f86d081884c   # to the release whose digest begins like this
"""


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    parser = add_verb(
        verbs,
        "rollback",
        summary="make an earlier release the current one again, after it passed every check anew",
        examples=EXAMPLES + WAITING,
    )
    parser.add_argument("model", help="model name")
    parser.add_argument(
        "--to", metavar="DIGEST|NUMBER", help="which release (default: the one that was current before)"
    )
    add_repository(parser)
    add_waiting(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Choose, verify, switch `current` by one rename, then say what serves."""
    from engines import roll_back

    model, repository = arguments.model, repository_from(arguments)
    version_dir = repository.version_dir(model)

    def change() -> "Switch":
        with engine_refusals(), working(f"roll {model} back"):
            return roll_back(version_dir, model=model, trust=repository.trust, to=arguments.to)

    carry_out(
        change,
        version_dir=version_dir,
        server=server_from(arguments, model),
        wait_s=arguments.wait,
        log=repository.log,
    )
    return 0
