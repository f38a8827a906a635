"""The parts of the swap-in benchmark that need no GPU: workload, traces, recording, judgement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.facts import run_facts, spread
from bench.record_trace import record, seeded_text
from bench.swap_in_drafts import HOT_CAPACITY, NUM_TOKENS, NUM_WARM_TOKENS, calls_of
from bench.swap_in_report import PEER_US, judge, keep, print_report
from bench.swap_in_workload import (
    CONTEXT,
    FRESH,
    MISS_PERCENTS,
    NUM_STEPS,
    TOP_K,
    Cell,
    draft_selections,
    selections,
)
from bench.traces import Trace, kernel_hit_rate, load_trace, lru_counts, lru_hit_rate, synthetic_trace
from model.loader import load_model
from model.spec import load_spec

# --- workload ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", FRESH)
@pytest.mark.parametrize("miss_percent", MISS_PERCENTS)
def test_every_step_replaces_the_given_share_by_what_was_selected_longest_ago_or_never(
    miss_percent: int, fresh: str
) -> None:
    steps = selections(2, miss_percent, 0, fresh).numpy()
    assert steps.shape == (NUM_STEPS, 2, TOP_K)
    num_new = round(TOP_K * miss_percent / 100)
    for req in range(2):
        last_step = np.full(CONTEXT - 1, -1)
        last_step[steps[0, req]] = 0
        for step in range(1, NUM_STEPS):
            before, now = steps[step - 1, req], steps[step, req]
            assert len(set(now.tolist())) == TOP_K
            assert (now == before).mean() < 0.05  # shuffled
            new = np.setdiff1d(now, before)
            assert len(new) == num_new
            if num_new:
                unselected = np.setdiff1d(np.arange(CONTEXT - 1), np.union1d(before, now))
                assert last_step[new].max() <= last_step[unselected].min()
            last_step[now] = step
    assert not np.array_equal(steps[0, 0], steps[0, 1])


@pytest.mark.parametrize("fresh", FRESH)
def test_the_two_readings_differ_in_which_position_comes_next(fresh: str) -> None:
    steps = selections(1, 10, 0, fresh).numpy()[:, 0]
    seen = set(steps[0].tolist())
    scattered = []
    for step in range(1, NUM_STEPS):
        new = np.setdiff1d(steps[step], steps[step - 1])
        unseen = sorted(set(range(CONTEXT - 1)) - seen)
        scattered.append(new.tolist() != unseen[: len(new)])
        seen |= set(new.tolist())
    assert scattered == [fresh == "random"] * (NUM_STEPS - 1)


def test_a_cell_sees_wrong_bytes() -> None:
    host = torch.randint(0, 256, (1, 130, 4), dtype=torch.uint8)
    cell = Cell(host, 2, 12, 5, "cpu")
    with pytest.raises(ValueError, match="3 requests of 12 tokens do not fit in 130 host slots"):
        Cell(host, 3, 12, 5, "cpu")
    selected = torch.tensor([[3, 8, 1], [10, 9, 0]], dtype=torch.int32)
    out = torch.empty_like(selected)
    cell.prepare(selected, torch.tensor([12, 12]), out)
    assert cell.counted() == [0, 0, 0]
    assert not cell.dev.any()
    cell.call(selected, torch.tensor([12, 12]), out)
    cell.verify(selected, out)
    assert cell.counted() == [0, 6, 0]
    cell.dev[0, out[1, 2]] += 1
    with pytest.raises(RuntimeError, match="layer 0, row 1"):
        cell.verify(selected, out)


@pytest.mark.parametrize("miss_percent", [0, 10, 30])
def test_tokens_of_drafts_unite_and_miss_as_they_promise_in_calls_of_any_number(miss_percent: int) -> None:
    tokens = draft_selections(NUM_TOKENS, 1, miss_percent, 1.9, 0)
    unions = [len(tokens[step : step + 4].unique()) / TOP_K for step in range(0, NUM_TOKENS - 4, 7)]
    assert unions == pytest.approx([1.9] * len(unions), abs=0.001)
    assert all(len(token.unique()) == TOP_K for token in tokens)
    num_misses = round(TOP_K * miss_percent / 100) * (NUM_TOKENS - NUM_WARM_TOKENS)
    for num_new in (1, 3, 4):
        cell = Cell(torch.zeros((1, CONTEXT, 1), dtype=torch.uint8), 1, CONTEXT, HOT_CAPACITY, "cpu", 4)
        calls = calls_of(tokens, num_new)
        assert torch.equal(calls.view(tokens.shape), tokens)
        for number, call in enumerate(calls):
            if number == NUM_WARM_TOKENS // num_new:
                cell.state.counters.zero_()
            cell.call(call, torch.tensor([CONTEXT]), torch.empty_like(call))
        assert cell.counted()[1] == num_misses
        assert not cell.state.error_flags.any()
    with pytest.raises(
        ValueError, match=r"31% misses: a token replaces 614 of 2048 positions at a union of 1\.9"
    ):
        draft_selections(2, 1, 31, 1.9, 0)


def test_calls_of_several_tokens_keep_a_requests_rows_together() -> None:
    tokens = torch.arange(12).view(4, 3, 1)
    assert calls_of(tokens, 2)[0].flatten().tolist() == [0, 3, 1, 4, 2, 5]


# --- traces -----------------------------------------------------------------------------------------------


def random_trace(top_k: int, num_steps: int, first_len: int, seed: int) -> Trace:
    """Half of the positions from the latest ones; the newest among them at times, some places empty."""
    random = np.random.default_rng(seed)
    seq_lens = np.arange(first_len, first_len + num_steps, dtype=np.int32)
    selected = np.full((num_steps, 2, top_k), -1, dtype=np.int32)
    for step, seq_len in enumerate(seq_lens.tolist()):
        for layer in range(2):
            latest = random.random(seq_len) + (np.arange(seq_len) > seq_len - 2 * top_k) * 0.3
            best = np.argsort(-latest)[: top_k - (top_k > 1) * random.integers(2)]
            selected[step, layer, : len(best)] = best
    return Trace("random", selected, seq_lens)


@pytest.mark.parametrize("first_len", [1, 6, 8, 9, 30])
def test_lru_simulation_and_kernel_count_alike_where_ties_cannot_matter(first_len: int) -> None:
    """One position a step, and blocks that are selected and evicted as a whole.

    Only while the context still fits may one position and the newest tie; both take the lower one first.
    """
    single = random_trace(1, 200, first_len, seed=first_len)
    assert 0 < lru_hit_rate(single, 2) == kernel_hit_rate(single, 2) < 1
    # Old entries are told apart by age class only.
    for capacity in (8, 16):
        assert kernel_hit_rate(single, capacity) == pytest.approx(lru_hit_rate(single, capacity), abs=0.02)

    random = np.random.default_rng(first_len)
    blocks = random.integers(6, size=(100, 2, 1))
    selected = (blocks * 4 + np.arange(4)).astype(np.int32)
    blockwise = Trace("blocks", selected, np.arange(40, 140, dtype=np.int32))
    for num_blocks in (1, 2, 4, 5):
        capacity = 4 * num_blocks + 1
        assert 0 < lru_hit_rate(blockwise, capacity) == kernel_hit_rate(blockwise, capacity) < 1


@pytest.mark.parametrize("seed", range(3))
def test_lru_simulation_and_kernel_count_nearly_alike_where_ties_matter(seed: int) -> None:
    trace = random_trace(32, 150, 20, seed)
    for capacity in trace.capacities:
        assert lru_hit_rate(trace, capacity) == pytest.approx(kernel_hit_rate(trace, capacity), abs=0.01)


def test_lru_counts_of_a_trace_worked_out_by_hand() -> None:
    selected = np.array([[0, 1], [1, 5], [5, 0], [2, 7], [-1, 1]], dtype=np.int32)
    seq_lens = np.arange(5, 10, dtype=np.int32)
    # Capacity 3, of which the newest has one: misses 0 and 1; hits 1 and 5, the newest; 5 is the newest no
    # longer and misses, 0 hits; 7 is the newest and hits, 2 misses and evicts 0 or 5; 1 was evicted by 5.
    assert lru_counts(selected, seq_lens, 3) == (4, 5)
    assert lru_counts(selected, seq_lens, 3, num_uncounted_steps=1) == (4, 3)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = random_trace(4, 6, 9, 0)
    trace.save(tmp_path / "trace_some.npz")
    loaded = load_trace(tmp_path / "trace_some.npz")
    assert loaded.name == "some"
    np.testing.assert_array_equal(loaded.selected, trace.selected)
    np.testing.assert_array_equal(loaded.seq_lens, trace.seq_lens)
    assert (loaded.num_steps, loaded.num_layers, loaded.top_k, loaded.context) == (6, 2, 4, 14)
    assert loaded.capacities == [5, 6, 8, 12, 16]
    np.savez(tmp_path / "other.npz", selected=trace.selected)
    with pytest.raises(ValueError, match="seq_lens missing"):
        load_trace(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("selected", "seq_lens", "message"),
    [
        ([[[0]], [[1]]], [3], "of 1 steps"),
        ([[[0]], [[1]]], [3, 5], "grow by one"),
        ([[[0]], [[4]]], [3, 4], r"\[0, seq_len\)"),
        ([[[0]], [[-2]]], [3, 4], r"\[0, seq_len\)"),
    ],
)
def test_a_malformed_trace_is_refused(selected: Any, seq_lens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trace("bad", np.array(selected, np.int32), np.array(seq_lens, np.int32))


def test_the_synthetic_trace_has_the_overlap_that_it_promises() -> None:
    trace = synthetic_trace(1, num_steps=20)
    assert trace.context == CONTEXT
    assert trace.overlap == pytest.approx(0.44, abs=0.01)
    np.testing.assert_array_equal(trace.selected, synthetic_trace(1, num_steps=20).selected)


# --- recording --------------------------------------------------------------------------------------------


def test_a_recorded_trace_is_the_models_own_ranking(tiny_checkpoint: Callable[[str], Path]) -> None:
    path = tiny_checkpoint("glm")
    model = load_model(path, load_spec(path))
    prompt = list(seeded_text(0, 2000).encode())[:200]
    (narrow, wide), greedy = record(model, prompt, 4, (64, 128), "glm")
    assert (narrow.num_layers, narrow.context) == (2, 204)
    for step in range(4):
        for group in range(2):
            assert set(narrow.selected[step, group].tolist()) < set(wide.selected[step, group].tolist())
    (again,), again_greedy = record(model, prompt, 4, (64,), "glm")
    assert greedy == again_greedy
    np.testing.assert_array_equal(np.sort(again.selected), np.sort(narrow.selected))
    fed, _ = record(model, prompt, 4, (64,), "glm", fed=[32, 32, 32, 32])
    assert not np.array_equal(fed[0].selected, narrow.selected)


# --- report -----------------------------------------------------------------------------------------------


def cell(item_bytes: int, batch: int, miss_percent: int, us: float) -> dict[str, Any]:
    misses = round(TOP_K * miss_percent / 100) * batch * 27
    return {
        "item_bytes": item_bytes,
        "batch": batch,
        "miss_percent": miss_percent,
        "us": us,
        "repeats_us": spread([us]),
        "gb_s": misses / 27 * item_bytes / us / 1e3,
        "single_us": spread([us, 2 * us, 3 * us]),
        "hits": TOP_K * batch * 27 - misses,
        "misses": misses,
        "evictions": misses,
    }


def report_of(*tables: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "facts": run_facts(),
        "gpu": "some GPU",
        "num_repeats": 1,
        "copy_peak_gb_s": spread([49.0, 50.0, 51.0]),
        "tables": [{"fresh": fresh, "cells": cells} for fresh, cells in zip(FRESH, tables, strict=False)],
        "traces": [],
    }


def test_judge_sets_targets_and_means() -> None:
    cells = [
        cell(1152, 1, 0, 4.0),
        cell(1152, 1, 2, 7.1),
        cell(656, 1, 10, 39.1),  # no target of its own: the other kernel's time
        cell(1152, 64, 100, 64 * 2048 * 1152 / 45.0 / 1e3),  # 90% of the copy peak
        cell(656, 32, 10, 32 * 205 * 656 / 42.4 / 1e3),  # just under 85%
        cell(1152, 32, 2, 47.0),  # few misses: the other kernel's time
        cell(640, 128, 2, 80.0),  # nothing to compare with
        cell(640, 128, 100, 128 * 2048 * 640 / 42.6 / 1e3),  # but for the peak
    ]
    report = report_of(cells)
    judge(report)
    assert [c["is_met"] for c in cells] == [True, False, True, True, False, False, False, True]
    assert [c["peer_us"] for c in cells] == [15.3, 22.4, 39.1, 2997, 112, 46.9, None, None]
    assert cells[2]["ratio"] == 1
    assert cells[3]["of_peak"] == pytest.approx(0.9)
    assert cells[3]["target_us"] == pytest.approx(cells[3]["us"])
    assert cells[6]["target_us"] is None
    table = report["tables"][0]
    ratios = [c["ratio"] for c in cells[:6]]
    assert table["mean_ratio"] == pytest.approx(np.exp(np.mean(np.log(ratios))))
    assert table["worst_ratio"] == max(ratios)


def test_a_whole_report_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        cell(item_bytes, batch, miss, 0.61 * us)
        for (item_bytes, batch), row in PEER_US.items()
        for miss, us in zip(MISS_PERCENTS, row, strict=True)
    ]
    report = report_of(cells, [dict(c) for c in cells])
    report["traces"] = [
        {
            "trace": "synthetic",
            "top_k": 2048,
            "context": 32768,
            "num_steps": 200,
            "num_layers": 1,
            "overlap": 0.44,
            "capacity": 4096,
            "hit_rate": 0.66,
            "lru_hit_rate": 0.68,
            "points_over_lru": -2.0,
            "us": 12.0,
            "single_us": spread([14.0]),
        }
    ] * 15
    judge(report)
    print_report(report)
    printed = capsys.readouterr().out
    assert printed.count("geometric mean of ours over the peer's") == 2
    assert "0.610 (target 0.55)" in printed
    assert "difference -2.00 points  MORE THAN 1 POINT OFF, 12.0 us a call (14.0 alone)" in printed

    kept_json, *pictures = keep(report, tmp_path)
    assert kept_json.read_text().count("\n") < 250  # a line for each cell
    assert "values" not in kept_json.read_text()
    assert [picture.name.rpartition("_")[2] for picture in pictures] == ["random.png", "ascending.png"]
    again = json.loads(kept_json.read_text())
    judge(again)
    print_report(again)
    assert capsys.readouterr().out.count("0.610 (target 0.55)") == 2


def test_the_commit_comes_from_the_environment_where_there_is_no_git(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run_facts()["commit"] != "sent"
    monkeypatch.setenv("SOURCE_COMMIT", "sent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (run_facts()["commit"], run_facts()["uncommitted_changes"]) == ("sent", None)
    monkeypatch.delenv("SOURCE_COMMIT")
    assert run_facts()["commit"] == "none"
