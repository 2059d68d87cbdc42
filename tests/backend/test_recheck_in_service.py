"""A running service looks at the folder of what it serves, and follows a swap to another release."""

import shutil
from pathlib import Path

import msgspec
import pytest

from engines import publish_release, sign_release
from engines.manifest import encode_manifest, parse_manifest
from tests.backend.test_composition import deployed, open_small  # noqa: F401  (a fixture)
from tests.waiting import wait_until


@pytest.fixture
def own(deployed, tmp_path):  # noqa: F811
    """A version folder of its own to spoil."""
    version, node = deployed
    shutil.copytree(version, tmp_path / "small" / "1")
    return tmp_path / "small" / "1", node


def folder(version: Path) -> Path:
    return version / "releases" / (version / "current").read_text().strip()


def test_an_altered_folder_makes_the_model_unready_until_it_is_as_it_was(own):
    version, _ = own
    service = open_small(own, recheck_s=0.05, recheck_unready=True, swap="off")
    try:
        assert service.ready
        (folder(version) / "extra").touch()
        wait_until(lambda: not service.ready)
        (folder(version) / "extra").unlink()
        wait_until(lambda: service.ready)
    finally:
        service.close()


def test_after_a_swap_the_new_folder_is_looked_at(own, small_release, tmp_path):
    version, node = own
    old = folder(version)
    service = open_small(own, recheck_s=0.05, recheck_unready=True, swap_poll_s=0.05)
    try:
        shutil.copytree(small_release, tmp_path / "next")
        manifest = parse_manifest((small_release / "engine.json").read_bytes())
        changed = msgspec.structs.replace(manifest, release=2)
        (tmp_path / "next" / "engine.json").write_bytes(encode_manifest(changed))
        sign_release(tmp_path / "next", node.trust.keys[0].with_name("release.key"))
        now = publish_release(tmp_path / "next", version, model="small", trust=node.trust).digest
        wait_until(lambda: service.release == now)
        shutil.rmtree(old)
        (folder(version) / "extra").touch()
        wait_until(lambda: not service.ready)
        (folder(version) / "extra").unlink()
        wait_until(lambda: service.ready)  # the old folder is nobody's concern any more
    finally:
        service.close()
