"""The tensorrt double has what our code uses, and nothing that TensorRT has not.

TensorRT itself cannot be installed without its vendor's index; its runtime half is tensorrt-lean, and
TensorRT-RTX has the builder half. pycuda and cuda-bindings are the real ones on the rig.
"""

import functools
import inspect
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import tensorrt_lean
import tensorrt_rtx

from tests.rig import plans, pycuda_build, tensorrt_double
from tests.rig.uses import ENGINES, RECEIVERS, Use, attributes, uses, uses_in

DOUBLE = tensorrt_double._MODULE
ONLY_IN_10 = {("IAttention", "causal")}  # asked only where there is no CausalMaskKind
PYTHONS = {"__init__", "__class__", "__version__"}


def resolve(module: Any, kind: str) -> Any:
    """A type by its dotted name; None if the module has none."""
    found = module
    for part in filter(None, kind.split(".")):
        found = getattr(found, part, None)
    return found


def real(kind: str, member: str) -> Any:
    """The member as TensorRT has it: the runtime library's, else the builder's."""
    for module in (tensorrt_lean, tensorrt_rtx):
        owner = resolve(module, kind)
        if owner is not None and hasattr(owner, member):
            return getattr(owner, member)
    return None


def parameters(function: Any) -> list[list[str]]:
    """Names of the parameters of each overload, without self, from the bindings' own text."""
    text = function.__doc__ or ""
    name = function.__name__
    found = re.findall(rf"^(?:\d+\. )?{name}\((self: [^,)]+)?(.*)\) -> ", text, re.M)
    return [re.findall(r"(?:^|, )(\w+): ", rest) for _, rest in found]


def double_types() -> Iterator[tuple[str, type]]:
    for name, kind in vars(DOUBLE).items():
        if inspect.isclass(kind):
            yield name, kind


def double_members() -> Iterator[tuple[str, str]]:
    for name, kind in double_types():
        members = getattr(kind, "__members__", None) or [
            member for base in kind.__mro__[:-1] for member in vars(base) if not member.startswith("_")
        ]
        yield from ((name, member) for member in members if not member.startswith("_"))


USES, ATTRIBUTES = uses(), list(attributes())


def test_the_rig_has_the_versions_of_a_gpu_node() -> None:
    """What is compared and run here is what the extra gpu-cu13 installs."""
    extras = tomllib.loads((ENGINES.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    node = {pin.partition("==")[0]: pin for pin in extras["gpu-cu13"]}
    assert f"tensorrt-cu13=={plans.VERSION}" == node["tensorrt-cu13"]
    assert tensorrt_lean.__version__ == plans.VERSION
    assert node["pycuda"] == pycuda_build.PYCUDA
    assert node["cuda-bindings"] in extras["test"]


def test_uses_were_found() -> None:
    assert {use.kind for use in USES} >= {kind for kind in RECEIVERS.values() if kind}
    assert len(USES) > 60


def shown(use: Use) -> str:
    return f"{use.where} {use.kind or 'tensorrt'}.{use.member}"


def test_the_double_has_all_that_our_code_uses() -> None:
    missing = []
    for use in USES:
        owner = resolve(DOUBLE, use.kind)
        instance = (use.kind, use.member) in instance_attributes()
        if use.member not in PYTHONS and (use.kind, use.member) not in ONLY_IN_10 and not instance:
            missing += [shown(use)] if owner is None or not hasattr(owner, use.member) else []
    assert missing == []


@functools.cache
def instance_attributes() -> set[tuple[str, str]]:
    """What the double's classes set in __init__."""
    found = set()
    for name, kind in double_types():
        source = inspect.getsource(kind)
        found |= {(name, member) for member in re.findall(r"self\.([a-z]\w*)(?:: [^=]+)? = ", source)}
    return found


def unknown(of: list[Use]) -> list[str]:
    return [
        shown(use)
        for use in of
        if use.member not in PYTHONS and (use.kind, use.member) not in ONLY_IN_10
        if real(use.kind, use.member) is None
    ]


def misfits(of: list[Use]) -> list[str]:
    wrong = []
    for use in of:
        member = real(use.kind, use.member)
        if use.arguments is None or inspect.isclass(member) or use.member in PYTHONS or not callable(member):
            continue
        overloads = parameters(member)
        fits = any(
            use.arguments + len(use.keywords) <= len(names) and use.keywords <= set(names)
            for names in overloads
        )
        wrong += [] if fits else [f"{shown(use)}: {use.arguments} arguments, {sorted(use.keywords)}"]
    return wrong


def test_tensorrt_has_all_that_our_code_uses() -> None:
    assert unknown(USES) == []


def test_our_calls_fit_the_signatures_of_tensorrt() -> None:
    assert misfits(USES) == []


@pytest.mark.parametrize(("kind", "member"), sorted(set(double_members())))
def test_tensorrt_has_what_the_double_has(kind: str, member: str) -> None:
    found = real(kind, member)
    assert found is not None, f"TensorRT has no {kind}.{member}"
    double = inspect.getattr_static(getattr(DOUBLE, kind), member)
    assert isinstance(double, property) == isinstance(found, property) or not inspect.isfunction(double)
    if not inspect.isfunction(double):
        return
    names = list(inspect.signature(double).parameters)[1:]
    overloads = parameters(found)
    assert names in [known[: len(names)] for known in overloads], (
        f"{kind}.{member}{tuple(names)}, TensorRT's parameters are {overloads}"
    )


@pytest.mark.parametrize(("kind", "member"), sorted(instance_attributes()))
def test_tensorrt_has_the_attributes_that_the_double_sets(kind: str, member: str) -> None:
    assert real(kind, member) is not None


def test_no_use_is_overlooked() -> None:
    """A name of TensorRT on a receiver that nobody listed would not be compared with anything."""
    types = {kind for kind in RECEIVERS.values() if kind}
    known = {
        member
        for kind in types
        for module in (tensorrt_lean, tensorrt_rtx)
        for member in dir(resolve(module, kind) or object)
        if "_" in member.strip("_") and not member.startswith("_")
    }
    listed = {(use.where, use.member) for use in USES}
    overlooked = [
        f"{where} {receiver}.{member}"
        for where, receiver, member in ATTRIBUTES
        if member in known and (where, member) not in listed
    ]
    assert overlooked == []


@pytest.mark.parametrize(
    "source",
    [
        "engine.get_tensor_names()",
        "self._context.execute_async_v2(stream)",
        "trt.TensorPlace.DEVICE",
        "context.set_tensor_address(name=1, address=2)",
        "context.set_device_memory(1, 2, 3)",
    ],
)
def test_the_comparison_can_fail(source: str) -> None:
    found = list(uses_in("x.py", source))
    assert found
    assert unknown(found) or misfits(found)
