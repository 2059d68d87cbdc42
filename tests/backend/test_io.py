import numpy as np
import pytest

from backend.io import INPUTS, OUTPUTS, Port, PortType


@pytest.mark.parametrize("port", INPUTS + OUTPUTS, ids=lambda port: port.name)
def test_ports_read_as_triton_wants_them(port: Port) -> None:
    config = port.as_config()
    assert config["name"] == port.name
    assert str(config["data_type"]).startswith("TYPE_")
    assert config["dims"] in ([1], [-1])


def test_types_have_their_numpy_scalar() -> None:
    assert {kind: np.dtype(kind.numpy).name for kind in PortType} == {
        PortType.BYTES: "object",
        PortType.BOOL: "bool",
        PortType.INT32: "int32",
        PortType.UINT32: "uint32",
        PortType.UINT64: "uint64",
        PortType.FP32: "float32",
    }


def test_names_are_given_once() -> None:
    for ports in (INPUTS, OUTPUTS):
        names = [port.name for port in ports]
        assert len(names) == len(set(names))
