"""engine.json: read strictly, whatever it holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import ReleaseError
from engines.manifest import encode_manifest, parse_manifest
from tests.engines.conftest import TINY_FILES, refusal, tiny_manifest
from tests.engines.json_fuzz import JSON, json_paths

WriteRelease = Callable[..., Path]


MANIFEST: dict[str, Any] = json.loads(encode_manifest(tiny_manifest(TINY_FILES)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "tensorcache-engine/2"),
        ("release", -1),
        ("release", 1.5),
        ("release", True),
        ("release", "3"),
        ("lanes", 0),
        ("lanes", 10**30),
        ("model", "../tiny"),
        ("model", "tiny\n"),
        ("model", ""),
        ("runtime", "torch"),
        ("kv_layout", "paged"),
        ("kv_dtype", "int8"),
        ("kv_identity", "0" * 31),
        ("tokenizer_digest", "x" * 64),
        ("files", []),
        ("files", {"model.onnx": {"sha256": "0" * 64, "size": -1}}),
        ("geometry", None),
        ("golden", {"prompt": [1], "token": 1}),
        ("golden", {"prompt": ["a"], "token": 1, "margin": 1}),
        ("chat_template", 7),
        ("unknown", 1),
    ],
)
def test_a_manifest_names_the_field_that_is_wrong(field: str, value: object) -> None:
    error = refusal(lambda: parse_manifest(json.dumps(MANIFEST | {field: value}).encode()))
    assert error.step == "manifest"
    assert field in error.found


@pytest.mark.parametrize("field", sorted(MANIFEST.keys() - {"tensorrt"}))
def test_a_manifest_names_the_field_that_is_missing(field: str) -> None:
    without = {name: value for name, value in MANIFEST.items() if name != field}
    assert f"`{field}`" in refusal(lambda: parse_manifest(json.dumps(without).encode())).found


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_manifest_with_any_part_replaced_parses_or_is_refused(data: st.DataObject) -> None:
    altered = json.loads(json.dumps(MANIFEST))
    *parents, last = data.draw(st.sampled_from(json_paths(altered)))
    part = altered
    for step in parents:
        part = part[step]
    part[last] = data.draw(JSON)
    raw = json.dumps(altered).encode()
    try:
        manifest = parse_manifest(raw)
    except ReleaseError:
        assert refusal(lambda: parse_manifest(raw)).step == "manifest"
    else:
        assert parse_manifest(encode_manifest(manifest)) == manifest


@given(junk=st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_no_manifest(junk: bytes) -> None:
    assert refusal(lambda: parse_manifest(junk)).step == "manifest"


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"model":' * 50_000, b'{"format": "\xff"}', b"\xef\xbb\xbf{}"]
)
def test_hostile_json_is_no_manifest(raw: bytes) -> None:
    assert refusal(lambda: parse_manifest(raw)).step == "manifest"
