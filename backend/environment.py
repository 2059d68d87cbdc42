"""The one place where the backend reads the process environment, and sets what a library looks for there."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

CONFIG_VARIABLE = "TENSORCACHE_CONFIG"
CONFIG_FILE = "tensorcache.toml"


def config_path(beside: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the node's settings are: $TENSORCACHE_CONFIG, else tensorcache.toml in the folder `beside`."""
    chosen = environ.get(CONFIG_VARIABLE, "")
    return Path(chosen) if chosen else beside / CONFIG_FILE


def forbid_telemetry(environ: MutableMapping[str, str] = os.environ) -> None:
    """ONNX Runtime notes each start in its user's home, to report it, unless told before its import."""
    environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def keep_grpc_quiet(environ: MutableMapping[str, str] = os.environ) -> None:
    """Strangers whose handshakes fail would fill the log with a line of gRPC each, unless told before."""
    environ.setdefault("GRPC_VERBOSITY", "ERROR")
