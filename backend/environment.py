"""The one place where the backend reads the process environment."""

import os
from collections.abc import Mapping
from pathlib import Path

CONFIG_VARIABLE = "TENSORCACHE_CONFIG"
CONFIG_FILE = "tensorcache.toml"


def config_path(beside: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the node's settings are: $TENSORCACHE_CONFIG, else tensorcache.toml in the folder `beside`."""
    chosen = environ.get(CONFIG_VARIABLE, "")
    return Path(chosen) if chosen else beside / CONFIG_FILE
