"""Puts both engines' figures side by side, as rows, a table and notes.

``__main__.py`` makes cells of each turn, in which one engine had the GPU, and at the end rows of all cells. A
cell has one engine's figures, a row those of both. Figures that were not measured are None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from tools.bench.beside_sglang.scheduler_log import CellLog, prefill_rate
from tools.bench.beside_sglang.turns import Turn
from tools.bench.report import table_of

STEPS: Final = ("step_ms", "tokens_a_second", "misses_a_token", "mb_a_step")


def our_cells(turn: Turn, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a report of ``tools.bench.decode_step``."""
    return [
        _cell(turn, row["batch"], row["step_ms"], row["misses_a_token"], row["mb_a_step"])
        for row in report["rows"]
    ]


def sglang_cells(
    turn: Turn, cells: Iterable[CellLog], bytes_per_miss: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return SGLang's cells whose batches were full, and a line for each other one that says why not.

    Misses are what the GPU received over PCIe, divided by ``bytes_per_miss``; dense cells have none.
    """
    found, dropped = [], []
    for cell in cells:
        if cell.problem:
            dropped.append(f"sglang {turn.mode} {cell.batch} at {turn.context}: dropped, {cell.problem}")
            continue
        step_ms = cell.step_ms()
        rate = (cell.measured or {}).get("pcie_bytes_a_second")
        step_bytes = None if rate is None else rate * step_ms / 1e3
        misses = None
        if turn.mode == "hisparse" and step_bytes is not None:
            misses = step_bytes / bytes_per_miss / cell.batch
        megabytes = None if step_bytes is None else step_bytes / 1e6
        found.append(_cell(turn, cell.batch, step_ms, misses, megabytes))
    return found, dropped


def prefill_cells(turn: Turn, rate: float | None) -> list[dict[str, Any]]:
    """Return the prefill rate of a turn as a list of one cell, or none where there is no rate."""
    shared = {"engine": turn.engine, "mode": turn.mode, "context": turn.context}
    return [] if rate is None else [{**shared, "prefill_tokens_a_second": rate}]


def sglang_prefill(turn: Turn, cells: Sequence[CellLog], chunk: int) -> list[dict[str, Any]]:
    """Return SGLang's prefill rate in chunks of ``chunk`` tokens as ``prefill_cells`` does."""
    return prefill_cells(turn, prefill_rate(cells, chunk))


def beside(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each mode, context and batch: our figures, SGLang's, and its step time divided by
    ours."""
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        key = cell["context"], cell["mode"], cell["batch"]
        rows.setdefault(key, {})[cell["engine"]] = dict(cell)
    return [
        _row({"context": context, "mode": mode, "batch": batch}, engines, STEPS, "step_ms")
        for (context, mode, batch), engines in sorted(rows.items())
    ]


def prefill_beside(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each mode and context with both rates, and ours divided by SGLang's."""
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault((cell["context"], cell["mode"]), {})[cell["engine"]] = dict(cell)
    name = "prefill_tokens_a_second"
    found = []
    for (context, mode), engines in sorted(rows.items()):
        row = _row({"context": context, "mode": mode}, engines, (name,), name)
        # ``_row`` divides SGLang's figure by ours; of rates, unlike times, the larger one is better.
        row["ratio"] = None if row["ratio"] is None else 1 / row["ratio"]
        found.append(row)
    return found


def steps_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of steps. A ratio above 1 says that ours is faster, in both tables."""
    columns = ("context", "mode", "batch", "ours_step_ms", "sglang_step_ms", "ratio")
    more = ("ours_tokens_a_second", "sglang_tokens_a_second", "ours_misses_a_token", "sglang_misses_a_token")
    return table_of(title, [{name: row[name] for name in (*columns, *more)} for row in rows])


def _row(
    key: dict[str, Any], engines: Mapping[str, Mapping[str, Any]], names: Sequence[str], compared: str
) -> dict[str, Any]:
    """Return the row at ``key`` with the figures ``names``, and SGLang's ``compared`` divided by ours."""
    row = {f"{engine}_{n}": engines.get(engine, {}).get(n) for n in names for engine in ("ours", "sglang")}
    ours, theirs = row[f"ours_{compared}"], row[f"sglang_{compared}"]
    return {**key, **row, "ratio": theirs / ours if ours and theirs else None}


def _cell(
    turn: Turn, batch: int, step_ms: float, misses: float | None, megabytes: float | None
) -> dict[str, Any]:
    return {
        "engine": turn.engine,
        "mode": turn.mode,
        "context": turn.context,
        "batch": batch,
        "step_ms": step_ms,
        "tokens_a_second": 1e3 * batch / step_ms,
        "misses_a_token": misses,
        "mb_a_step": megabytes,
    }
