"""A target that crashes, for the test of the runner."""

EXAMPLES = (b"?",)


def target(data: bytes) -> None:
    assert b"!" not in data, "found"
