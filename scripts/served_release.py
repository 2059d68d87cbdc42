"""Asks a running server which release answers, and watches it take up another one or refuse it.

The answer to a request names its release (output `release`); that a swap was refused is on the metrics page.
Requests made here are marked as probes, so they are kept out of request metrics.
"""

import argparse
import http.client
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from scripts.arguments import port
from scripts.node_keys import ProbeKey, probe_key
from scripts.repository import config_from
from scripts.server_log import ServerLog
from scripts.triton_http import TritonHttp
from scripts.triton_runtime import TritonAddress

SHORT = 16
"""Digits of a digest that answers and messages show."""

_ASK_S = 5.0
_POLL_S = 0.25
_PUT_OFF = "drain"
_NO_CONFIG = ProbeKey(missing="name the tensorcache.toml of that server with --config")
_REFUSALS = re.compile(r"tensorcache_swap_refusals_total\{([^}]*)\} ([0-9.e+]+)", re.ASCII)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def add_server(parser: argparse.ArgumentParser) -> None:
    """--url and --metrics-port: the server to ask what serves."""
    group = parser.add_argument_group("the server to ask which release serves")
    default = TritonAddress()
    group.add_argument(
        "--url",
        type=server_url,
        default=default,
        metavar="HOST:PORT",
        help=f"its HTTP endpoint (default {default.host}:{default.http_port})",
    )
    group.add_argument(
        "--metrics-port", type=port, metavar="PORT", help="of its metrics (default: that of --url plus 2)"
    )


def server_from(arguments: argparse.Namespace, model: str) -> "ServerView":
    """The view of `model` that the arguments name."""
    at: TritonAddress = arguments.url
    metrics = arguments.metrics_port or min(at.http_port + 2, 65535)
    config = config_from(arguments)
    key = _NO_CONFIG if config is None else probe_key(config)
    return ServerView(msgspec.structs.replace(at, metrics_port=metrics), model, key=key)


def server_url(text: str) -> TritonAddress:
    """HOST:PORT, with or without http://."""
    match = re.fullmatch(r"(?:http://)?([A-Za-z0-9._-]+):([0-9]{1,5})/?", text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return TritonAddress(host=match[1], http_port=int(match[2]))


@dataclass(frozen=True, slots=True)
class Served:
    """What a server said. `release`: the first digits of the digest; "" if it told none, `reason` says why.

    `reachable` False: nothing answers there. `loaded` False: the server is there and does not have the model.
    """

    release: str = ""
    reason: str = ""
    reachable: bool = True
    loaded: bool = True


class ServerView:
    """One model on one server, from outside."""

    def __init__(self, address: TritonAddress, model: str, *, key: ProbeKey) -> None:
        """`address`: its HTTP and metrics ports are used. `key`: what it is shown."""
        self.url = f"{address.client_host}:{address.http_port}"
        self._http = TritonHttp(address, probe_key=key.credential)
        self._model = model
        self._key = key

    def ask(self) -> Served:
        """Ask for one token and see who gives it."""
        try:
            ready = self._http.call("GET", f"/v2/models/{self._model}/ready", limit_s=_ASK_S)
            if ready.status != 200:
                return Served(reason=f"{self._model} is not loaded there", loaded=False)
            answer = self._http.ask_for_token(self._model, limit_s=_ASK_S)
        except TimeoutError:
            return Served(reason=f"no answer within {_ASK_S:g} s")
        except (OSError, http.client.HTTPException):
            return Served(reason="no server answers", reachable=False)
        if answer.denied:
            return Served(reason=self._key.hint)
        release = _release_in(answer.body)
        return Served(release) if release else Served(reason=f"{answer.error} ({answer.status})")

    def swap_is_off(self) -> bool:
        """Whether the model's configuration says that a new release waits for the next load."""
        try:
            answer = self._http.call("GET", f"/v2/models/{self._model}/config")
            parameters = json.loads(answer.body).get("parameters", {})
            return bool(parameters.get("swap", {}).get("string_value") == "off")
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            return False

    def refusals(self) -> "Counter[str]":
        """How often a swap of the model was refused, by the check that did; without those merely put off."""
        counted: Counter[str] = Counter()
        for labels, value in _REFUSALS.findall(self._http.metrics()):
            named = dict(_LABEL.findall(labels))
            if named.get("model") == self._model and named.get("reason", _PUT_OFF) != _PUT_OFF:
                counted[named["reason"]] += int(float(value))
        return counted


@dataclass(frozen=True, slots=True)
class Outcome:
    """How waiting ended: it `serves`, it was `refused` (why), or neither: not yet, or `put_off` (why)."""

    seconds: float
    last: Served
    serves: bool = False
    refused: str = ""
    put_off: str = ""


class Watch:
    """Waits until a server answers with a release, or refuses it. Made before `current` moves.

    The log tells which release was refused, and why; without one (or with that of another server) all there
    is to go by is that the server counts one more refusal, and its check.
    """

    def __init__(
        self,
        server: ServerView,
        log: ServerLog,
        *,
        clock: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        self.server = server
        self._log = log
        self._clock = clock
        self._pause = pause
        self._before = server.refusals()
        self._unexplained = False

    def wait(self, digest: str, *, limit_s: float, wanted: Callable[[], bool] = lambda: True) -> Outcome:
        """Until it answers with `digest`, refuses it, `limit_s` is over, or it is no longer `wanted`."""
        started = self._clock()
        while True:
            last = self.server.ask()
            seconds = self._clock() - started
            if last.release and digest.startswith(last.release):
                return Outcome(seconds, last, serves=True)
            refused = self._refusal(digest)
            if refused:
                return Outcome(seconds, last, refused=refused)
            if seconds >= limit_s or not wanted():
                return Outcome(seconds, last, put_off=self._put_off(digest))
            self._pause(min(_POLL_S, limit_s - seconds))

    def _put_off(self, digest: str) -> str:
        ours = [one.text for one in self._log.put_off() if digest.startswith(one.release)]
        return ours[-1] if ours else ""

    def _refusal(self, digest: str) -> str:
        logged = self._log.refusals()
        ours = [one.text for one in logged if digest.startswith(one.release)]
        if ours:
            return ours[-1]
        counted = self.server.refusals() - self._before
        if logged or not counted:
            return ""  # none, or of releases that others made current meanwhile
        if not self._unexplained:
            self._unexplained = True  # its line may be on its way: look once more
            return ""
        return f"check {next(iter(counted))!r} (its log has the line)"


def _release_in(body: bytes) -> str:
    try:
        decoded = json.loads(body)
    except ValueError:
        return ""
    found = decoded.get("release", "") if isinstance(decoded, dict) else ""
    return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{8,64}", found) else ""
