"""The table of numbers in the README is made from what the bench wrote."""

import json
from pathlib import Path

from scripts.readme_numbers import main

README = "# T\n<!-- numbers:begin -->\nold\n<!-- numbers:end -->\nrest\n"
ROWS = [
    {"name": "a.ratio", "value": 2.9134, "unit": "ratio", "goal": ">= 2.5", "met": True, "detail": "x"},
    {"name": "b_ms", "value": 7.0, "unit": "ms", "goal": "<= 5", "met": False, "detail": ""},
    {"name": "c", "value": None, "unit": "ratio", "goal": ">= 1", "met": None, "detail": "no peer"},
]


def test_numbers_replace_what_stands_between_the_marks(tmp_path: Path) -> None:
    readme, numbers = tmp_path / "README.md", tmp_path / "bench.json"
    readme.write_text(README)
    numbers.write_text(json.dumps(ROWS))
    for _ in range(2):  # again gives the same
        assert main(str(numbers), str(readme)) == 0
        assert readme.read_text() == (
            "# T\n<!-- numbers:begin -->\n"
            "| row | value | goal | met |\n|---|---:|---:|---|\n"
            "| a.ratio | 2.913 | >= 2.5 | yes |\n| b_ms | 7 ms | <= 5 | no |\n"
            "| c | – | >= 1 | not measured |\n"
            "<!-- numbers:end -->\nrest\n"
        )


def test_other_marks_take_a_heading_and_rows_without_a_goal(tmp_path: Path) -> None:
    readme, numbers = tmp_path / "README.md", tmp_path / "bench-gpu.json"
    readme.write_text(README + README.replace("numbers:", "gpu-numbers:"))
    known = {"name": "gpu.ms", "value": 1.5, "unit": "ms", "goal": "none", "met": None, "detail": ""}
    numbers.write_text(json.dumps([known, known | {"value": None}]))
    for _ in range(2):
        assert main(str(numbers), str(readme), "gpu-numbers", "NVIDIA H100") == 0
        assert readme.read_text() == README + (
            "# T\n<!-- gpu-numbers:begin -->\nNVIDIA H100\n\n"
            "| row | value | goal | met |\n|---|---:|---:|---|\n"
            "| gpu.ms | 1.5 ms | none | – |\n| gpu.ms | – | none | not measured |\n"
            "<!-- gpu-numbers:end -->\nrest\n"
        )


def test_without_a_bench_it_says_so(tmp_path: Path) -> None:
    assert main(str(tmp_path / "none.json"), str(tmp_path / "README.md")) == 1


def test_our_readme_has_the_marks() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    for marks in ("numbers", "gpu-numbers", "cluster-numbers", "tiers-numbers"):
        assert text.count(f"<!-- {marks}:begin -->") == text.count(f"<!-- {marks}:end -->") == 1
