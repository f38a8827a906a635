"""The benchmarks of a decode node's steps run on a CPU, too, where their numbers mean nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tools.bench import decode_step
from tools.bench.step_kernels import kernels_from

SMALL = "--device cpu --dtype float32 --context 128 --chunk 128 --buffer 96"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch with one thread: several would spin between small products, on cores that others need."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_kernels_that_overlap_share_the_time() -> None:
    launches = [("topk", 0.0, 4.0), ("swap_in", 3.0, 9.0), ("swap_in", 5.0, 8.0), ("topk", 10.0, 12.0)]
    found = kernels_from(launches, num_steps=2)
    assert [(kernel.name, kernel.kind, kernel.number) for kernel in found] == [
        ("topk", "top-k", 1.0),
        ("swap_in", "swap-in", 1.0),
    ]
    assert [kernel.ms for kernel in found] == pytest.approx([0.003, 0.0045])
    assert [kernel.added_ms for kernel in found] == pytest.approx([0.0035, 0.0025])  # 4 + 3, 5 + 0 us


def test_steps_are_timed_in_both_modes(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options = f"--model-path {tiny_checkpoint('v32')} {SMALL} --batch 2 --steps 4 --out {tmp_path}/steps"
    assert decode_step.main(options.split()) == 0
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert [(row["mode"], row["tokens_a_step"]) for row in rows] == [("dense", 1.0), ("hisparse", 1.0)]
    assert rows[1]["misses_a_token"] > 0
