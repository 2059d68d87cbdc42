"""The `tensorcache` command: one verb per file, put together here."""

import argparse
import os
import sys
from collections.abc import Sequence

from scripts import (
    acl,
    bench,
    benchmarks,
    build,
    cert,
    cluster,
    demo,
    deploy,
    install,
    keygen,
    probe,
    public,
    releases,
    ring,
    rollback,
    run,
    secret,
    serve,
    sign,
    simulate,
    verify,
)
from scripts.console import complain
from scripts.environment import forbid_telemetry, keep_grpc_quiet
from scripts.errors import CommandError
from scripts.refusals import one_line_errors

VERBS = (
    build, keygen, sign, verify, deploy, rollback, releases, install, secret, serve, probe, demo, run,
    benchmarks, cluster, ring, cert, acl, public, simulate,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The whole command line; each verb adds itself and sets `handler`."""
    top = argparse.ArgumentParser(
        prog="tensorcache", description="Build, sign, deploy, serve and check TensorCache engines on Triton."
    )
    top.add_argument("--debug", action="store_true", help="show where an error came from")
    verbs = top.add_subparsers(title="verbs", dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_parser(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; its exit code. Errors a user can act on are one line, a traceback only with --debug."""
    words = list(sys.argv[1:] if argv is None else argv)
    forbid_telemetry()
    keep_grpc_quiet()
    try:
        if words[:1] == ["bench"]:  # its options are its own
            return bench.main(words[1:])
        arguments = parser().parse_args(words)
        with one_line_errors(debug=arguments.debug):
            return int(arguments.handler(arguments))
    except CommandError as error:
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # who read our output has gone, as in `tensorcache … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
