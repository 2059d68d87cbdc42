"""Taken ports are said in one line, before anything is started."""

import socket

import pytest

from scripts.errors import UsageError
from scripts.ports import require_free
from scripts.triton_runtime import TritonAddress
from tests.free_ports import free_ports


def test_free_ports_pass() -> None:
    http, grpc, metrics = free_ports(3)
    require_free(TritonAddress(http_port=http, grpc_port=grpc, metrics_port=metrics))


def test_a_taken_port_is_named_with_its_variable() -> None:
    http, metrics = free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"^port {port} on 127.0.0.1 is in use: .*GRPC_PORT={port + 1000}$"
        ):
            require_free(TritonAddress(http_port=http, grpc_port=port, metrics_port=metrics))


def test_ports_must_differ() -> None:
    with pytest.raises(UsageError, match="must differ"):
        require_free(TritonAddress(http_port=18000, grpc_port=18000, metrics_port=18002))


def test_a_foreign_address_is_said() -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        require_free(TritonAddress(host="192.0.2.1"))


@pytest.mark.parametrize("host", ["::1", "::", "[::1]", "fe80::1"])
def test_an_ipv6_address_is_refused_before_anything_starts(host: str) -> None:
    with pytest.raises(UsageError, match=r"^--host .*: IPv6 addresses are not supported; use .*127\.0\.0\.1"):
        require_free(TritonAddress(host=host))
