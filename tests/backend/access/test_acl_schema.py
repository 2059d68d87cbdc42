"""The format of acl.toml: what it means, and one line for whatever is wrong with it."""

import re
import tomllib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.access import Acl, Allowance, Verb, parse_acl
from backend.access.acl_schema import MAX_KEYS, MAX_NAMESPACES, MAX_PRINCIPALS
from backend.errors import ConfigError
from cachemgr import NamespaceShare

DIGEST = "ab" * 32
SECRET = "Sq9vT2mXw4LrB7nKc1ZpYd8GhJ5fEaU3oViR6tMs0kQ"
ONE = '[principals.search]\nmodels = ["m"]\n'
FULL = f"""
[principals.search]
namespace = "org.search_1-b"
models = ["smollm2", "qwen*"]
verbs = ["infer", "cache.write", "admin"]
requests_per_s = 50
tokens_per_s = 20000.5
concurrent = 32
hide_cached_tokens = true
[[principals.search.keys]]
id = "search-1"
sha256 = "{DIGEST}"
expires = 2027-01-01T02:00:00+02:00
[[principals.search.keys]]
id = "search-2"
sha256 = "{DIGEST.upper()}"
[principals."team@example"]
namespace = "team"
models = ["*"]
[namespaces."org.search_1-b"]
quota = 0.5
min_share = 0.1
"""


def key(text):
    return f"{ONE}[[principals.search.keys]]\n{text}\n"


def test_everything_that_can_be_said_is_read():
    acl = parse_acl(FULL, "acl.toml")
    search = acl.principals["search"]
    assert search.namespace == "org.search_1-b"
    assert search.models == ("smollm2", "qwen*")
    assert search.verbs == {Verb.INFER, Verb.CACHE_WRITE, Verb.ADMIN}
    assert search.allowance == Allowance(50.0, 20000.5, 32)
    assert search.hides_cached_tokens
    assert [(one.id, one.sha256, one.expires) for one in search.keys] == [
        ("search-1", DIGEST, datetime(2027, 1, 1, tzinfo=UTC)),
        ("search-2", DIGEST, None),
    ]
    assert acl.shares == {
        "org.search_1-b": NamespaceShare(quota=0.5, min_share=0.1),
        "team": NamespaceShare(quota=1.0, min_share=0.25),
    }


def test_what_is_not_said_has_a_default():
    acl = parse_acl(ONE, "acl.toml")
    search = acl.principals["search"]
    assert search.namespace == "search"
    assert search.verbs == {Verb.INFER, Verb.CACHE_READ, Verb.CACHE_WRITE}
    assert search.allowance == Allowance()
    assert not search.hides_cached_tokens
    assert search.keys == ()
    assert acl.shares == {"search": NamespaceShare(1.0, 0.5)}


def test_an_empty_file_lets_nobody_in():
    acl = parse_acl("", "acl.toml")
    assert not acl.principals
    assert not acl.shares


def test_a_default_share_is_never_above_the_quota():
    acl = parse_acl(f"{ONE}[namespaces.search]\nquota = 0.2\n", "acl.toml")
    assert acl.shares == {"search": NamespaceShare(0.2, 0.2)}


def test_who_cannot_write_to_the_cache_has_no_share_of_it():
    text = f'{ONE}[principals.ops]\nmodels = ["*"]\nverbs = ["admin"]\n'
    assert set(parse_acl(text, "acl.toml").shares) == {"search"}


def test_principals_may_have_one_namespace_together():
    text = "".join(f'[principals.p{n}]\nmodels = ["m"]\nnamespace = "all"\n' for n in range(3))
    assert parse_acl(text, "acl.toml").shares == {"all": NamespaceShare(1.0, 0.5)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("principals = 3", "principals: expected a table, found 3"),
        ("other = 1", "other: unknown key"),
        ("[principals]\na = 3", "principals.a: expected a table"),
        ("[principals.a]", "principals.a.models: must be given"),
        ("[principals.a]\nmodels = []", "principals.a.models: expected a list of length >= 1, found 0"),
        (
            '[principals.a]\nmodels = [""]',
            "principals.a.models[0]: expected str of length >= 1, found ''",
        ),
        ('[principals.a]\nmodels = "m"', "principals.a.models: expected a list, found 'm'"),
        ('[principals.""]\nmodels = ["m"]', "reserved"),
        ('[principals."@probe"]\nmodels = ["m"]', "principals.@probe: a name that is empty or begins with @"),
        ('[principals."a b"]\nmodels = ["m"]', "principals.a b: a name must be at most 63 printable"),
        ('[principals."a\\nb"]\nmodels = ["m"]', "principals.'a\\nb': a name must be"),
        ('[principals."a\\u202eb"]\nmodels = ["m"]', "principals.'a\\u202eb': a name must be"),
        (f'[principals.{"a" * 64}]\nmodels = ["m"]', "a name must be at most 63"),
        (
            '[principals.Search]\nmodels = ["m"]',
            "principals.Search.namespace: must be 1 to 63 characters of a-z, 0-9, ., _ and -, found 'Search' "
            "(by default it is the name of the principal)",
        ),
        (f'{ONE}namespace = ""', "principals.search.namespace: must be 1 to 63 characters"),
        (f'{ONE}namespace = "a/b"', "principals.search.namespace"),
        (f'{ONE}namespace = "@probe"', "principals.search.namespace"),
        (f'{ONE}namespace = "a\\n"', "principals.search.namespace"),
        (f"{ONE}namespaces = 1", "principals.search.namespaces: unknown key"),
        (f'{ONE}"a\\nb" = 1', "principals.search.'a\\nb': unknown key"),
        (f'{ONE}verbs = ["root"]', "expected one of infer, cache.read, cache.write, admin, found 'root'"),
        (f"{ONE}requests_per_s = 0", "principals.search.requests_per_s: expected float > 0.0, found 0"),
        (f"{ONE}requests_per_s = nan", "principals.search.requests_per_s: expected float > 0.0, found nan"),
        (f"{ONE}tokens_per_s = inf", "search.tokens_per_s: expected float <= 1000000000.0, found inf"),
        (f"{ONE}tokens_per_s = -1.5", "found -1.5"),
        (f"{ONE}requests_per_s = {'9' * 400}", "principals.search.requests_per_s: "),
        (f"{ONE}requests_per_s = {'9' * 5000}", "expected TOML, found: Exceeds the limit"),
        (f"{ONE}concurrent = 0", "principals.search.concurrent: expected int >= 1, found 0"),
        (f"{ONE}concurrent = 1.5", "found 1.5"),
        (f"{ONE}concurrent = true", "principals.search.concurrent: expected int, found True"),
        (f"{ONE}hide_cached_tokens = 1", "principals.search.hide_cached_tokens: expected bool, found 1"),
        (key(f'id = "A"\nsha256 = "{DIGEST}"'), "search.keys[0].id: must be 1 to 63 characters of a-z"),
        (key(f'sha256 = "{DIGEST}"'), "principals.search.keys[0].id: must be given"),
        (key('id = "a"'), "principals.search.keys[0].sha256: must be given"),
        (key(f'id = "a"\nsha256 = "{DIGEST[1:]}"'), "keys[0].sha256: expected 64 hexadecimal digits"),
        (key(f'id = "a"\nsha256 = "{DIGEST}\\n"'), "keys[0].sha256: expected 64 hexadecimal digits"),
        (
            key(f'id = "a"\nsha256 = "{DIGEST}"\nexpires = 2027-01-01T00:00:00'),
            "principals.search.keys[0].expires: expected a time with an offset, such as 2027-01-01T00:00:00Z",
        ),
        (key(f'id = "a"\nsha256 = "{DIGEST}"\nexpires = 2027-01-01'), "keys[0].expires: expected datetime"),
        (
            key(f'id = "a"\nsha256 = "{DIGEST}"') + key(f'id = "a"\nsha256 = "{DIGEST}"').removeprefix(ONE),
            "principals.search.keys[1].id: must be unique in the file, a is one of principals.search already",
        ),
        (
            "".join(
                key(f'id = "k"\nsha256 = "{DIGEST}"').replace("search", name) for name in "ab"
            ),
            "principals.b.keys[0].id: must be unique in the file, k is one of principals.a already",
        ),
        (f"{ONE}[namespaces.other]", "other: no principal that may cache.write has this namespace: remove"),
        (f"{ONE}[namespaces.search]\nquota = 0", "namespaces.search.quota: expected float > 0.0, found 0"),
        (f"{ONE}[namespaces.search]\nquota = 1.1", "search.quota: expected float <= 1.0, found 1.1"),
        (f"{ONE}[namespaces.search]\nmin_share = nan", "namespaces.search.min_share: expected float >= 0.0"),
        (f"{ONE}[namespaces.search]\nshare = 1", "namespaces.search.share: unknown key"),
        (
            f"{ONE}[namespaces.search]\nquota = 0.1\nmin_share = 0.2",
            "namespaces.search.min_share: must be at most the quota 0.1, found 0.2",
        ),
        (
            f"{ONE}[namespaces.search]\nmin_share = 0.95",
            "namespaces: all min_share together must be at most 0.9, found 0.95 (one that is not said is 0.5",
        ),
        ("[principals.a\n", "expected TOML, found: "),
        ("[a]\n[a]", "expected TOML, found: "),
        ("a = " + "[" * 5000, "expected TOML, found: nested too deep"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_one_line(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        parse_acl(text, "acl.toml")
    line = str(raised.value)
    assert line.startswith("acl.toml: ")
    assert line.isprintable()
    assert len(line) < 400


@pytest.mark.parametrize(
    "entry",
    [
        f'id = "search-1.{SECRET}"\nsha256 = "{DIGEST}"',
        f'id = "search-1"\nsha256 = "{SECRET}"',
        f'id = "search-1"\nsha256 = "{DIGEST}"\nexpires = "{SECRET}"',
        f'id = "search-1"\nsha256 = "{DIGEST}"\nsecret = "{SECRET}"',
        f'id = ["{SECRET}"]\nsha256 = "{DIGEST}"',
    ],
)
def test_a_secret_at_the_wrong_place_is_not_quoted(entry):
    with pytest.raises(ConfigError, match=r"principals\.search\.keys\[0\]") as raised:
        parse_acl(key(entry), "acl.toml")
    assert SECRET not in str(raised.value)


def test_a_credential_in_the_place_of_a_table_is_not_quoted():
    with pytest.raises(ConfigError) as raised:
        parse_acl(f'{ONE}keys = ["search-1.{SECRET}"]', "acl.toml")
    assert SECRET not in str(raised.value)


def test_principals_are_counted():
    table = "[principals.p{}]\nmodels = ['m']\nnamespace = 'all'\n"
    many = [table.format(number) for number in range(MAX_PRINCIPALS + 1)]
    assert len(parse_acl("".join(many[:-1]), "acl.toml").principals) == MAX_PRINCIPALS
    with pytest.raises(ConfigError, match="principals: at most 1024, found 1025"):
        parse_acl("".join(many), "acl.toml")


def test_namespaces_are_counted():
    many = [f"[principals.p{number}]\nmodels = ['m']\n" for number in range(MAX_NAMESPACES + 1)]
    assert len(parse_acl("".join(many[:-1]), "acl.toml").shares) == MAX_NAMESPACES
    with pytest.raises(ConfigError, match="principals: at most 64 namespaces, found 65"):
        parse_acl("".join(many), "acl.toml")


def test_keys_of_a_principal_are_counted():
    many = [
        f"[[principals.search.keys]]\nid = 'k{number}'\nsha256 = '{DIGEST}'\n"
        for number in range(MAX_KEYS + 1)
    ]
    assert len(parse_acl(ONE + "".join(many[:-1]), "acl.toml").principals["search"].keys) == MAX_KEYS
    with pytest.raises(ConfigError, match=r"principals\.search\.keys: expected a list of length <= 16"):
        parse_acl(ONE + "".join(many), "acl.toml")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_min_shares_never_promise_more_than_there_is(shares):
    text = "".join(
        f"[principals.p{n}]\nmodels = ['m']\n[namespaces.p{n}]\nmin_share = {share!r}\n"
        for n, share in enumerate(shares)
    )
    try:
        acl = parse_acl(text, "acl.toml")
    except ConfigError:
        assert sum(shares) > 0.9
    else:
        assert sum(share.min_share for share in acl.shares.values()) <= 0.9 + 1e-6


def outcome_of(text):
    """The error's text, or "" for an Acl."""
    try:
        assert isinstance(parse_acl(text, "acl.toml"), Acl)
    except ConfigError as error:
        return str(error)
    return ""


_TOML = st.recursive(
    st.one_of(
        st.text(max_size=8),
        st.integers(),
        st.floats(),
        st.booleans(),
        st.datetimes(),
        st.sampled_from(["m", "infer", DIGEST]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["search", "models", "keys", "id", "sha256", "namespace", "verbs", "quota", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["principals", "namespaces", "other"]), _TOML, max_size=3))
def test_no_table_brings_anything_but_an_acl_or_a_config_error(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tomllib, "loads", lambda text: data)
        assert outcome_of("").isprintable()


@given(st.text(max_size=200))
def test_no_text_brings_anything_but_an_acl_or_a_config_error(text):
    assert outcome_of(text).isprintable()
