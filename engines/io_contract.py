"""Checks that a graph's inputs and outputs are those of the engine contract, before anything is bound to
them.
"""

from collections.abc import Mapping

from engines.contract import EngineSpec
from engines.errors import ReleaseError

Tensors = Mapping[str, tuple[str, tuple[int | str, ...]]]
"""Name → (type such as "tensor(int64)", shape with symbolic dimensions as strings)."""

_CACHE_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)"}


def check_contract(spec: EngineSpec, inputs: Tensors, outputs: Tensors) -> None:
    """Raise ReleaseError (step "contract") at the first tensor that is missing, unknown or different."""
    compare_tensors("input", expected_inputs(spec), inputs)
    compare_tensors("output", expected_outputs(spec), outputs)


def expected_inputs(spec: EngineSpec) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    """The inputs that a CPU engine binds."""
    fixed: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "input_ids": ("tensor(int64)", ("B", "T")),
        "write_indices": ("tensor(int64)", ("B",)),
        "query_lens": ("tensor(int32)", ("B",)),
        "logit_indices": ("tensor(int64)", ("B", "R")),
    }
    return fixed | _caches(spec, "past")


def expected_outputs(spec: EngineSpec) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    """The outputs that a CPU engine binds."""
    logits = {"logits": ("tensor(float)", ("B", "R", spec.geometry.vocab_size))}
    return logits | _caches(spec, "present")


def _caches(spec: EngineSpec, when: str) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    shape = ("B", spec.geometry.kv_heads, "S", spec.geometry.head_dim)
    kind = _CACHE_TYPES[spec.kv_dtype.name]
    return {
        f"{when}_{name}_{layer}": (kind, shape)
        for layer in range(spec.geometry.layers)
        for name in ("key", "value")
    }


def compare_tensors(role: str, expected: Tensors, found: Tensors) -> None:
    """Raise ReleaseError (step "contract") at the first tensor that is missing, unknown or different."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ReleaseError(
                "contract",
                expected=f"{role} {name} {_shown(expected.get(name))}",
                found=_shown(found.get(name)),
            )


def _shown(tensor: tuple[str, tuple[int | str, ...]] | None) -> str:
    return "none" if tensor is None else f"{tensor[0]} [{', '.join(map(str, tensor[1]))}]"
