"""Plots: files that are what they say, the same bytes each time, and text that shows every line."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.errors import UsageError
from scripts.plots import Line, hit_rates_text, save_hit_rates, save_ttft_by_tier

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    Line("lru", [1000, 5859, 20_000], [0.04, 0.13, 0.28]),
    Line("lfu", [1000, 5859, 20_000], [0.05, 0.10, 0.21]),
    Line("ours", [1000, 5859, 20_000], [0.08, 0.21, 0.30], strong=True),
]
DRAWN: list[Callable[[Path], None]] = [
    lambda path: save_hit_rates(path, LINES, title="a trace"),
    lambda path: save_ttft_by_tier(
        path, {"host": 31.0, "redis": 80.5, "computed": 914.0}, title="1,024 tokens"
    ),
]


@pytest.mark.parametrize("draw", DRAWN)
def test_files_are_what_their_names_say(draw: Callable[[Path], None], tmp_path: Path) -> None:
    draw(tmp_path / "deep" / "plot.png")
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    draw(tmp_path / "plot.svg")
    assert ElementTree.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")
    with pytest.raises(UsageError, match=r"ends in \.png or \.svg, got .*plot\.gif"):
        draw(tmp_path / "plot.gif")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "plot.svg"]


@pytest.mark.parametrize("draw", DRAWN)
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_same_data_same_bytes(draw: Callable[[Path], None], suffix: str, tmp_path: Path) -> None:
    first, second = tmp_path / f"1{suffix}", tmp_path / f"2{suffix}"
    draw(first)
    draw(second)
    assert first.read_bytes() == second.read_bytes()


def test_text_shows_every_line_and_capacity() -> None:
    text = hit_rates_text(LINES, width=70)
    rows = text.splitlines()
    assert rows[-1] == "l lru   f lfu   o ours"
    assert all(text.count(letter) > 20 for letter in "lfo")
    assert all(tick in text for tick in ("1,000", "5,859", "20,000"))
    assert max(map(len, rows)) <= 70
    assert "\x1b" not in text


def test_many_lines_and_capacities() -> None:
    xs = [2.0**at for at in range(30)]
    lines = [Line("same name", xs, [at / 100 + x / 2**31 for x in xs]) for at in range(30)]
    text = hit_rates_text(lines, width=100)
    assert text.splitlines()[-1].count("same name") == 30
    assert "4,096" in text


def test_nothing_is_imported_before_it_is_drawn(tmp_path: Path) -> None:
    code = (
        "import sys, scripts.plots as p, pathlib; before = {'matplotlib', 'plotext'} & set(sys.modules);"
        f"path = pathlib.Path({str(tmp_path / 'a.png')!r});"
        "p.save_hit_rates(path, [p.Line('a', [1, 2], [.1, .2])], title='t');"
        "print(sorted(before), 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[] False"
