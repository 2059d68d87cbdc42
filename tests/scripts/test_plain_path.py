"""Folders with names that Triton cannot take get a name that it can."""

from pathlib import Path

import pytest

from scripts.errors import UsageError
from scripts.plain_path import plain_path


def test_a_plain_path_stays(tmp_path: Path) -> None:
    with plain_path(tmp_path) as plain:
        assert plain == tmp_path


@pytest.mark.parametrize("name", ["spa ce", "fox🦊", "ü", "it's", "a;b", "$HOME", "a&b", 'q"', "line\nbreak"])
def test_any_other_is_reached_through_a_link_that_goes_away(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "inside").touch()
    links = tmp_path / "links"
    links.mkdir()
    with plain_path(folder, links=links) as plain:
        assert str(plain).startswith(str(links))
        assert plain.name == "home"
        assert (plain / "inside").exists()
        assert plain.parent.stat().st_mode & 0o077 == 0
    assert list(links.iterdir()) == []
    assert (folder / "inside").exists()


def test_links_in_no_better_a_place_are_refused_in_one_line(tmp_path: Path) -> None:
    links = tmp_path / "temporary files"
    links.mkdir()
    with (
        pytest.raises(UsageError, match=r"^Triton cannot serve from .*/spa ce: .*TMPDIR=/tmp or .*--home$"),
        plain_path(tmp_path / "spa ce", links=links),
    ):
        raise AssertionError("refused before")
