"""The load chain as one matrix: every damage to every file, and of two faults the earlier one is told.

The chain goes signature, folder, engine.json, model, min_release, memory, bytes; then, where the release is
opened, plan, library version, compute capability, GPU; contract, golden. Each refusal is one line that says
what was expected and what was found, and leaves nothing in memory.
"""

import itertools
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest

from engines.driver import GpuInfo
from engines.errors import ReleaseError
from engines.loading import load_release, load_release_dir
from engines.manifest import TensorRTInfo, parse_manifest
from engines.opening import open_engine
from engines.options import EngineOptions
from engines.trust import TrustSettings
from tests.engines.conftest import TINY_FILES, Keys, refusal
from tests.engines.test_plan_header import H100, HERE, INFO, plan_of
from tests.resident_memory import resident_bytes

WriteRelease = Callable[..., Path]

SIGNED = (*TINY_FILES, "engine.json")
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "last byte cut": lambda data: data[:-1],
    "first byte flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "copied as text": lambda data: data.replace(b"\n", b"\r\n"),
    "empty": lambda data: b"",
    "a PNG": lambda data: b"\x89PNG\r\n\x1a\n" + bytes(64),
}


@pytest.mark.parametrize("name", [*SIGNED, "model.sig"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_every_file_is_refused_by_the_step_that_looks_at_it(
    served: Path, load: Callable[[], object], name: str, damage: str
) -> None:
    whole = (served / name).read_bytes()
    damaged = DAMAGES[damage](whole)
    (served / name).write_bytes(damaged)
    if damaged == whole:
        assert (name, damage) == ("model.sig", "copied as text")  # one line without an end: nothing to mangle
        assert load() is not None
        return
    error = refusal(load)
    # the manifest says how long the others are, so their length is compared before they are read
    same_length = len(damaged) == len(whole)
    looked_at = "digest" if name == "engine.json" or same_length else "files"
    assert error.step == ("signature" if name == "model.sig" else looked_at)
    if name != "model.sig":
        assert name in error.expected


def test_a_signature_mangled_as_text_is_still_only_a_signature(
    served: Path, load: Callable[[], object]
) -> None:
    """White space outside the signed payload means nothing, and the files are still checked by it."""
    bundle = (served / "model.sig").read_bytes()
    (served / "model.sig").write_bytes(bundle.replace(b",", b",\r\n"))
    assert load() is not None
    (served / "tokenizer.json").write_bytes(b"{}")
    assert refusal(load).step == "files"


@dataclass
class Case:
    """A TensorRT release on a GPU that it fits, until faults are added."""

    key: Path
    trust: TrustSettings
    fields: dict[str, Any] = field(default_factory=lambda: {"runtime": "tensorrt", "tensorrt": INFO})
    plan: bytes = field(default_factory=plan_of)
    here: dict[str, str] = field(default_factory=lambda: dict(HERE))
    available: Callable[[], int] = lambda: 1 << 40
    after_signing: list[Callable[[Path], object]] = field(default_factory=list)


def unknown_key(case: Case, other: Keys) -> None:
    case.key = other.private


def extra_file(case: Case, other: Keys) -> None:
    case.after_signing.append(lambda folder: (folder / "extra.bin").touch())


def altered_manifest(case: Case, other: Keys) -> None:
    def alter(folder: Path) -> None:
        with (folder / "engine.json").open("ab") as file:
            file.write(b"\n")

    case.after_signing.append(alter)


def other_model(case: Case, other: Keys) -> None:
    case.fields["model"] = "other"
    case.trust = msgspec.structs.replace(case.trust, min_release={**case.trust.min_release, "other": 0})


def too_old(case: Case, other: Keys) -> None:
    case.fields["release"] = 1
    case.trust = msgspec.structs.replace(case.trust, min_release={"tiny": 2, "other": 2})


def no_memory(case: Case, other: Keys) -> None:
    case.available = lambda: 0


def altered_plan(case: Case, other: Keys) -> None:
    def alter(folder: Path) -> None:
        data = bytearray((folder / "model.plan").read_bytes())
        data[-1] ^= 1
        (folder / "model.plan").write_bytes(data)

    case.after_signing.append(alter)


def for_rtx(case: Case, other: Keys) -> None:
    case.plan = b"vtrt" + case.plan[4:]


def cut_before_it_was_signed(case: Case, other: Keys) -> None:
    case.plan = case.plan[:-1]


def other_library(case: Case, other: Keys) -> None:
    case.here["library"] = "10.15.1.29"


def other_capability(case: Case, other: Keys) -> None:
    case.here["compute_capability"] = "8.0"


def other_gpu(case: Case, other: Keys) -> None:
    case.here["gpu_name"] = "NVIDIA H200"


Fault = Callable[[Case, Keys], None]
CHAIN: dict[
    Fault, tuple[str, str]
] = {  # in the order of the chain: fault, step that refuses it, what it says
    unknown_key: ("signature", "trusted key"),
    extra_file: ("folder", "extra.bin"),
    altered_manifest: ("digest", "engine.json"),
    other_model: ("model", "'other'"),
    too_old: ("min_release", "release 2 or later"),
    no_memory: ("memory", "found 0 bytes"),
    altered_plan: ("digest", "model.plan"),
    for_rtx: ("plan", "TensorRT-RTX"),
    cut_before_it_was_signed: ("plan size", "631 bytes"),
    other_library: ("library version", "found TensorRT 10.15.1.29"),
    other_capability: ("compute capability", "of 8.0"),
    other_gpu: ("gpu", "found NVIDIA H200"),
}


@pytest.fixture
def attempt(
    tmp_path: Path, write_release: WriteRelease, keys: Keys, other_keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ReleaseError]:
    """attempt(*faults) → what refuses the release with these faults, on its way to an engine."""
    numbers = itertools.count()

    def refused(*faults: Fault) -> ReleaseError:
        case = Case(keys.private, keys.trust)
        for fault in faults:
            fault(case, other_keys)
        files = {"model.plan": case.plan, "tokenizer.json": TINY_FILES["tokenizer.json"]}
        folder = write_release(
            f"release-{next(numbers)}", files=files, key=case.key, graph="model.plan", **case.fields
        )
        for change in case.after_signing:
            change(folder)
        gpu = GpuInfo(0, case.here["gpu_name"], case.here["compute_capability"], "13.0", 80 << 30)
        monkeypatch.setattr("engines.driver.require_driver", lambda ordinal=0: gpu)
        monkeypatch.setattr("engines.trt.library_version", lambda: case.here["library"])
        monkeypatch.setattr("engines.tensorrt_engine.TensorRTEngine", _no_engine)

        def load_and_open() -> None:
            release = load_release_dir(folder, model="tiny", trust=case.trust, available=case.available)
            open_engine(release, EngineOptions(), available=case.available)

        return refusal(load_and_open)

    return refused


def _no_engine(*args: object, **kwargs: object) -> object:
    raise ReleaseError("deserialise", expected="a refusal before this", found="none")


def test_without_a_fault_a_plan_reaches_tensorrt(attempt: Callable[..., ReleaseError]) -> None:
    assert attempt().step == "deserialise"


@pytest.mark.parametrize("fault", CHAIN, ids=lambda fault: fault.__name__)
def test_every_fault_is_refused_by_its_step(attempt: Callable[..., ReleaseError], fault: Fault) -> None:
    step, says = CHAIN[fault]
    error = attempt(fault)
    assert error.step == step
    assert says in str(error)


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.combinations(CHAIN, 2)), ids=lambda fault: fault.__name__
)
def test_of_two_faults_the_earlier_one_is_told(
    attempt: Callable[..., ReleaseError], first: Fault, second: Fault
) -> None:
    step, says = CHAIN[first]
    error = attempt(second, first)
    assert error.step == step
    assert says in str(error)


@pytest.mark.parametrize(
    ("info", "step", "expected", "found"),
    [
        ({"version": "10.15.1.29"}, "library version", "10.15.1.29", "10.16.0.72"),
        ({"compute_capability": "8.0"}, "compute capability", "8.0", "9.0"),
        ({"gpu_name": "NVIDIA A100-SXM4-80GB"}, "gpu", "A100", H100),
    ],
)
def test_a_manifest_of_another_library_capability_or_device_is_refused(
    attempt: Callable[..., ReleaseError], info: dict[str, str], step: str, expected: str, found: str
) -> None:
    """Signed and whole, and of a node that is not this one."""

    def foreign(case: Case, other: Keys) -> None:
        bound: TensorRTInfo = msgspec.structs.replace(INFO, **info)
        case.fields["tensorrt"] = bound

    error = attempt(foreign)
    assert error.step == step
    assert expected in error.expected
    assert found in error.found


def test_names_that_lead_elsewhere_are_refused_even_signed(
    served: Path, version: Path, load: Callable[[], object]
) -> None:
    (version / "current").write_text("../" * 20 + "etc\n")
    assert refusal(load).step == "current"
    for name in ("..evil", "-rf", "a b"):
        (version / "current").write_text(served.name + "\n")
        (served / name).write_text("x")
        assert refusal(load).step == "folder"
        (served / name).unlink()


@dataclass(frozen=True)
class Held:
    """What this process holds: file descriptors, threads, resident bytes, bytes that Python allocated."""

    fds: int
    threads: int
    resident: int
    traced: int

    @classmethod
    def now(cls) -> "Held":
        resident = resident_bytes()
        fds = len(os.listdir("/proc/self/fd"))
        return cls(fds, threading.active_count(), resident, tracemalloc.get_traced_memory()[0])


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def nothing_is_kept(fail: Callable[[], object], *, times: int = 50, slack: int) -> None:
    """The first failures may fill caches; from then on nothing grows."""
    for _ in range(3):
        fail()
    earlier = tracemalloc.take_snapshot() if tracemalloc.is_tracing() else None
    before = Held.now()
    kept = [fail() for _ in range(times)]
    after = Held.now()
    assert len(kept) == times
    assert (after.fds, after.threads) == (before.fds, before.threads)
    assert after.resident - before.resident < slack
    assert after.traced - before.traced < 1 << 20, growth_since(earlier)


def growth_since(earlier: tracemalloc.Snapshot | None) -> str:
    """Which lines of code hold more than before, the largest first."""
    if earlier is None:
        return "not traced"
    return "\n".join(map(str, tracemalloc.take_snapshot().compare_to(earlier, "lineno")[:10]))


@pytest.mark.usefixtures("traced")
def test_fifty_refused_plans_leave_memory_and_files_as_they_were(
    write_release: WriteRelease, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole plan is in memory when its header is refused; kept fifty times it would be 800 MB."""
    plan = plan_of(body=bytes(16 << 20))
    files = {"model.plan": plan, "tokenizer.json": TINY_FILES["tokenizer.json"]}
    folder = write_release(files=files, graph="model.plan", runtime="tensorrt", tensorrt=INFO)
    gpu = GpuInfo(0, "NVIDIA H200", HERE["compute_capability"], "13.0", 80 << 30)
    monkeypatch.setattr("engines.driver.require_driver", lambda ordinal=0: gpu)
    monkeypatch.setattr("engines.trt.library_version", lambda: HERE["library"])

    def fail() -> ReleaseError:
        error = refusal(lambda: open_engine(load_release_dir(folder, trust=keys.trust), EngineOptions()))
        assert error.step == "gpu"
        return error.with_traceback(None)

    nothing_is_kept(fail, slack=64 << 20)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("damage", ["digest", "files", "min_release"])
def test_fifty_failed_loads_of_a_served_release_leave_memory_and_files_as_they_were(
    tmp_path: Path, write_release: WriteRelease, keys: Keys, damage: str
) -> None:
    from engines.publishing import publish_release

    folder = write_release(files=TINY_FILES | {"zz.data": bytes(16 << 20)})
    version = tmp_path / "served" / "1"
    digest = publish_release(folder, version, model="tiny", trust=keys.trust).digest
    last = version / "releases" / digest / "zz.data"
    last.chmod(0o644)
    if damage == "digest":
        last.write_bytes(b"\1" + bytes((16 << 20) - 1))
    elif damage == "files":
        os.truncate(last, 1 << 20)
    least = {"tiny": 9} if damage == "min_release" else {}
    trust = TrustSettings(keys=(keys.public,), min_release=least)

    def fail() -> ReleaseError:
        error = refusal(lambda: load_release(version, model="tiny", trust=trust))
        assert error.step == damage
        return error

    nothing_is_kept(fail, slack=64 << 20)


def test_fifty_engines_that_fail_their_golden_token_leave_memory_and_files_as_they_were(
    small_release: Path, resign: Any, keys: Keys
) -> None:
    golden = parse_manifest((small_release / "engine.json").read_bytes()).golden
    wrong = msgspec.structs.replace(golden, token=golden.token + 1)
    folder = resign(small_release, golden=wrong)

    def fail() -> ReleaseError:
        release = load_release_dir(folder, trust=keys.trust)
        error = refusal(lambda: open_engine(release, EngineOptions(threads=1, lanes=2)))
        assert error.step == "golden"
        return error.with_traceback(None)

    nothing_is_kept(fail, slack=32 << 20)


def test_a_graph_that_breaks_the_contract_is_refused_before_its_golden_token_is_asked(
    small_release: Path, resign: Any, keys: Keys
) -> None:
    manifest = parse_manifest((small_release / "engine.json").read_bytes())
    model = onnx.load_from_string((small_release / manifest.graph).read_bytes())
    model.graph.output[0].name = "renamed"
    for node in model.graph.node:
        node.output[:] = ["renamed" if name == "logits" else name for name in node.output]
    wrong = msgspec.structs.replace(manifest.golden, token=manifest.golden.token + 1)
    folder = resign(small_release, replace={manifest.graph: model.SerializeToString()}, golden=wrong)
    release = load_release_dir(folder, trust=keys.trust)
    error = refusal(lambda: open_engine(release, EngineOptions(threads=1, lanes=2)))
    assert error.step == "contract"
    error = refusal(lambda: open_engine(release, EngineOptions(threads=1, lanes=2), available=lambda: 0))
    assert error.step == "memory"
