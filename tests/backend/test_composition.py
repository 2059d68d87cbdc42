"""From settings to a running service over the real load chain, with a small signed release."""

import grp
import logging
import os
import shutil
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from backend.access import EVERYBODY, Access, AuditLog, NoLimits, new_key
from backend.composition import open_decoder
from backend.errors import AccessDenied, EngineFailed, InvalidRequest, Overloaded
from backend.settings import AccessSettings, ModelSettings, NodeSettings, SecretsSettings
from cachemgr import CacheSecrets, CacheSettings, SecretsError, complete_secrets
from engines import ReleaseError, TrustSettings, generate_signing_key, publish_release, sign_release
from tests.backend.service_rig import Caller, NoInstruments
from tests.waiting import wait_until


class ByKey:
    """Takes the namespace from the credential."""

    principals = 1

    def authorise(self, parameters, *, verb):
        return replace(EVERYBODY, namespace=str(parameters.get("api_key", "nobody")))

    def follow(self, listener):
        pass

    def close(self):
        pass


@pytest.fixture(scope="module")
def deployed(small_release, tmp_path_factory):
    """(version folder, node settings) of the small decoder, signed and published."""
    root = tmp_path_factory.mktemp("node")
    release = root / "release"
    shutil.copytree(small_release, release)
    generate_signing_key(root / "keys")
    sign_release(release, root / "keys" / "release.key")
    trust = TrustSettings((root / "keys" / "release.pub",))
    (root / "small" / "1").mkdir(parents=True)
    publish_release(release, root / "small" / "1", model="small", trust=trust)
    CacheSecrets.generate(root / "secrets")
    cache = CacheSettings(host_bytes=16 << 20, directory=str(root))
    return root / "small" / "1", NodeSettings(trust, SecretsSettings(root / "secrets"), cache)


def open_small(deployed, *, node=None, model="small", access=True, **settings):
    version, own = deployed
    return open_decoder(
        model, version, settings=ModelSettings(threads=1, **settings), node=node or own,
        access=Access(ByKey(), NoLimits(), AuditLog("small")) if access else None,
        instruments=NoInstruments(), labels={"model": model, "version": "1"},
    )  # fmt: skip


def ask(service, ids, *, api_key="a", inputs=None, **options):
    caller = Caller()
    tensors = {"input_ids": np.array(ids, np.int32), "max_tokens": np.array([4], np.int32)}
    tensors |= {name: np.array([value]) for name, value in options.items()}
    service.handle("r", inputs or (lambda: tensors), {"api_key": api_key}, sender=lambda generation: caller)
    return caller.wait()


PROMPT = list(range(5, 75))


def test_a_signed_release_serves_and_namespaces_do_not_share_blocks(deployed):
    service = open_small(deployed, lane_ttl_s=0.0)
    try:
        first = ask(service, PROMPT)
        again = ask(service, PROMPT)
        other = ask(service, PROMPT, api_key="b")
    finally:
        service.close()
    assert (first.cached, again.cached, other.cached) == (0, 64, 0)
    assert first.ids == again.ids == other.ids
    assert service.release == (deployed[0] / "current").read_text().strip()


def test_cache_off_computes_everything(deployed):
    service = open_small(deployed, cache="off")
    try:
        assert [ask(service, PROMPT).cached for _ in range(2)] == [0, 0]
    finally:
        service.close()


def test_a_request_that_cannot_be_read_is_answered_and_logged(deployed, caplog):
    service = open_small(deployed)
    try:
        failed = ask(service, PROMPT, inputs=lambda: 1 / 0)
        assert ask(service, PROMPT).last.finish is not None
    finally:
        service.close()
    assert isinstance(failed.last.error, EngineFailed)
    assert "ZeroDivisionError" not in str(failed.last.error)
    assert "ZeroDivisionError" in caplog.text
    assert failed.finals == 1


def test_a_closed_service_refuses(deployed):
    service = open_small(deployed)
    assert service.ready
    service.close()
    assert not service.ready


def test_closing_ends_open_streams_with_a_reason(deployed):
    """Far more work than one moment holds is open when the service closes: thousands of steps."""
    service = open_small(deployed, drain_s=0.0)
    callers = [Caller() for _ in range(200)]
    tensors = {
        "input_ids": np.array(PROMPT, np.int32), "max_tokens": np.array([170], np.int32),
        "stream": np.array([True]), "ignore_eos": np.array([True]), "no_cache": np.array([True]),
    }  # fmt: skip
    for caller in callers:
        service.handle("r", lambda: tensors, {}, sender=lambda generation, to=caller: to)
    assert callers[0].first.wait(20)
    service.close()
    assert [caller.wait().finals for caller in callers] == [1] * len(callers)
    assert isinstance(callers[-1].last.error, Overloaded)


def test_refusals_are_one_line_and_leave_nothing_open(deployed):
    version, node = deployed
    strangers = NodeSettings(TrustSettings(), node.secrets, node.cache)
    with pytest.raises(ReleaseError, match="at least one trusted key"):
        open_small(deployed, node=strangers)
    with pytest.raises(ReleaseError, match="other"):
        open_small(deployed, model="other")
    homeless = NodeSettings(node.trust, SecretsSettings(version / "nowhere"), node.cache)
    with pytest.raises(SecretsError):
        open_small(deployed, node=homeless)
    service = open_small(deployed)
    assert ask(service, PROMPT).last.finish is not None
    service.close()


def test_the_group_that_is_named_may_read_the_secrets_and_no_other(deployed, tmp_path, caplog):
    _, node = deployed
    shutil.copytree(node.secrets.dir, tmp_path / "secrets")
    for file in (tmp_path / "secrets").iterdir():
        file.chmod(0o640)
    (tmp_path / "acl.toml").touch(0o600)
    group = grp.getgrgid(os.getegid()).gr_name
    for named in ("", group):
        secrets = SecretsSettings(tmp_path / "secrets", group=named)
        other = msgspec.structs.replace(
            node, secrets=secrets, access=AccessSettings(tmp_path / "acl.toml", tmp_path / "public")
        )
        caplog.clear()
        if named:
            open_small(deployed, node=other, access=False).close()
        else:
            with pytest.raises(SecretsError, match="found 0640"):
                open_small(deployed, node=other, access=False)
        assert ("the node's own probes are not let in" in caplog.text) is not bool(named)


def test_blocks_of_an_older_tag_secret_are_read_as_long_as_the_node_says(deployed, tmp_path):
    _, node = deployed
    cache = CacheSettings(node="rotating", host_bytes=16 << 20, directory=str(tmp_path))
    CacheSecrets.generate(tmp_path / "secrets")
    found = []
    for grace_s in (60.0, 60.0, 0.0):
        secrets = SecretsSettings(tmp_path / "secrets", grace_s=grace_s)
        service = open_small(deployed, node=msgspec.structs.replace(node, secrets=secrets, cache=cache))
        try:
            found.append(ask(service, PROMPT).cached)
        finally:
            service.close()
        if len(found) == 1:
            complete_secrets(tmp_path / "secrets", rotate=True)
    assert found == [0, 64, 0]


def test_configured_headers_pass_and_others_are_refused(deployed):
    _, node = deployed
    service = open_small(
        deployed, node=msgspec.structs.replace(node, forwarded_headers=frozenset({"x-team"}))
    )
    try:
        tensors = {"input_ids": np.array([5, 6], np.int32), "max_tokens": np.array([1], np.int32)}
        for name, refused in (("X-Team", False), ("x-other", True)):
            caller = Caller()
            service.handle("r", lambda: tensors, {name: "a"}, sender=lambda generation, to=caller: to)
            assert isinstance(caller.wait().last.error, InvalidRequest) is refused
    finally:
        service.close()


def test_refusals_at_the_door_are_logged_with_id_and_reason(deployed, caplog):
    caplog.set_level(logging.INFO)
    service = open_small(deployed)
    try:
        assert isinstance(ask(service, []).last.error, InvalidRequest)
        service._loop.stop(drain_s=0.0)
        assert isinstance(ask(service, [5, 6]).last.error, Overloaded)
    finally:
        service.close()
    lines = [record.message for record in caplog.records if "refused" in record.message]
    assert [line.split(" release=")[0] for line in lines] == ["request id=r"] * 2
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["reason=InvalidRequest", "reason=Overloaded"]


def test_an_acl_file_that_appears_while_it_serves_closes_the_door(deployed, tmp_path):
    acl = tmp_path / "acl.toml"
    prompt = list(range(80, 10, -1))  # of no other test: blocks outlive a service
    credential, entry = new_key("a-1")
    public = AccessSettings(None, tmp_path / "public", awaited=acl)
    service = open_small(
        deployed, node=msgspec.structs.replace(deployed[1], access=public), access=False, lane_ttl_s=0.0
    )
    try:
        assert ask(service, prompt).last.error is None
        acl.write_text(
            '[principals.a]\nmodels = ["small"]\n[[principals.a.keys]]\n'
            f'id = "a-1"\nsha256 = "{entry.sha256}"\n'
        )
        acl.chmod(0o600)
        wait_until(lambda: isinstance(ask(service, prompt).last.error, AccessDenied))
        known = ask(service, prompt, api_key=credential)
        assert known.cached == 0, "what everybody had is nobody's now"
        assert known.last.error is None
        assert ask(service, prompt, api_key=credential).cached == 64
    finally:
        service.close()
