"""Answers what an admin says: {"command": "public.add", "name": "handbook"}, with the prompt beside it.

    public.add       make the beginning of prompts public, given as text_input, messages or input_ids
    public.list      what is public
    public.remove    make it private again
    namespaces       how many blocks each namespace holds, and what it may hold
    hot              segments that are read most, and how often
    whoami           who asks, and what they may do

Threads: the server's.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from backend.access import Caller
from backend.admin.contract import ADMIN_PARAMETER
from backend.admin.public_prefixes import PublicPrefixes
from backend.asked import Inputs
from backend.errors import InvalidRequest, Overloaded
from backend.open_release import OpenRelease
from backend.strict_json import read_json
from cachemgr import NamespaceShare

MAX_COMMAND_CHARACTERS: Final = 4096
Answer = dict[str, Any]

_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "public.add": frozenset({"name"}),
    "public.list": frozenset(),
    "public.remove": frozenset({"name"}),
    "namespaces": frozenset(),
    "hot": frozenset(),
    "whoami": frozenset(),
}
_COMMAND: Final = "command"


class AdminDesk:
    """An Administrator: see its contract."""

    def __init__(
        self,
        public: PublicPrefixes,
        *,
        shares: Callable[[], Mapping[str, NamespaceShare]] = dict,
        hot: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`shares`: what each namespace may hold now. `hot`: reads per second by segment, in hex."""
        self._public = public
        self._shares = shares
        self._hot = hot

    def answer(self, caller: Caller, command: object, inputs: Inputs, release: OpenRelease | None) -> str:
        """See Administrator."""
        said = _read(command)
        match said[_COMMAND]:
            case "public.add":
                found = self._add(said["name"], caller, inputs, _serving(release))
            case "public.list":
                found = self._list()
            case "public.remove":
                self._public.remove(said["name"])
                found = {"removed": said["name"]}
            case "namespaces":
                found = self._namespaces(_serving(release))
            case "hot":
                found = {"hot": dict(self._hot())}
            case _:
                found = _describe(caller)
        return json.dumps(found, ensure_ascii=False)

    def _add(self, name: str, caller: Caller, inputs: Inputs, release: OpenRelease) -> Answer:
        tokens = release.read_prefix(inputs)
        size = release.spec.block_tokens
        blocks = len(tokens) // size
        if not blocks:
            raise InvalidRequest(
                "prompt", f"must have at least {size} tokens, one block, since only whole ones are shared",
                len(tokens),
            )  # fmt: skip
        added = self._public.add(name, tokens, by=caller.principal)
        return {"name": name, "tokens": len(tokens), "blocks": blocks, "added": added}

    def _list(self) -> Answer:
        return {
            "public": [
                {
                    "name": prefix.name,
                    "tokens": len(prefix.tokens),
                    "registered": prefix.registered.isoformat(timespec="seconds"),
                    "by": prefix.by,
                }
                for prefix in self._public.registered()
            ]
        }

    def _namespaces(self, release: OpenRelease) -> Answer:
        used = dict(release.cache.usage())
        others = used.pop("", 0)
        held = {
            name: {"blocks": used.get(name, 0), "quota": share.quota, "min_share": share.min_share}
            for name, share in sorted(self._shares().items())
        }
        return {"namespaces": held, "others": others}


def _describe(caller: Caller) -> Answer:
    allowance = caller.allowance
    return {
        "principal": caller.principal,
        "key": caller.key_id,
        "namespace": caller.namespace,
        "verbs": sorted(caller.verbs),
        "requests_per_s": allowance.requests_per_s,
        "tokens_per_s": allowance.tokens_per_s,
        "concurrent": allowance.concurrent,
        "hide_cached_tokens": caller.hides_cached_tokens,
    }


def _serving(release: OpenRelease | None) -> OpenRelease:
    if release is None:
        raise Overloaded("no release serves at the moment; try again soon")
    return release


def _read(command: object) -> dict[str, str]:
    """The command, with its fields and no others; all of them are texts. Raises InvalidRequest."""
    if not isinstance(command, str):
        raise InvalidRequest(ADMIN_PARAMETER, "must be text, a JSON object", command)
    if len(command) > MAX_COMMAND_CHARACTERS:
        raise InvalidRequest(
            ADMIN_PARAMETER, f"must have at most {MAX_COMMAND_CHARACTERS} characters", len(command)
        )
    said = read_json(command, field=ADMIN_PARAMETER)
    if not isinstance(said, dict):
        raise InvalidRequest(ADMIN_PARAMETER, "must be a JSON object", said)
    name = said.get(_COMMAND)
    fields = _FIELDS.get(name) if isinstance(name, str) else None
    if fields is None:
        raise InvalidRequest(f"{ADMIN_PARAMETER}.{_COMMAND}", f"must be one of {', '.join(_FIELDS)}", name)
    for key in said.keys() - fields - {_COMMAND}:
        known = ", ".join(sorted(fields)) or "no field"
        raise InvalidRequest(f"{ADMIN_PARAMETER}.{key}", f"is not known; {name} has {known}")
    for key in sorted(fields):
        if not isinstance(said.get(key), str):
            raise InvalidRequest(f"{ADMIN_PARAMETER}.{key}", "must be given, as text", said.get(key))
    return said
