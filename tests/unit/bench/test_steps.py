"""The benchmarks of a decode node's steps run on a CPU, too, where their numbers mean nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tools.bench import decode_step, turnover

SMALL = "--device cpu --dtype float32 --context 128 --chunk 128 --buffer 96"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several would spin between small products, on cores that other tests need."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_steps_are_timed_in_both_modes(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options = f"--model-path {tiny_checkpoint('v32')} {SMALL} --batch 2 --steps 4 --out {tmp_path}/steps"
    assert decode_step.main(options.split()) == 0
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert [(row["mode"], row["tokens_a_step"]) for row in rows] == [("dense", 1.0), ("hisparse", 1.0)]
    assert rows[1]["misses_a_token"] > 0


def test_turns_are_timed_while_others_end_and_join(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    options = f"--model-path {tiny_checkpoint('v32')} {SMALL} --running 2 --every 2 --turns 4"
    assert turnover.main([*options.split(), "--out", str(tmp_path / "turnover")]) == 0
    (result,) = json.loads((tmp_path / "turnover.json").read_text())["results"]
    quiet, busy = (row["turns_ms"] for row in result["rows"])
    assert quiet.keys() == {"others"}
    assert {"end", "1 after a join"} <= busy.keys()
