"""Who is let in by an acl file, to what, until when; and that a refusal never says why."""

import itertools
import stat
from datetime import UTC, datetime

import pytest

from backend.access import AclAccess, Verb, open_acl_access, parse_acl, probe_credential
from backend.access.keys import digest_of
from backend.access.reason import Reason
from backend.errors import AccessDenied, ConfigError
from tests.backend.access.acl_rig import AclText, api_key

PROBE_SECRET = b"\x07" * 32
EXPIRES = datetime(2027, 1, 1, tzinfo=UTC).timestamp()


class Wall:
    """A clock that a test sets."""

    now = EXPIRES - 60

    def __call__(self):
        return self.now


@pytest.fixture
def text():
    return AclText()


@pytest.fixture
def opened(tmp_path, text):
    """`opened(model)`: an authoriser by the file as `text` says."""

    def open_it(model="smollm2", **options):
        return AclAccess(model, text.write(tmp_path / "acl.toml"), **options)

    return open_it


def refused(access, parameters, verb=Verb.INFER):
    with pytest.raises(AccessDenied) as raised:
        access.authorise(parameters, verb=verb)
    return raised.value


def test_a_caller_is_what_the_file_says(text, opened):
    text.principal(
        "search", 'namespace = "org"', "requests_per_s = 5", "concurrent = 2", "hide_cached_tokens = true",
        keys=["search-1"],
    )  # fmt: skip
    caller = opened().authorise(api_key(text.credentials["search-1"]), verb=Verb.INFER)
    assert (caller.principal, caller.namespace, caller.key_id) == ("search", "org", "search-1")
    assert (caller.allowance.requests_per_s, caller.allowance.concurrent) == (5, 2)
    assert caller.hides_cached_tokens
    assert not caller.probe_only


def test_both_ways_of_sending_a_credential_say_the_same(text, opened):
    text.principal("search", keys=["search-1"])
    access, credential = opened(), text.credentials["search-1"]
    by_header = access.authorise({"authorization": f"Bearer {credential}"}, verb=Verb.INFER)
    assert by_header is access.authorise(api_key(credential), verb=Verb.INFER)


def test_what_a_client_claims_to_be_is_not_read(text, opened):
    text.principal("search", keys=["search-1"]).principal("other", 'verbs = ["admin"]', keys=["other-1"])
    claims = {
        "principal": "other", "namespace": "other", "user": "other", "key_id": "other-1", "verbs": "admin",
        "x-principal": "other", "cache_salt": "other",
    }  # fmt: skip
    access, credential = opened(), text.credentials["search-1"]
    caller = access.authorise({**claims, **api_key(credential)}, verb=Verb.INFER)
    assert (caller.principal, caller.namespace) == ("search", "search")
    assert refused(access, claims).why is Reason.MISSING


def test_keys_rotate_two_are_good_then_one(text, opened):
    text.principal("search", keys=["old", "new"])
    access, old, new = opened(), *(text.credentials[key] for key in ("old", "new"))
    assert access.authorise(api_key(old), verb=Verb.INFER).principal == "search"
    assert access.authorise(api_key(new), verb=Verb.INFER).principal == "search"
    only_new = AclText().principal("search")
    entry = digest_of(new.partition(".")[2]).hex()
    text._parts = [str(only_new), f'[[principals.search.keys]]\nid = "new"\nsha256 = "{entry}"\n']
    access = opened()
    assert access.authorise(api_key(new), verb=Verb.INFER).key_id == "new"
    assert refused(access, api_key(old)).why is Reason.UNKNOWN_KEY


def test_a_key_is_good_until_it_expires(text, opened):
    text.principal("search", keys=[("short", "2027-01-01T00:00:00Z"), "long"])
    wall = Wall()
    access = opened(now=wall)
    short, long = (api_key(text.credentials[key]) for key in ("short", "long"))
    wall.now = EXPIRES - 0.001
    assert access.authorise(short, verb=Verb.INFER).key_id == "short"
    wall.now = EXPIRES
    denied = refused(access, short)
    assert (denied.why, denied.principal, denied.key_id) == (Reason.EXPIRED, "search", "short")
    assert access.authorise(long, verb=Verb.INFER).key_id == "long"


@pytest.mark.parametrize(
    ("globs", "model", "good"),
    [
        ('["smollm2"]', "smollm2", True),
        ('["smollm2"]', "smollm2-large", False),
        ('["other", "qwen*"]', "qwen3", True),
        ('["qwen?"]', "qwen30", False),
        ('["Qwen*"]', "qwen3", False),
        ('["[ab]"]', "b", True),
        ('["*"]', "anything", True),
    ],
)
def test_models_are_globs_in_which_case_counts(text, opened, globs, model, good):
    text.principal("search", models=globs, keys=["search-1"])
    access, credential = opened(model), api_key(text.credentials["search-1"])
    if good:
        assert access.authorise(credential, verb=Verb.INFER).principal == "search"
    else:
        denied = refused(access, credential)
        assert (denied.why, denied.principal, denied.key_id) == (Reason.MODEL, "search", "search-1")


@pytest.mark.parametrize(("allowed", "asked"), list(itertools.product(Verb, Verb)))
def test_a_verb_is_allowed_or_not(text, opened, allowed, asked):
    text.principal("search", f'verbs = ["{allowed}"]', keys=["search-1"])
    access, credential = opened(), api_key(text.credentials["search-1"])
    if allowed is asked:
        assert access.authorise(credential, verb=asked).verbs == {allowed}
    else:
        assert refused(access, credential, asked).why is Reason.VERB


def test_by_default_nobody_administers(text, opened):
    text.principal("search", keys=["search-1"])
    assert refused(opened(), api_key(text.credentials["search-1"]), Verb.ADMIN).why is Reason.VERB


def test_every_refusal_says_the_same(text, opened):
    text.principal("search", keys=["search-1", ("expired", "2020-01-01T00:00:00Z")])
    text.principal("elsewhere", models='["other"]', keys=["elsewhere-1"])
    access = opened(probe_secret=PROBE_SECRET)
    good = text.credentials["search-1"]
    wrong = good[:-1] + ("A" if good[-1] != "A" else "B")
    denials = [
        refused(access, {}),
        refused(access, api_key("nonsense")),
        refused(access, api_key(good.replace("search-1", "search-9"))),
        refused(access, api_key(wrong)),
        refused(access, api_key(text.credentials["expired"])),
        refused(access, api_key(text.credentials["elsewhere-1"])),
        refused(access, api_key(good), Verb.ADMIN),
        refused(access, {**api_key(good), "authorization": f"Bearer {wrong}"}),
        refused(access, api_key("@probe." + "00" * 32)),
        refused(access, api_key(probe_credential(PROBE_SECRET)), Verb.ADMIN),
    ]
    assert [denied.why for denied in denials] == [
        Reason.MISSING, Reason.MALFORMED, Reason.UNKNOWN_KEY, Reason.WRONG_SECRET, Reason.EXPIRED,
        Reason.MODEL, Reason.VERB, Reason.AMBIGUOUS, Reason.WRONG_SECRET, Reason.VERB,
    ]  # fmt: skip
    (said,) = {str(denied) for denied in denials}
    secret = good.partition(".")[2]
    for told in (*Reason, "search", "expired", secret, wrong):
        assert told not in said.replace("missing or not valid", "")
    assert not any(secret in repr(vars(denied)) for denied in denials)


def test_an_unknown_id_costs_the_same_as_a_wrong_secret(text):
    text.principal("search", keys=["search-1"])
    acl, good = parse_acl(str(text), "acl.toml"), text.credentials["search-1"]
    compared = []

    def compare(left, right):
        compared.append((len(left), len(right)))
        return left == right

    for credential in (good, f"search-1.{'A' * 43}", f"search-9.{'A' * 43}"):
        compared.append(credential.partition(".")[0])
        try:
            acl.find(credential, now=0, compare=compare)
        except AccessDenied:
            assert credential != good
        else:
            assert credential == good
    assert compared == ["search-1", (32, 32), "search-1", (32, 32), "search-9", (32, 32)]


def test_the_node_itself_may_probe_and_nothing_else(text, opened):
    text.principal("search", models='["other"]')
    access = opened(probe_secret=PROBE_SECRET)
    for parameters in (
        api_key(probe_credential(PROBE_SECRET)),
        {"authorization": f"Bearer {probe_credential(PROBE_SECRET)}"},
    ):
        caller = access.authorise(parameters, verb=Verb.INFER)
        assert (caller.principal, caller.namespace, caller.key_id) == ("@probe", "@probe", "")
        assert caller.probe_only
        assert caller.verbs == {Verb.INFER}
    assert refused(access, api_key(probe_credential(b"\x08" * 32))).why is Reason.WRONG_SECRET


def test_without_a_secret_of_the_node_nobody_probes(text, opened):
    access = opened()
    for secret in (b"", bytes(32), PROBE_SECRET):
        assert refused(access, api_key(probe_credential(secret))).why is Reason.WRONG_SECRET


def test_principals_are_counted(text, opened):
    text.principal("a").principal("b", models='["other"]')
    assert opened().principals == 2


def test_a_model_that_nobody_may_use_is_said(text, opened, caplog):
    text.principal("a", models='["other"]')
    opened()
    assert "no principal may use the model smollm2" in caplog.text


@pytest.mark.parametrize("state", ["missing", "broken", "writable", "folder"])
def test_without_a_good_file_nothing_is_opened(tmp_path, state):
    path = tmp_path / "acl.toml"
    if state == "folder":
        path.mkdir()
    elif state != "missing":
        path.write_text("[" if state == "broken" else "")
        path.chmod(0o666 if state == "writable" else 0o600)
    with pytest.raises(ConfigError, match=r"acl\.toml"):
        open_acl_access("smollm2", path)


def test_all_of_access_opens_and_closes(tmp_path, text):
    text.principal("a", "concurrent = 1", keys=["a-1"])
    path = text.write(tmp_path / "acl.toml")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    access = open_acl_access("smollm2", path)
    access.allowances.bound(4)
    caller = access.authoriser.authorise(api_key(text.credentials["a-1"]), verb=Verb.INFER)
    access.allowances.enter(caller)
    access.allowances.leave(caller, tokens=1)
    access.authoriser.close()
    access.authoriser.close()
