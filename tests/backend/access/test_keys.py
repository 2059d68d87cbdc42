"""Credentials: what they look like, and what a file keeps of them."""

import hashlib
import re
from datetime import UTC, datetime

import pytest

from backend.access import KeyEntry, new_key, split_credential
from backend.access.keys import is_secret_of
from backend.access.reason import Reason
from backend.errors import AccessDenied, ConfigError

SECRET = "A" * 43


def test_a_new_key_is_an_id_and_256_random_bits():
    (credential, entry), (other, _) = new_key("search-1"), new_key("search-1")
    key_id, secret = split_credential(credential)
    assert key_id == entry.id == "search-1"
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", secret)
    assert entry.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert credential != other


def test_as_much_randomness_is_asked_for_as_a_key_has():
    asked = []

    def random_text(nbytes):
        asked.append(nbytes)
        return SECRET

    assert new_key("a", random_text=random_text)[0] == f"a.{SECRET}"
    assert asked == [32]


def test_an_entry_shows_neither_secret_nor_digest():
    credential, entry = new_key("a")
    assert credential.partition(".")[2] not in repr(entry)
    assert entry.sha256 not in repr(entry)
    assert repr(entry.digest) not in repr(entry)


@pytest.mark.parametrize("key_id", ["", "A", "a.b", "@probe", "a b", "a\n", "ä", "a" * 64])
def test_an_id_must_be_one(key_id):
    with pytest.raises(ConfigError, match="key id: must be 1 to 63 characters"):
        new_key(key_id)


def test_a_key_cannot_expire_at_a_time_of_nowhere():
    with pytest.raises(ConfigError, match="expires must have an offset"):
        new_key("a", expires=datetime(2027, 1, 1))


def test_a_key_expires_at_its_very_second():
    expires = datetime(2027, 1, 1, tzinfo=UTC)
    entry = KeyEntry("a", b"", expires)
    assert not entry.expired(expires.timestamp() - 0.001)
    assert entry.expired(expires.timestamp())
    assert not KeyEntry("a", b"").expired(1e12)


@pytest.mark.parametrize(
    "credential",
    ["", ".", "a", "a.", f".{SECRET}", f"a.{SECRET}A", f"a.{SECRET[1:]}", f"a.{SECRET[1:]}=", f"a.{SECRET}\n",
     f"A.{SECRET}", f"a.b.{SECRET}", f"a.{SECRET[1:]}ä", f"@probe.{SECRET}"],
)  # fmt: skip
def test_what_has_another_form_is_no_credential(credential):
    with pytest.raises(AccessDenied) as raised:
        split_credential(credential)
    assert raised.value.why is Reason.MALFORMED


def test_one_secret_alone_is_right():
    credential, entry = new_key("a")
    secret = credential.partition(".")[2]
    assert is_secret_of(entry, secret)
    assert not is_secret_of(entry, SECRET)
    assert not is_secret_of(None, secret)


def test_an_unknown_key_is_no_even_if_all_compares_equal():
    assert not is_secret_of(None, SECRET, compare=lambda left, right: True)
