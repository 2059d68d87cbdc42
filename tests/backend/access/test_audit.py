"""The audit log: one line per refusal and per command; no flood of them, and no secret in any."""

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.access import AUDIT_LOGGER, EVERYBODY, AclAccess, AuditLog, Reason, Verb, new_key, open_access
from backend.access.audit import MAX_LINES_PER_S
from backend.errors import AccessDenied, InvalidRequest
from tests.backend.access.acl_rig import AclText, api_key

CREDENTIAL, _ = new_key("search-1")
SECRET = CREDENTIAL.partition(".")[2]
DENIED = AccessDenied(Reason.EXPIRED, principal="search", key_id="search-1")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def audit(clock, caplog):
    caplog.set_level(logging.INFO)
    return AuditLog("smollm2", clock=clock)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == AUDIT_LOGGER]


def test_a_refusal_is_one_line(audit, caplog):
    audit.refused("r-7", DENIED)
    audit.refused("", AccessDenied(Reason.MISSING))
    assert lines(caplog) == [
        "refused id=r-7 model=smollm2 principal=search key=search-1 reason=expired",
        "refused id=- model=smollm2 principal=- key=- reason=missing",
    ]


@pytest.mark.parametrize("forged", ["a b", "a\nrefused id=x", "a principal=admin key=x", "\u202ea", "'a b"])
def test_an_id_of_a_client_forges_nothing(audit, caplog, forged):
    audit.refused(forged, DENIED)
    (line,) = lines(caplog)
    assert line.isprintable()
    assert line == f"refused id={forged!r} model=smollm2 principal=search key=search-1 reason=expired"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request_id=st.text())
def test_every_line_is_one_of_bounded_length(audit, clock, caplog, request_id):
    clock.now += 1
    caplog.clear()
    audit.refused(request_id, DENIED)
    (line,) = lines(caplog)
    assert line.isprintable()
    assert len(line) < 2000
    assert line.endswith(" model=smollm2 principal=search key=search-1 reason=expired")


def test_a_command_shows_its_name_alone(audit, caplog):
    audit.commanded(
        "r-7", EVERYBODY, f'{{"command": "public.add", "name": "n", "note": "{CREDENTIAL}"}}', "done"
    )
    assert lines(caplog) == ["command id=r-7 model=smollm2 principal=- key=- command=public.add outcome=done"]


@pytest.mark.parametrize(
    "command",
    ["", "public.add", '{"command": 3}', "[]", "{", "[" * 100_000, '{"command": "\ud800"}', f'"{CREDENTIAL}"',
     f'{{"command": "{CREDENTIAL}"}}', '{"command": "a\\nb"}', '{"command": "x"}' + " " * (1 << 20)],
    ids=range(11),
)  # fmt: skip
def test_a_command_that_is_none_is_not_shown(audit, caplog, command):
    audit.commanded("r-7", EVERYBODY, command, "done")
    assert lines(caplog) == ["command id=r-7 model=smollm2 principal=- key=- command=unreadable outcome=done"]


def test_what_was_wrong_is_said_without_the_value(audit, caplog):
    audit.commanded("r-7", EVERYBODY, CREDENTIAL, str(InvalidRequest("admin", "must be JSON", CREDENTIAL)))
    (line,) = lines(caplog)
    assert line.endswith("command=unreadable outcome=admin: must be JSON")


def test_a_flood_is_counted_and_not_written(audit, clock, caplog):
    for _ in range(1_000):
        audit.refused("r", DENIED)
    assert len(lines(caplog)) == MAX_LINES_PER_S
    clock.now += 0.99
    audit.settle()
    assert len(lines(caplog)) == MAX_LINES_PER_S
    clock.now += 0.01
    audit.settle()
    audit.settle()
    assert lines(caplog)[MAX_LINES_PER_S:] == [
        f"refused {1_000 - MAX_LINES_PER_S} more model=smollm2: too many for a line each"
    ]


def test_the_next_refusal_says_what_was_left_out_before(audit, clock, caplog):
    for _ in range(MAX_LINES_PER_S + 3):
        audit.refused("r", DENIED)
    clock.now += 1
    audit.refused("next", DENIED)
    more, line = lines(caplog)[MAX_LINES_PER_S:]
    assert more.startswith("refused 3 more ")
    assert "id=next" in line


def test_few_refusals_leave_nothing_out(audit, clock, caplog):
    for _ in range(3):
        for _ in range(MAX_LINES_PER_S):
            audit.refused("r", DENIED)
        clock.now += 1
    audit.settle()
    assert len(lines(caplog)) == 3 * MAX_LINES_PER_S


def test_commands_are_written_in_a_flood(audit, caplog):
    for _ in range(MAX_LINES_PER_S):
        audit.refused("r", DENIED)
    audit.commanded("r", EVERYBODY, '{"command": "hot"}', "done")
    assert "command=hot" in lines(caplog)[-1]


def test_no_credential_in_any_log_whatever_is_done_with_it(tmp_path, audit, caplog):
    caplog.set_level(logging.DEBUG)
    text = AclText().principal("search", keys=["search-1"])
    good = text.credentials["search-1"]
    access = AclAccess("smollm2", text.write(tmp_path / "acl.toml"))
    wrong = good[:-1] + ("A" if good[-1] != "A" else "B")
    for parameters in (
        api_key(wrong), {"api_key": good, "Api_Key": good}, {"authorization": f"Basic {good}"},
        {"authorization": f"Bearer {wrong}"}, api_key(good.replace("search-1", "search-9")),
        api_key([good]), api_key(good.upper()),
    ):  # fmt: skip
        with pytest.raises(AccessDenied) as raised:
            access.authorise(parameters, verb=Verb.INFER)
        audit.refused("r", raised.value)
    with pytest.raises(AccessDenied) as raised:
        access.authorise(api_key(good), verb=Verb.ADMIN)
    audit.refused("r", raised.value)
    path = tmp_path / "acl.toml"
    path.write_text(path.read_text().replace('id = "search-1"', f'id = "{good}"'))
    for _ in range(2):
        access.watch.look()
    assert len(lines(caplog)) == 8
    assert "keys[0].id" in caplog.text
    for secret in (good.partition(".")[2], wrong.partition(".")[2]):
        assert secret not in caplog.text


def test_without_an_acl_file_nobody_administers_and_one_line_warns(caplog):
    access = open_access("m")
    assert access.authoriser.authorise({}, verb=Verb.INFER) is EVERYBODY
    with pytest.raises(AccessDenied) as raised:
        access.authoriser.authorise(api_key(CREDENTIAL), verb=Verb.ADMIN)
    assert raised.value.why is Reason.ACCESS_OFF
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "access control is off" in caplog.text
