"""Which of a request's parameters are read as its credential."""

import pytest

from backend.access.credential import read_credential
from backend.access.reason import Reason
from backend.errors import AccessDenied

GOOD = f"search-1.{'A' * 43}"
OTHER = f"search-2.{'A' * 43}"


@pytest.mark.parametrize(
    "parameters",
    [
        {"api_key": GOOD},
        {"API_Key": GOOD},
        {"api_key": f" \t{GOOD} "},
        {"authorization": f"Bearer {GOOD}"},
        {"Authorization": f"bearer {GOOD}"},
        {"AUTHORIZATION": f"  BEARER \t {GOOD}\t "},
        {"authorization": f"Bearer {GOOD}", "api_key": GOOD},
        {"api_key": GOOD, "principal": "admin", "namespace": "other", "x-user": OTHER, "user": OTHER},
    ],
)
def test_it_is_found(parameters):
    assert read_credential(parameters) == GOOD


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({}, Reason.MISSING),
        ({"authorisation": f"Bearer {GOOD}"}, Reason.MISSING),
        ({"api-key": GOOD}, Reason.MISSING),
        ({"api_key": None}, Reason.MALFORMED),
        ({"api_key": 7}, Reason.MALFORMED),
        ({"api_key": "@probe.\ud800"}, Reason.MALFORMED),
        ({"api_key": True}, Reason.MALFORMED),
        ({"api_key": GOOD.encode()}, Reason.MALFORMED),
        ({"api_key": [GOOD]}, Reason.MALFORMED),
        ({"api_key": GOOD + " " * 257}, Reason.MALFORMED),
        ({"authorization": GOOD}, Reason.MALFORMED),
        ({"authorization": f"Basic {GOOD}"}, Reason.MALFORMED),
        ({"authorization": "Bearer"}, Reason.MALFORMED),
        ({"authorization": "Bearer "}, Reason.MALFORMED),
        ({"authorization": f"Bearer{GOOD}"}, Reason.MALFORMED),
        ({"authorization": f"Bearer {GOOD} {GOOD}"}, Reason.MALFORMED),
        ({"authorization": f"Bearer\n{GOOD}"}, Reason.MALFORMED),
        ({"authorization": f"Basic {GOOD}", "api_key": GOOD}, Reason.MALFORMED),
        ({"authorization": f"Bearer {GOOD}", "Authorization": f"Bearer {GOOD}"}, Reason.AMBIGUOUS),
        ({"api_key": GOOD, "Api_Key": GOOD}, Reason.AMBIGUOUS),
        ({"authorization": f"Bearer {GOOD}", "api_key": OTHER}, Reason.AMBIGUOUS),
        ({"authorization": f"Bearer {GOOD}", "api_key": ""}, Reason.AMBIGUOUS),
    ],
)
def test_it_is_refused(parameters, reason):
    with pytest.raises(AccessDenied) as raised:
        read_credential(parameters)
    assert raised.value.why is reason
