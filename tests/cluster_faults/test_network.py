"""The network of the harness does what its rules say: otherwise a test with faults tests nothing."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster_faults.network import (
    FREE,
    Network,
    Rule,
    Way,
    front_host,
    listening_ports,
    real_host,
)

ME, SERVER = 1, 2


class Echo:
    """Listens as node 2 and sends back what comes."""

    def __init__(self) -> None:
        self._socket = socket.create_server((real_host(SERVER), 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def network(echo: Echo) -> Iterator[Network]:
    made = Network(lambda: {ME: os.getpid()})
    made.publish(SERVER, [echo.port])
    yield made
    made.close()


@pytest.fixture
def call(network: Network, echo: Echo) -> Iterator[socket.socket]:
    with socket.create_connection((front_host(SERVER), echo.port), timeout=10) as made:
        assert said(made, b"hello") == b"hello"
        yield made


def said(connection: socket.socket, data: bytes) -> bytes:
    """What comes back."""
    connection.sendall(data)
    got = b""
    while len(got) < len(data):
        part = connection.recv(1 << 16)
        if not part:
            break
        got += part
    return got


def ended(connection: socket.socket, data: bytes) -> bool:
    """True if the other side hung up instead of answering."""
    try:
        return said(connection, data) == b""
    except ConnectionError:
        return True


def test_what_listens_is_found(echo: Echo) -> None:
    assert listening_ports(os.getpid(), real_host(SERVER)) == [echo.port]
    assert listening_ports(os.getpid(), real_host(7)) == []


def test_a_caller_is_recognised(network: Network, call: socket.socket) -> None:
    assert network.strangers == 0
    network.rule(SERVER, ME, Rule(Way.CUT))
    assert said(call, b"the other direction is another rule") != b""


def test_a_cut_resets_what_is_open_and_what_comes(
    network: Network, call: socket.socket, echo: Echo
) -> None:
    network.rule(ME, SERVER, Rule(Way.CUT))
    assert ended(call, b"again")
    with socket.create_connection((front_host(SERVER), echo.port), timeout=10) as other:
        assert ended(other, b"new")
    network.heal()
    with socket.create_connection((front_host(SERVER), echo.port), timeout=10) as other:
        assert said(other, b"healed") == b"healed"


def test_a_stalled_way_moves_nothing_and_loses_nothing(network: Network, call: socket.socket) -> None:
    network.rule(ME, SERVER, Rule(Way.STALL))
    call.sendall(b"later")
    call.settimeout(0.2)
    with pytest.raises(TimeoutError):
        call.recv(10)
    network.rule(ME, SERVER, FREE)
    call.settimeout(10)
    assert call.recv(10) == b"later"


def test_a_slow_way_takes_its_time(network: Network, call: socket.socket) -> None:
    network.rule(ME, SERVER, Rule(Way.SLOW, delay_s=0.05, bytes_per_s=1e6))
    started = time.monotonic()
    assert said(call, b"slowly") == b"slowly"
    assert time.monotonic() - started >= 0.1


def test_a_port_that_is_given_up_is_closed(network: Network, echo: Echo) -> None:
    network.publish(SERVER, [])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((front_host(SERVER), echo.port), timeout=10)


def test_nobody_behind_is_a_reset(network: Network) -> None:
    with socket.socket() as taken:  # a port that nobody listens on at the real host
        taken.bind((real_host(SERVER), 0))
        port = taken.getsockname()[1]
        network.publish(SERVER, [port])
        with socket.create_connection((front_host(SERVER), port), timeout=10) as call:
            assert ended(call, b"anyone?")
