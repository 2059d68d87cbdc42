"""Whom this node trusts to make engine releases, and how old a release may be.

Invariants
- No key means no trust: with `keys` empty every release is refused; there is no switch that turns the check
  off.
- These settings come from the node's own file, never from a model's configuration: whoever may load a model
  could otherwise name the key that its release is checked with.
"""

from pathlib import Path

import msgspec


class TrustSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`keys`: PEM files with EC public keys (P-256, P-384, P-521), any of which may have signed a release.

    `min_release`: the lowest acceptable `release` number by model name; a model that is not named accepts
    any. Raise it after a release turned out to be bad, so that nobody can bring the old one back.
    """

    keys: tuple[Path, ...] = ()
    min_release: dict[str, int] = {}
