"""One public prefix on disk: whole or not at all, and nothing but what its place says."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.admin.prefix_file import (
    MAX_PREFIX_TOKENS,
    NAME,
    PrefixError,
    PublicPrefix,
    decode_prefix,
    encode_prefix,
    read_prefix_bytes,
    write_prefix_file,
)
from tests.full_disk import room_for

WHEN = datetime(2026, 11, 30, 8, 0, tzinfo=UTC)
TOKENS = np.arange(64, dtype=np.int64)

names = st.from_regex(NAME, fullmatch=True)
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50).map(lambda ids: np.array(ids, np.int64))


def prefix(name="handbook", ids=TOKENS, by="ops"):
    return PublicPrefix(name, ids, WHEN, by)


def content(**changes):
    whole = json.loads(encode_prefix("m", prefix()))
    return json.dumps({**whole, **changes}).encode()


@given(
    names,
    tokens,
    st.text(max_size=63).filter(lambda by: by.isprintable()),
    st.datetimes(timezones=st.just(UTC)),
)
def test_what_was_written_is_read(name, ids, by, when):
    read = decode_prefix(encode_prefix("m", PublicPrefix(name, ids, when, by)), "m", name)
    assert (read.name, read.by, read.registered) == (name, by, when)
    assert np.array_equal(read.tokens, ids)
    assert read.tokens.dtype == np.int64
    assert not read.tokens.flags.writeable


@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["format", "model", "name", "tokens", "registered", "by", "x"]), inner, max_size=7), max_leaves=20,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_what_is_none_is_refused_in_one_printable_line(garbage):
    with pytest.raises(PrefixError) as refused:
        decode_prefix(garbage, "m", "handbook")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format"),
        ({"model": "other"}, "model: expected m"),
        ({"name": "../m/handbook"}, "name: expected handbook"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [2**31]}, "tokens"),
        ({"tokens": [1.5]}, "tokens"),
        ({"tokens": [True]}, "tokens"),
        ({"tokens": [0] * (MAX_PREFIX_TOKENS + 1)}, "tokens"),
        ({"registered": "2026-11-30T08:00:00"}, "registered"),
        ({"by": "x" * 64}, "by"),
        ({"public": True}, "public"),
    ],
)
def test_an_error_names_the_field(changes, words):
    with pytest.raises(PrefixError, match=words):
        decode_prefix(content(**changes), "m", "handbook")


def test_the_largest_prefix_fits_the_file(tmp_path):
    ids = np.full(MAX_PREFIX_TOKENS, 2**31 - 1, np.int64)
    write_prefix_file(tmp_path, "m", prefix(ids=ids))
    read = decode_prefix(read_prefix_bytes(tmp_path / "handbook.json"), "m", "handbook")
    assert len(read.tokens) == MAX_PREFIX_TOKENS


def test_a_file_is_private_and_alone(tmp_path):
    write_prefix_file(tmp_path / "new" / "m", "m", prefix())
    made = tmp_path / "new" / "m"
    assert os.listdir(made) == ["handbook.json"]
    assert made.stat().st_mode & 0o777 == 0o700
    assert (made / "handbook.json").stat().st_mode & 0o777 == 0o600


def test_a_second_one_of_the_name_does_not_replace_the_first(tmp_path):
    write_prefix_file(tmp_path, "m", prefix())
    with pytest.raises(FileExistsError):
        write_prefix_file(tmp_path, "m", prefix(ids=TOKENS[::-1]))
    assert os.listdir(tmp_path) == ["handbook.json"]
    read = decode_prefix(read_prefix_bytes(tmp_path / "handbook.json"), "m", "handbook")
    assert np.array_equal(read.tokens, TOKENS)


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    with room_for(40), pytest.raises(OSError, match=r"handbook\.json"):
        write_prefix_file(tmp_path, "m", prefix())
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_a_file_is_said(tmp_path):
    (tmp_path / "m").write_text("")
    with pytest.raises(NotADirectoryError):
        write_prefix_file(tmp_path / "m", "m", prefix())


def spoil_mode(path: Path):
    path.chmod(0o620)


def spoil_by_link(path: Path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def spoil_by_folder(path: Path):
    path.unlink()
    path.mkdir()


def spoil_by_pipe(path: Path):
    path.unlink()
    os.mkfifo(path)


def spoil_size(path: Path):
    with path.open("ab") as file:
        file.truncate(3 << 20)


@pytest.mark.parametrize("spoil", [spoil_mode, spoil_by_link, spoil_by_folder, spoil_by_pipe, spoil_size])
def test_what_others_could_have_put_there_is_not_read(tmp_path, spoil):
    write_prefix_file(tmp_path, "m", prefix())
    spoil(tmp_path / "handbook.json")
    with pytest.raises(PrefixError):
        read_prefix_bytes(tmp_path / "handbook.json")


_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from datetime import datetime, UTC
from backend.admin import prefix_file
def end(*_): os.kill(os.getpid(), signal.SIGKILL)
setattr(os, sys.argv[2], end)
made = prefix_file.PublicPrefix("handbook", np.arange(64), datetime.now(UTC), "ops")
prefix_file.write_prefix_file(Path(sys.argv[1]), "m", made)
"""


@pytest.mark.parametrize("moment", ["fsync", "link"])
def test_a_writer_that_is_killed_leaves_no_prefix_and_the_next_one_cleans_up(tmp_path, moment):
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), moment], timeout=50, check=False)
    assert done.returncode == -signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert [path.suffix for path in left] == [".new"]
    os.utime(left[0], (0, 0))
    write_prefix_file(tmp_path, "m", prefix())
    assert os.listdir(tmp_path) == ["handbook.json"]
