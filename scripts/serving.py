"""Starts a supervised Triton for the verbs that need one, and stops it whatever happens.

The serving home is a folder with backends/, model_repository/ and tensorcache.toml; Triton's log and its
admin key are written into it.
"""

import argparse
import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.arguments import add_address, address_from, path, seconds
from scripts.console import complain, say, working
from scripts.environment import inherited
from scripts.interruption import Interruption
from scripts.node_keys import ADMIN_KEY_FILE, ProbeKey, admin_key, probe_key
from scripts.plain_path import plain_path
from scripts.ports import require_free
from scripts.server_process import ServerProcess
from scripts.supervisor import Supervisor
from scripts.supervisor_contract import SupervisorSettings, Surroundings
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import (
    TritonAddress,
    TritonLaunch,
    find_triton,
    lay_out_python_backend,
    models_of,
    remove_leftovers,
    server_command,
    server_environment,
)

CONFIG: Final = "tensorcache.toml"


@dataclass(frozen=True, slots=True)
class Serving:
    """A Triton that is up: where it is, what it serves, and who looks after it."""

    address: TritonAddress
    models: tuple[str, ...]
    supervisor: Supervisor


def add_serving(parser: argparse.ArgumentParser) -> None:
    """The arguments of every verb that starts a Triton."""
    parser.add_argument(
        "--home", type=path, default=Path("build/run"), help="serving home (default %(default)s)"
    )
    parser.add_argument("--model", action="append", default=[], help="serve only this model; may be repeated")
    parser.add_argument(
        "--triton", type=path, help="a Triton installation (default: the one in nvidia-pytriton)"
    )
    parser.add_argument(
        "--pause-limit",
        type=seconds,
        default=SupervisorSettings().pause_limit_s,
        metavar="SECONDS",
        help="longest pause before what died again and again is brought back once more (default %(default)g)",
    )
    parser.add_argument(
        "--triton-flag",
        type=_flag,
        action="append",
        default=[],
        metavar="FLAG",
        help="one more flag for tritonserver, such as --triton-flag=--log-verbose=1; may be repeated",
    )
    add_address(parser)


def _flag(text: str) -> str:
    if not text.startswith("--"):
        raise argparse.ArgumentTypeError(f"a flag of tritonserver begins with --, got {text!r}")
    return text


@contextlib.contextmanager
def supervised(arguments: argparse.Namespace) -> Iterator[Serving]:
    """Bring Triton up, hand it over, and take it down on the way out, on errors, SIGINT and SIGTERM alike."""
    interruption = Interruption()
    interruption.install()
    with plain_path(arguments.home.resolve()) as home:
        require_free(address_from(arguments))
        launch = launch_from(arguments, home)
        settings = SupervisorSettings(pause_limit_s=arguments.pause_limit)
        key = probe_key(home / CONFIG)
        if key.credential is None:
            complain(f"probes go without a credential: {key.missing}")
        supervisor = _supervisor(
            launch, arguments.triton, key=key, settings=settings, interruption=interruption
        )
        try:
            with working(f"start Triton with {', '.join(launch.models)}"):
                supervisor.bring_up()
            yield Serving(address=launch.address, models=launch.models, supervisor=supervisor)
        finally:
            interruption.ignore()  # stopping has a limit of its own
            supervisor.shut_down()


def launch_from(arguments: argparse.Namespace, home: Path) -> TritonLaunch:
    """The start of a server that the arguments ask for, of the home at `home`, whose admin key is made."""
    return TritonLaunch(
        address=address_from(arguments),
        backends=home / "backends",
        model_repository=home / "model_repository",
        models=tuple(arguments.model) or models_of(arguments.home / "model_repository"),
        shm_prefix=f"tensorcache-{os.getpid()}-{secrets.token_hex(4)}_",
        log=home / "triton.log",
        config=home / CONFIG,
        admin_key=admin_key(home / ADMIN_KEY_FILE),
        more_flags=tuple(arguments.triton_flag),
    )


def _supervisor(
    launch: TritonLaunch,
    triton: Path | None,
    *,
    key: ProbeKey,
    settings: SupervisorSettings,
    interruption: Interruption,
) -> Supervisor:
    install = find_triton(triton)
    lay_out_python_backend(install, launch.backends)
    command = server_command(install, launch)
    environment = server_environment(install, inherited(), config=launch.config)
    return Supervisor(
        launch.models,
        start=lambda: ServerProcess(command, environment=environment, log=launch.log),
        cleanup=lambda users: remove_leftovers(launch.shm_prefix, users=users),
        control=TritonHttp(launch.address, admin_key=launch.admin_key, probe_key=key.credential),
        around=Surroundings(
            clock=time.monotonic, pause=interruption.pause, hold=interruption.hold, report=_report
        ),
        settings=settings,
    )


def _report(event: str) -> None:
    say(f"{time.strftime('%H:%M:%S')} {event}")
