"""What an existing tensorcache.toml says other than the arguments that it is kept in spite of."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.errors import UsageError


def untrusted_keys(config: Path, keys: Sequence[Path]) -> list[Path]:
    """Those of `keys` that `config` does not trust: keys are compared, not the names of files."""
    from engines import key_fingerprints

    named = _table(_read(config), "trust").get("keys", [])
    trusted = key_fingerprints(
        [config.parent / str(name) for name in named] if isinstance(named, list) else []
    )
    return [path for mark, path in key_fingerprints(keys).items() if mark not in trusted]


def host_bytes_of(config: Path) -> int | None:
    """The bound of the host tier in `config`, None where it leaves it to the node."""
    found = _table(_read(config), "host").get("bytes")
    return found if isinstance(found, int) else None


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{config}: {error}") from None


def _table(settings: dict[str, Any], name: str) -> dict[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}
