"""How a benchmark shows and keeps what it measured: tables of one kind, and JSON of one form."""

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
"""Columns of a table that goes into a file or a pipe."""
_LINE_WIDTH: Final = 1000


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=REPORT_WIDTH)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int | None], Callable[[], None]]]:
    """Gives a function that starts a bar of so many steps and gives a function that takes one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def start(name: str, total: int | None) -> Callable[[], None]:
            bar = bars.add_task(name, total=total)
            return lambda: bars.advance(bar)

        yield start


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> Table:
    """``num_left``: how many columns, the first ones, are words; the others are numbers."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        found.add_column(column, justify="left" if number < num_left else "right", no_wrap=number < num_left)
    for row in rows:
        found.add_row(*row)
    return found


def table_of(title: str, cells: Sequence[Mapping[str, Any]]) -> Table:
    """Table with a line for each of ``cells``, which have the same keys: these are the columns."""
    columns = [key.replace("_", " ") for key in cells[0]] if cells else []
    return table(title, columns, ([shown(value) for value in cell.values()] for cell in cells))


def shown(value: Any) -> str:
    """Text of a figure: of a spread the median, of a number as many digits as mean something."""
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
    """Write ``report`` so that two runs can be compared line by line: what is short stands in one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(report) + "\n")


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    """``write_json`` of ``report`` to ``out``, with the suffix .json, behind what its figures depend on."""
    write_json(out.with_suffix(".json"), {"facts": run_facts(), **report})


def _lines(value: Any) -> str:
    text = json.dumps(value, default=str)
    if len(text) <= _LINE_WIDTH or not isinstance(value, dict | list | tuple):
        return text
    if isinstance(value, dict):
        items = (f"{json.dumps(str(key))}: {_lines(inner)}" for key, inner in value.items())
        return "{\n" + ",\n".join(items) + "\n}"
    return "[\n" + ",\n".join(map(_lines, value)) + "\n]"
