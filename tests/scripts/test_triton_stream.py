"""Whoever asks a server that is not there hears why, also if that shows before the request is sent."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import tritonclient.grpc as triton

from scripts.errors import TritonError
from scripts.triton_stream import stream_answer
from tests.free_ports import free_ports

LIMIT_S = 30.0


@pytest.mark.parametrize("early", [False, True], ids=["as it comes", "before the request"])
def test_the_reason_is_the_servers(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if early:
        monkeypatch.setattr(triton.InferenceServerClient, "start_stream", started_and_ended)
    (port,) = free_ports(1)
    with pytest.raises(TritonError, match=r"UNAVAILABLE.* connect"):
        stream_answer(f"127.0.0.1:{port}", "nobody", {"text_input": "Hi"}, limit_s=LIMIT_S)


_start_stream = triton.InferenceServerClient.start_stream


def started_and_ended(client: triton.InferenceServerClient, callback: Callable[..., Any]) -> None:
    """Starts a stream and returns once its end was told."""
    told = threading.Event()

    def tell(**outcome: object) -> None:
        callback(**outcome)
        told.set()

    _start_stream(client, callback=tell)
    assert told.wait(LIMIT_S)
