import logging
import subprocess
import sys
from typing import Any

import pytest

from backend.errors import ConfigError
from backend.sampling import NumpySampler, TorchSampler, choice, choose_sampler, torch_sampler


def test_logits_in_host_memory_are_sampled_there_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(choose_sampler("auto", device="cpu", vocab_size=50, lanes=2), NumpySampler)
    assert [record.getMessage() for record in caplog.records] == [
        "sampling on the host: the engine's logits are in host memory"
    ]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("No module named 'torch'"), "torch cannot be imported (No module named 'torch')"),
        (OSError("libcudart.so: cannot open"), "torch cannot be imported (libcudart.so: cannot open)"),
        (None, "finds no CUDA device"),
    ],
)
def test_without_torch_on_cuda_auto_falls_back_and_device_refuses(
    error: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    if error is not None:

        def fail() -> Any:
            raise error

        monkeypatch.setattr(torch_sampler, "import_torch", fail)
    assert isinstance(choose_sampler("auto", device="cuda:0", vocab_size=50, lanes=2), NumpySampler)
    assert reason in caplog.text
    with pytest.raises(ConfigError, match="sampler: device is not possible") as refused:
        choose_sampler("device", device="cuda:0", vocab_size=50, lanes=2)
    assert reason in str(refused.value)


def test_device_needs_logits_on_a_device() -> None:
    with pytest.raises(ConfigError, match="host memory"):
        choose_sampler("device", device="cpu", vocab_size=50, lanes=2)


def test_a_device_beyond_those_that_torch_sees_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_sampler.import_torch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert torch_sampler.unusable("cuda:1") is None
    assert "cuda:2" in str(torch_sampler.unusable("cuda:2"))


@pytest.mark.parametrize("kind", ["auto", "device"])
def test_where_torch_reaches_the_device_it_samples_there_and_is_warm(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[str] = []

    class OnHostMemory(TorchSampler):
        def __init__(self, vocab_size: int, *, lanes: int, device: str) -> None:
            super().__init__(vocab_size, lanes=lanes)
            self.asked = device

        def warm_up(self) -> None:
            super().warm_up()
            warmed.append(self.asked)

    monkeypatch.setattr(choice, "unusable", lambda device: None)
    monkeypatch.setattr(choice, "TorchSampler", OnHostMemory)
    assert isinstance(choose_sampler(kind, device="cuda:1", vocab_size=50, lanes=2), OnHostMemory)
    assert warmed == ["cuda:1"]
    assert isinstance(choose_sampler("host", device="cuda:1", vocab_size=50, lanes=2), NumpySampler)


def test_the_package_works_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from backend.sampling import choose_sampler\n"
        "print(type(choose_sampler('auto', device='cuda:0', vocab_size=9, lanes=1)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("NumpySampler", "")


@pytest.mark.parametrize("where", ["made", "warm"])
def test_no_room_on_the_device_is_told_with_a_way_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_sampler.import_torch()

    def full(*arguments: Any, **more: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    class OnHostMemory(TorchSampler):
        def __init__(self, vocab_size: int, *, lanes: int, device: str) -> None:
            super().__init__(vocab_size, lanes=lanes)

    monkeypatch.setattr(choice, "unusable", lambda device: None)
    monkeypatch.setattr(choice, "TorchSampler", OnHostMemory)
    if where == "made":
        monkeypatch.setattr(torch_sampler, "Slab", full)
    else:
        monkeypatch.setattr(torch_sampler.TorchSampler, "_choose", full)
    said = r"^sampler: sampling on cpu failed: CUDA out of memory\. \(sampler `host`"
    with pytest.raises(ConfigError, match=said):
        choose_sampler("auto", device="cuda:0", vocab_size=50, lanes=2)
