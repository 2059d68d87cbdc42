"""Checks that ports are free before a server is started, because a server says it late and unclearly."""

import errno
import socket

from scripts.errors import UsageError
from scripts.triton_runtime import TritonAddress


def require_free(address: TritonAddress) -> None:
    """UsageError naming the first of the three ports that is taken, or the address that is not usable."""
    if ":" in address.host:
        raise UsageError(
            f"--host {address.host}: IPv6 addresses are not supported; use an IPv4 address of this machine, "
            "such as 127.0.0.1, or 0.0.0.0 for every one"
        )
    wanted = {
        "HTTP_PORT": address.http_port,
        "GRPC_PORT": address.grpc_port,
        "METRICS_PORT": address.metrics_port,
    }
    if len(set(wanted.values())) < len(wanted):
        raise UsageError(
            f"the three ports must differ, got {', '.join(f'{k}={v}' for k, v in wanted.items())}"
        )
    for name, port in wanted.items():
        problem = _problem(address.host, port)
        if problem is not None:
            raise UsageError(
                f"port {port} on {address.host} {problem}: choose another, such as {name}={port + 1000}"
            )


def _problem(host: str, port: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return (
                "is in use"
                if error.errno == errno.EADDRINUSE
                else f"cannot be used ({error.strerror or error})"
            )
    return None
