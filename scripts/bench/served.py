"""The same release behind a real Triton, asked over gRPC streaming as a user's program would."""

import argparse
import queue
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton

from engines import TrustSettings, publish_release
from scripts.backend_layout import lay_out_backend, write_model_config, write_node_config
from scripts.bench.subject import MODEL, Subject
from scripts.serving import add_serving, supervised
from scripts.triton_stream import tensor

Tokens = npt.NDArray[np.int64]

CLUSTER = "bench"
HOST_BYTES = 1 << 30
ANSWER_LIMIT_S = 120.0


class TritonStreams:
    """Open gRPC streams, one per concurrent request, each with a client of its own."""

    def __init__(self, url: str, count: int) -> None:
        self._arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._open = ExitStack()
        self._clients = [self._open.enter_context(triton.InferenceServerClient(url)) for _ in range(count)]
        for client in self._clients:
            client.start_stream(callback=lambda result, error: self._arrived.put((result, error)))
            self._open.callback(client.stop_stream, cancel_requests=True)

    def close(self) -> None:
        """End the streams."""
        self._open.close()

    def seconds(self, prompts: Sequence[Tokens], *, max_tokens: int) -> float:
        """Seconds from the first request to the last FINAL; one greedy request per stream."""
        requests = [_inputs(prompt, max_tokens) for prompt in prompts]
        started = time.perf_counter()
        for client, inputs in zip(self._clients, requests, strict=True):
            client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        waiting = len(requests)
        while waiting:
            left = started + ANSWER_LIMIT_S - time.perf_counter()
            result, error = self._arrived.get(timeout=max(0.01, left))
            if error is not None:
                raise RuntimeError(f"Triton answered: {error}")
            parameters = result.get_response().parameters
            waiting -= bool(parameters["triton_final_response"].bool_param)
        return time.perf_counter() - started


def _inputs(prompt: Tokens, max_tokens: int) -> list[triton.InferInput]:
    values = {"input_ids": prompt.tolist(), "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return [tensor(name, value) for name, value in values.items()]


@contextmanager
def served(subject: Subject) -> Iterator[str]:
    """Deploy the default release into a home of its own and serve it; the gRPC address."""
    home = subject.settings.folder / "home"
    _lay_out(subject, home)
    http, grpc, metrics = free_ports(3)
    parser = argparse.ArgumentParser()
    add_serving(parser)
    arguments = parser.parse_args(
        [
            *("--home", str(home), "--model", MODEL, "--pause-limit", "1"),
            *("--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)),
        ]
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with supervised(arguments) as serving:
            yield f"{serving.address.client_host}:{serving.address.grpc_port}"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arena in Path("/dev/shm").glob(f"tensorcache_{CLUSTER}_*.arena"):
            arena.unlink()


def _lay_out(subject: Subject, home: Path) -> None:
    lay_out_backend(home / "backends")
    write_node_config(
        home / "tensorcache.toml", keys=(subject.keys[1],), cluster=CLUSTER, host_bytes=HOST_BYTES
    )
    repository = home / "model_repository"
    write_model_config(repository, MODEL, replace=True)
    threads = f'parameters {{ key: "threads" value {{ string_value: "{subject.settings.threads}" }} }}\n'
    with (repository / MODEL / "config.pbtxt").open("a") as config:
        config.write(threads)
    trust = TrustSettings(keys=(subject.keys[1],))
    publish_release(subject.release_folder(), repository / MODEL / "1", model=MODEL, trust=trust)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on right now."""
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
