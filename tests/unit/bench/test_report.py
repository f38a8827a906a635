"""What all benchmarks show and keep: figures as text, and JSON that can be compared line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tools.bench.facts import run_facts, spread
from tools.bench.report import shown, table_of, write_json


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "True"), (12345, "12,345"), (12199.3, "12,199"), (45.31, "45.3"), (0.954, "0.95")],
)
def test_a_figure_has_the_digits_that_mean_something(value: object, text: str) -> None:
    assert shown(value) == text
    if isinstance(value, float):
        assert shown(spread([value - 1, value, value + 2])) == text


def test_cells_are_a_table_and_a_line_each_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [{"item_bytes": 656, "us": spread([number + 0.5] * 3)} for number in range(30)]
    Console(width=100).print(table_of("some GPU", cells))
    printed = capsys.readouterr().out
    assert "item bytes" in printed
    assert printed.count(" 656 ") == 30
    path = tmp_path / "new" / "report.json"
    write_json(path, {"gpu": "some GPU", "cells": cells})
    assert json.loads(path.read_text()) == {"gpu": "some GPU", "cells": cells}
    assert path.read_text().count('\n{"item_bytes": 656') == 30


def test_the_commit_comes_from_the_environment_where_there_is_no_git(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run_facts()["commit"] != "sent"
    monkeypatch.setenv("SOURCE_COMMIT", "sent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (run_facts()["commit"], run_facts()["uncommitted_changes"]) == ("sent", None)
    monkeypatch.delenv("SOURCE_COMMIT")
    assert run_facts()["commit"] == "none"
