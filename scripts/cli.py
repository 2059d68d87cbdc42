"""The `tensorcache` command: one verb per file, put together here."""

import argparse
import sys
from collections.abc import Sequence

from scripts import (
    bench,
    benchmarks,
    build,
    demo,
    deploy,
    install,
    keygen,
    probe,
    run,
    secret,
    serve,
    sign,
    verify,
)
from scripts.console import complain
from scripts.errors import CommandError

VERBS = (build, keygen, sign, verify, deploy, install, secret, serve, probe, demo, run, benchmarks)


def parser() -> argparse.ArgumentParser:
    """The whole command line; each verb adds itself and sets `handler`."""
    top = argparse.ArgumentParser(
        prog="tensorcache", description="Build, sign, deploy, serve and check TensorCache engines on Triton."
    )
    verbs = top.add_subparsers(title="verbs", dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_parser(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; its exit code. Errors a user can act on are one line, never a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:  # its options are its own
        return bench.main(words[1:])
    arguments = parser().parse_args(words)
    try:
        return int(arguments.handler(arguments))
    except CommandError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
