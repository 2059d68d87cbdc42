"""An acl file is read only if nobody but its owner can have written it."""

import os

import pytest

from backend.access import read_acl
from backend.access.acl_file import MAX_ACL_BYTES
from backend.errors import ConfigError
from tests.backend.access.acl_rig import AclText


@pytest.fixture
def path(tmp_path):
    return AclText().principal("search").write(tmp_path / "acl.toml")


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o644])
def test_others_may_read_it(path, mode):
    path.chmod(mode)
    assert list(read_acl(path).principals) == ["search"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_others_may_not_write_it(path, mode):
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"found mode {mode:04o}: run `chmod go-w "):
        read_acl(path)


def test_it_must_be_ours_or_that_of_root(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"must belong to this user .* found uid 12345"):
        read_acl(path)


def test_a_link_is_followed_and_its_target_checked(path, tmp_path):
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    assert list(read_acl(link).principals) == ["search"]
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"link\.toml: must be writable by nobody but its owner"):
        read_acl(link)


def test_a_pipe_holds_nobody_up(tmp_path):
    pipe = tmp_path / "acl.toml"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match="must be a regular file"):
        read_acl(pipe)


def test_what_is_too_long_is_not_read(path):
    path.write_text("#" * MAX_ACL_BYTES)
    assert not read_acl(path).principals
    path.write_text("#" * (MAX_ACL_BYTES + 1))
    with pytest.raises(ConfigError, match=f"must be at most {MAX_ACL_BYTES} bytes"):
        read_acl(path)


def test_what_is_no_text_is_named(path):
    path.write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match="expected TOML in UTF-8, found another byte at 2"):
        read_acl(path)
