"""Tables, progress bars and JSON files for what a benchmark measured; all of ``tools.bench`` reports with
it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.bench.facts import run_facts

REPORT_WIDTH: Final = 190
"""Width in characters of a table that goes into a file or a pipe."""
_LINE_WIDTH: Final = 1000
"""Longest JSON value that stays on one line of a file."""


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=REPORT_WIDTH)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int | None], Callable[[], None]]]:
    """Yield a function that starts a bar of a number of steps; it returns a function that takes one step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def start(name: str, total: int | None) -> Callable[[], None]:
            bar = bars.add_task(name, total=total)
            return lambda: bars.advance(bar)

        yield start


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> Table:
    """Return a table. ``num_left``: how many of the first columns are words; the others are numbers."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        found.add_column(column, justify="left" if number < num_left else "right", no_wrap=number < num_left)
    for row in rows:
        found.add_row(*row)
    return found


def table_of(title: str, cells: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a line for each of ``cells`` and a column for each of their keys, which are the
    same."""
    columns = [key.replace("_", " ") for key in cells[0]] if cells else []
    return table(title, columns, ([shown(value) for value in cell.values()] for cell in cells))


def shown(value: Any) -> str:
    """Return the text of a figure: the median of a spread, a number with its significant digits."""
    match value:
        case None:
            return ""
        case {"median": median}:
            return shown(median)
        case float():
            return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2}f}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
        case _:
            return str(value)


def write_json(path: Path, report: Any) -> None:
    """Write ``report`` as JSON with short values on one line, so that two runs can be compared line by
    line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(report) + "\n")


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    """Write ``report`` to ``out`` with the suffix .json, after the facts that its figures depend on."""
    write_json(out.with_suffix(".json"), {"facts": run_facts(), **report})


def _lines(value: Any) -> str:
    text = json.dumps(value, default=str)
    if len(text) <= _LINE_WIDTH or not isinstance(value, dict | list | tuple):
        return text
    if isinstance(value, dict):
        items = (f"{json.dumps(str(key))}: {_lines(inner)}" for key, inner in value.items())
        return "{\n" + ",\n".join(items) + "\n}"
    return "[\n" + ",\n".join(map(_lines, value)) + "\n]"
