"""The fairness benchmark: its simulation runs the product's turns, so its bytes are judged; times are not."""

import json
from pathlib import Path

import pytest

from bench.fairness import BATCHES, NUM_LONG, RATES, SHORT_TOKENS, SLICES, main, num_bytes_of, simulate
from transfer.plan import SLICE_BYTES

pytestmark = pytest.mark.I7


@pytest.mark.parametrize("rate", RATES)
def test_a_short_prompt_waits_for_a_slice_of_each_long_one_and_its_own_bytes(rate: float) -> None:
    assert simulate(rate, BATCHES)["bytes_until_short"] > 10e9
    assert simulate(rate, SLICES)["bytes_until_short"] <= NUM_LONG * SLICE_BYTES + num_bytes_of(SHORT_TOKENS)


def test_the_report_has_every_rate_and_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path)])
    assert "A prompt of 100 tokens behind 3 prefixes of 5.0 GB" in capsys.readouterr().out
    report = json.loads((tmp_path / "fairness.json").read_text())
    assert {"commit", "cpu", "date", "command"} <= set(report["facts"])
    ways = [(row["rate"], row["discipline"]) for row in report["simulated"]]
    assert ways == [(rate, way.name) for rate in RATES for way in (BATCHES, SLICES)]


@pytest.mark.slow
def test_it_runs_over_mooncake(tmp_path: Path) -> None:
    report = main(["--wire", "--quick", "--out", str(tmp_path)])
    assert set(report["wire"]["short_secs"]) == {BATCHES.name, SLICES.name}
    assert report["wire"]["long_bytes"] > SLICE_BYTES
