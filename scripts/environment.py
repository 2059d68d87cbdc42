"""The one place where the command reads its environment variables."""

import os


def inherited() -> dict[str, str]:
    """A copy of this process's environment, to build a child's from."""
    return dict(os.environ)


def forbid_telemetry() -> None:
    """ONNX Runtime notes each start in its user's home, to report it, unless told before its import."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def keep_grpc_quiet() -> None:
    """Lines that gRPC writes of its own stand beside our errors, unless told before its import."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
