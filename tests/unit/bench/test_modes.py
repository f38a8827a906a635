"""The simulation of modes: what it models, and that ``auto`` keeps up with the better mode by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from tools.bench import modes
from tools.bench.modes import FULL_SIZE, HIT_CONTEXT, Load, Node, Simulation

SHORT = 8192
NODE = Node(
    device_tokens=16 * 8512,
    host_tokens=600_000,
    max_requests=72,
    position_bytes=5 * 656,
    fixed_secs=1.08e-3,
    request_secs=0.036e-3,
    hot_secs=0.0045e-3,
    hit_share=0.65,
)
"""A node whose device pool holds 16 dense requests of 8k."""


def test_hot_buffers_miss_what_was_measured() -> None:
    assert NODE.miss_share(FULL_SIZE, HIT_CONTEXT) == pytest.approx(0.35)
    assert NODE.miss_share(16384, HIT_CONTEXT) == pytest.approx(0.05)
    assert NODE.miss_share(SHORT, SHORT) == NODE.miss_share(2 * SHORT, SHORT) == 0
    assert replace(NODE, hit_share=0.0).miss_share(64, HIT_CONTEXT) == 1


@pytest.mark.parametrize("flag", list(HisparseFlag))
def test_all_requests_end_and_each_step_takes_its_time(flag: HisparseFlag) -> None:
    load = Load(num_clients=3, prompt_lens=[SHORT, 2048], output_tokens=20, num_requests=7)
    outcome = Simulation(NODE, load, flag, is_bounded=False).run()
    assert outcome.num_tokens == 7 * 20
    assert outcome.num_by_mode.total() == 7
    assert set(outcome.num_by_mode) == {Mode.HISPARSE if flag is HisparseFlag.TRUE else Mode.DENSE}
    assert outcome.secs > 3 * 20 * (NODE.fixed_secs + NODE.request_secs)


@pytest.mark.parametrize("flag", list(HisparseFlag))
def test_later_turns_land_what_is_new_alone(flag: HisparseFlag) -> None:
    """Of the 128 tokens of the first answer, the last one's KV is not computed before the next turn."""
    load = Load(1, prompt_lens=[2048], output_tokens=128, num_requests=4, num_turns=2, turn_tokens=64)
    outcome = Simulation(NODE, load, flag, is_bounded=False).run()
    assert outcome.num_tokens == 4 * 128
    assert outcome.num_landed_tokens == 2 * (2048 + 64 + 64)


def test_prompts_that_are_held_on_the_device_take_nothing_from_hot_buffers() -> None:
    node, load = replace(NODE, hit_share=0.8), Load(24, [SHORT], output_tokens=256, num_requests=96)
    with_held = replace(load, num_requests=112, num_dense_first=16)
    alone, beside_held = (
        Simulation(node, each, HisparseFlag.TRUE, is_bounded=False).run() for each in (load, with_held)
    )
    assert beside_held.num_by_mode == {Mode.DENSE: 16, Mode.HISPARSE: 96}
    assert beside_held.tokens_per_sec >= 0.97 * alone.tokens_per_sec


@pytest.mark.parametrize(
    ("hit_share", "mode"), [(0.4, Mode.DENSE), (0.97, Mode.HISPARSE)], ids=["many miss", "few miss"]
)
def test_auto_makes_about_as_many_tokens_as_the_better_mode_from_the_first_request_on(
    hit_share: float, mode: Mode
) -> None:
    node = replace(NODE, hit_share=hit_share)
    load = Load(num_clients=48, prompt_lens=[SHORT], output_tokens=128, num_requests=96)
    dense, hisparse, auto = (
        Simulation(node, load, flag, is_bounded=False).run()
        for flag in (HisparseFlag.FALSE, HisparseFlag.TRUE, HisparseFlag.AUTO)
    )
    assert auto.num_by_mode[mode] >= 80
    assert (dense.tokens_per_sec > hisparse.tokens_per_sec) == (mode is Mode.DENSE)
    assert auto.tokens_per_sec >= 0.98 * max(dense.tokens_per_sec, hisparse.tokens_per_sec)


def test_hot_buffers_stay_as_they_are_while_clients_only_pause() -> None:
    """Each of 48 clients asks again 60 ms after its answer. Nobody takes its memory meanwhile."""
    node = replace(NODE, device_tokens=16 * 33152, host_tokens=2_386_944)
    load = Load(48, [HIT_CONTEXT], output_tokens=128, num_requests=192, pause_secs=0.06)
    outcome = Simulation(node, load, HisparseFlag.AUTO, is_bounded=False).run()
    assert outcome.num_retractions == 0
    # Each gets more than the full size once, when it has landed.
    assert outcome.num_exchanges <= 1.1 * load.num_requests
    assert outcome.num_by_mode[Mode.HISPARSE] >= 150


def test_the_report_has_a_row_for_each_number_of_clients(tmp_path: Path) -> None:
    options = "--clients 1 2 --input-tokens 2048 4096 --output-tokens 8 --num-requests 4"
    assert modes.main([*options.split(), "--out", str(tmp_path / "modes")]) == 0
    rows = json.loads((tmp_path / "modes.json").read_text())["rows"]
    assert [(row["clients"], row["admitted_dense"]) for row in rows] == [(1, 4), (2, 4)]
    assert all(row["auto_of_best"] == 1 for row in rows)
