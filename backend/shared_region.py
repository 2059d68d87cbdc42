"""The memory that Triton's server shares with this process: requests, prompts, credentials, answers.

Triton makes it readable for every user of the machine, whatever the umask. Its processes keep it mapped, and
opened it before this one began to load a model: taking the right to read from others costs them nothing.
"""

import logging
import os
import stat
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_STUB: Final = b"triton_python_backend_stub"
_REGION_ARGUMENT: Final = 2  # program, model.py, region, sizes, …


def keep_region_private(
    command_line: Path = Path("/proc/self/cmdline"), folder: Path = Path("/dev/shm")
) -> None:
    """Let nobody else open it from now on. Never raises: a server that does it otherwise still serves."""
    try:
        words = command_line.read_bytes().split(b"\0")
        if len(words) <= _REGION_ARGUMENT or not words[0].endswith(_STUB):
            return  # no stub of Triton's
        name = os.fsdecode(words[_REGION_ARGUMENT]).lstrip("/")
        region = os.open(folder / Path(name).name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(region, stat.S_IRUSR | stat.S_IWUSR)
        finally:
            os.close(region)
    except OSError as error:
        log.warning("other users of this machine may read what Triton shares with its models: %s", error)
