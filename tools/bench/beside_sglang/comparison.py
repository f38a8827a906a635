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

STEPS: Final = ("step_ms", "tokens_a_step", "tokens_a_second", "misses_a_token", "mb_a_step")
HTTP: Final = (
    *("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tokens_a_second"),
    *("num_requests", "cached_tokens", "client_cpu_share"),
)


def our_cells(turn: Turn, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a report of ``tools.bench.decode_step``."""
    return [
        _cell(
            turn, row["batch"], row["step_ms"], row["tokens_a_step"], row["misses_a_token"], row["mb_a_step"]
        )
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
        found.append(_cell(turn, cell.batch, step_ms, cell.tokens_a_step, misses, megabytes))
    return found, dropped


def prefill_cells(turn: Turn, rate: float | None) -> list[dict[str, Any]]:
    """Return the prefill rate of a turn as a list of one cell, or none where there is no rate."""
    shared = {"engine": turn.engine, "mode": turn.mode, "context": turn.context}
    return [] if rate is None else [{**shared, "prefill_tokens_a_second": rate}]


def sglang_prefill(turn: Turn, cells: Sequence[CellLog], chunk: int) -> list[dict[str, Any]]:
    """Return SGLang's prefill rate in chunks of ``chunk`` tokens as ``prefill_cells`` does."""
    return prefill_cells(turn, prefill_rate(cells, chunk))


def http_cell(turn: Turn, cached: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cell of a point of ``tools.bench.serve``. ``cached``: how much of the prompts the server had
    seen, "nothing" or "all"."""
    ttft, tpot = point["ttft_secs"], point["tpot_secs"]
    return {
        "engine": turn.engine,
        "mode": turn.mode,
        "context": turn.context,
        "cached": cached,
        "clients": point["concurrency"],
        "num_requests": point["num_requests"],
        "ttft_p50_ms": 1e3 * ttft["p50"],
        "ttft_p99_ms": 1e3 * ttft["p99"],
        "tpot_p50_ms": 1e3 * tpot["p50"] if tpot else None,
        "tokens_a_second": point["output_tokens_per_sec"],
        "cached_tokens": point["mean_cached_tokens"],
        "client_cpu_share": point["client_cpu_share"],
    }


def beside(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each mode, context and batch: our figures, SGLang's, and our tokens a second divided
    by its, which is its step time divided by ours where steps make as many tokens."""
    rows = _rows(cells, ("context", "mode", "batch"), STEPS)
    return [
        {**row, "ratio": _ratio(*(row[f"{engine}_tokens_a_second"] for engine in ("ours", "sglang")))}
        for row in rows
    ]


def prefill_beside(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each mode and context with both rates, and ours divided by SGLang's."""
    name = "prefill_tokens_a_second"
    rows = _rows(cells, ("context", "mode"), (name,))
    return [{**row, "ratio": _ratio(row[f"ours_{name}"], row[f"sglang_{name}"])} for row in rows]


def http_beside(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each mode, context, state of the caches and number of clients, with the ratios of
    medians of TTFT (SGLang's by ours) and of tokens a second (ours by SGLang's)."""
    return [
        {
            **row,
            "ttft_ratio": _ratio(row["sglang_ttft_p50_ms"], row["ours_ttft_p50_ms"]),
            "tokens_ratio": _ratio(row["ours_tokens_a_second"], row["sglang_tokens_a_second"]),
        }
        for row in _rows(cells, ("context", "mode", "cached", "clients"), HTTP)
    ]


def steps_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of steps. A ratio above 1 says that ours is faster, in all tables."""
    columns = ("context", "mode", "batch", "ours_step_ms", "sglang_step_ms", "ratio")
    more = ("tokens_a_step", "tokens_a_second", "misses_a_token")
    named = [f"{engine}_{name}" for name in more for engine in ("ours", "sglang")]
    return table_of(title, [{name: row[name] for name in (*columns, *named)} for row in rows])


def http_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of answers over HTTP."""
    names = ("ttft_p50_ms", "ttft_p99_ms", "tokens_a_second")
    figures = [f"{engine}_{name}" for name in names for engine in ("ours", "sglang")]
    columns = ("context", "mode", "cached", "clients", *figures, "ttft_ratio", "tokens_ratio")
    return table_of(title, [{name: row[name] for name in columns} for row in rows])


def _rows(
    cells: Iterable[Mapping[str, Any]], keys: Sequence[str], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return a row for each value of ``keys``, in order, with both engines' figures ``names``."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for cell in cells:
        found.setdefault(tuple(cell[key] for key in keys), {})[cell["engine"]] = cell
    return [
        dict(zip(keys, values, strict=True))
        | {f"{engine}_{n}": engines.get(engine, {}).get(n) for n in names for engine in ("ours", "sglang")}
        for values, engines in sorted(found.items(), key=lambda item: item[0])
    ]


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def _cell(
    turn: Turn,
    batch: int,
    step_ms: float,
    tokens_a_step: float,
    misses: float | None,
    megabytes: float | None,
) -> dict[str, Any]:
    return {
        "engine": turn.engine,
        "mode": turn.mode,
        "context": turn.context,
        "batch": batch,
        "step_ms": step_ms,
        "tokens_a_step": tokens_a_step,
        "tokens_a_second": 1e3 * batch * tokens_a_step / step_ms,
        "misses_a_token": misses,
        "mb_a_step": megabytes,
    }
