"""A swapper over fake engines: what is opened, when, and what fails in it is in the test's hand."""

import dataclasses
import threading
from types import SimpleNamespace

import numpy as np

from backend.access import open_access
from backend.admin import NoCommands
from backend.process import Process
from backend.service import DecoderService
from backend.settings import ModelSettings
from backend.swapper import Swapper, SwapSettings
from engines import ReleaseError, current_digest, shares_kv
from tests.backend.doubles import EOS, DictCache, FakeEngine, NumberText
from tests.backend.swap_rig import SwapCaller
from tests.backend.test_metrics import Recorded
from tests.waiting import wait_until

WAIT_S = 20.0


class Words:
    """A text model that knows numbers only."""

    eos_token_ids = (EOS,)
    has_chat_template = False

    def decode(self, ids):
        return ""

    def stream(self, stop_words=(), *, min_tokens=0):
        return NumberText()


class HeldEngine(FakeEngine):
    """Decodes only when it may, or after `patience` seconds where that is set."""

    def __init__(self, digest: str, *, identity: bytes, lanes: int) -> None:
        super().__init__(lanes=lanes)
        self.spec = dataclasses.replace(self.spec, digest=digest, kv_identity=identity)
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.patience: float | None = None

    def decode(self, lanes, tokens, positions):
        self.entered.set()
        assert self.go.wait(self.patience or WAIT_S) or self.patience
        return super().decode(lanes, tokens, positions)


class Opener:
    """Opens fake engines for the digests in `identities`; `before` may wait or raise."""

    def __init__(self, version_dir, process, *, lanes: int) -> None:
        self.version_dir = version_dir
        self.process = process
        self.lanes = lanes
        self.identities = {letter * 64: letter.encode() * 16 for letter in "abcd"}
        self.identities["b" * 64] = self.identities["a" * 64]  # the same KV
        self.opened: list[HeldEngine] = []
        self.before = lambda digest: None

    def current(self, *, beside, run):
        return self._open(current_digest(self.version_dir), beside, run)

    def published(self, digest, *, run):
        return self._open(digest, None, run)

    def _open(self, digest, beside, run):
        self.before(digest)
        if digest not in self.identities:
            raise ReleaseError("digest", expected="a known release", found=digest[:4])
        assert beside is not None or all(engine.closed for engine in self.opened), "two engines in memory"
        engine = HeldEngine(digest, identity=self.identities[digest], lanes=self.lanes)
        self.opened.append(engine)
        try:
            for _ in range(3):
                run(lambda: None)
        except BaseException:
            engine.close()
            raise
        shared = beside is not None and shares_kv(engine.spec, beside.spec)
        return self.process.assemble(
            engine,
            beside.cache if shared else DictCache(),
            text=Words(),
            stepper=beside.stepper if shared else None,
        )


class DoubleRig:
    """A service whose releases are letters."""

    def __init__(self, folder, *, lanes=2, **settings) -> None:
        self.folder = folder
        self.point("a")
        self.recorded = Recorded()
        chosen = ModelSettings(**{"swap_poll_s": 0.05, "lane_ttl_s": 0.0, **settings})
        self.process = Process.around(chosen, self.recorded, {"model": "m"}, forwarded_headers=frozenset())
        self.opener = Opener(folder, self.process, lanes=lanes)
        serving = self.opener.current(beside=None, run=lambda job: job())
        self.loop, self.admission, watchdog = self.process.start_serving(
            serving, open_access("m"), NoCommands()
        )
        self.swapper = Swapper(
            serving, folder, settings=SwapSettings(chosen.swap, chosen.swap_poll_s, chosen.drain_s),
            opener=self.opener, loop=self.loop, admission=self.admission, metrics=self.process.metrics,
        )  # fmt: skip
        self.service = DecoderService(
            serving, loop=self.loop, admission=self.admission, replies=self.process.replies,
            watchdog=watchdog, drain_s=chosen.drain_s, swapper=self.swapper,
        )  # fmt: skip

    @property
    def engine(self) -> HeldEngine:
        return self.opener.opened[-1]

    def point(self, letter: str) -> None:
        """`current` names this release, by rename."""
        beside = self.folder / ".current"
        beside.write_text(letter * 64 + "\n")
        beside.replace(self.folder / "current")

    def serves(self, letter: str) -> bool:
        return self.service.release == letter * 64

    def wait_for(self, letter: str) -> None:
        wait_until(lambda: self.serves(letter))

    def start(self, prompt, *, max_tokens=8, timeout_us=0) -> SwapCaller:
        caller = SwapCaller()
        inputs = {
            "input_ids": np.array(prompt, np.int32), "max_tokens": np.array([max_tokens], np.int32),
            "stream": np.array([True]), "ignore_eos": np.array([True]),
        }  # fmt: skip
        parameters = {"timeout": timeout_us} if timeout_us else {}
        self.service.handle("r", lambda: inputs, parameters, sender=caller.for_)
        return caller

    def swaps(self, reason: str) -> float:
        return self.recorded.value("swaps_total", reason=reason)

    def __enter__(self) -> "DoubleRig":
        return self

    def __exit__(self, *failure) -> None:
        for engine in self.opener.opened:
            engine.go.set()
        self.service.close()


def gate() -> SimpleNamespace:
    """A call that waits: `reached` says that somebody is in it, `open` lets him go on."""
    made = SimpleNamespace(reached=threading.Event(), open=threading.Event())

    def hold(*arguments) -> None:
        made.reached.set()
        assert made.open.wait(WAIT_S)

    made.hold = hold
    return made
