"""What product code uses of TensorRT, read from its syntax: members of the module and of its types."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ENGINES = Path(__file__).resolve().parent.parent.parent / "engines"

MODULE = ""  # stands for the module itself

RECEIVERS: Mapping[str, str] = {
    "trt": MODULE,
    "tensorrt": MODULE,
    "self._tensorrt": MODULE,
    "tensorrt.ILogger": "ILogger",
    "types": "DataType",
    "severity": "ILogger.Severity",
    "kinds": "CausalMaskKind",
    "runtime": "Runtime",
    "self._runtime": "Runtime",
    "engine": "ICudaEngine",
    "self._engine": "ICudaEngine",
    "context": "IExecutionContext",
    "self._context": "IExecutionContext",
    "engine.create_engine_inspector()": "EngineInspector",
    "builder": "Builder",
    "config": "IBuilderConfig",
    "network": "INetworkDefinition",
    "parsed.network": "INetworkDefinition",
    "parser": "OnnxParser",
    "error": "ParserError",
    "made": "IOptimizationProfile",
    "cache": "ITimingCache",
    "layer": "ILayer",
    "attention": "IAttention",
    "tensor": "ITensor",
    "network.get_input(index)": "ITensor",
}
"""What an expression stands for in the files below."""

RECAST = {"layer.attention": "IAttentionInputLayer"}
"""Members of an object that was given another class before."""

OURS = {("tensorrt_plan.py", "kinds"), ("plan_builder.py", "cache.lend"), ("plan_builder.py", "cache.keep")}
"""Expressions that stand for something of our own there."""

FILES = (
    "trt.py", "tensorrt_plan.py", "tensorrt_step.py", "tensorrt_network.py", "plan_builder.py",
    "build_tensorrt.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Use:
    """`kind` is a type of TensorRT (or MODULE); `arguments` and `keywords` are those of a call, else None."""

    where: str
    kind: str
    member: str
    arguments: int | None = None
    keywords: frozenset[str] = frozenset()


def uses() -> list[Use]:
    return [use for name in FILES for use in uses_in(name, (ENGINES / name).read_text())]


def uses_in(name: str, source: str) -> Iterator[Use]:
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        receiver = ast.unparse(node.value)
        if {(name, receiver), (name, ast.unparse(node))} & OURS:
            continue
        kind = RECAST.get(ast.unparse(node), RECEIVERS.get(receiver))
        if kind is None and RECEIVERS.get(receiver.rpartition(".")[0]) == MODULE:
            kind = receiver.rpartition(".")[2]  # an enum of the module, such as trt.TensorLocation
        if kind is None:
            continue
        call = calls.get(id(node))
        yield Use(
            where=f"{name}:{node.lineno}",
            kind=kind,
            member=node.attr,
            arguments=None if call is None or _spread(call) else len(call.args),
            keywords=frozenset(keyword.arg for keyword in call.keywords if keyword.arg)
            if call
            else frozenset(),
        )


def _spread(call: ast.Call) -> bool:
    return any(isinstance(argument, ast.Starred) for argument in call.args)


def attributes() -> Iterator[tuple[str, str, str]]:
    """(where, receiver, member) of every attribute in the files, whatever it belongs to."""
    for name in FILES:
        for node in ast.walk(ast.parse((ENGINES / name).read_text())):
            if isinstance(node, ast.Attribute):
                yield f"{name}:{node.lineno}", ast.unparse(node.value), node.attr
