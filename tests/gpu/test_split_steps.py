"""Steps of large hisparse batches on a GPU, in graphs: whole, in parts and as micro-batches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.decode_node import forwards
from hisparse_pd.decode_node.split_choice import SPLITS, Secs, Split, SplitChoice, choose_splits
from tests.gpu.step_bench import bench_of
from tests.gpu.support import DEVICE, needs_gpu
from tools.bench.step_bench import Bench
from tools.bench.step_options import add_node_options, load_shared_spec, make_settings
from tools.bench.step_prompt import prefill
from tools.checkpoints.make_synthetic import SyntheticShape, write_synthetic

pytestmark = needs_gpu

NUM_REQS, NUM_STEPS = 8, 16
SHAPE = SyntheticShape(2, 2, 256, 8192, 8192, index_topk=256, draft_agreement=0.8)


@pytest.mark.I3
@pytest.mark.I5
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_batch_that_is_split_draws_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    write_synthetic(tmp_path, SHAPE, 0, DEVICE)
    parser = argparse.ArgumentParser()
    add_node_options(parser)
    arguments = parser.parse_args(["--dtype", "float32", "--buffer", "1028"])
    arguments.model_path, arguments.no_graphs = tmp_path, False
    spec = load_shared_spec(arguments, num_drafts)
    model = load_model(tmp_path, spec, arguments.device)
    prompt = prefill(spec, model, make_settings(arguments, 1), 2048, 4096)
    tokens, misses = [], []
    for split in (Split.WHOLE, *SPLITS):
        arguments.micro_batch_min_bs = 0 if split is Split.WHOLE else NUM_REQS
        monkeypatch.setattr(forwards, "fastest", lambda secs, split=split: split)
        monkeypatch.setattr(forwards, "UNMEASURED_SPLIT", split)
        settings = make_settings(arguments, NUM_REQS, num_drafts)
        bench = Bench(spec, model, settings, prompt, Mode.HISPARSE, NUM_STEPS, None)
        assert set(bench.runner.step_secs) == {NUM_REQS}
        assert min(bench.runner.step_secs.values()) > 0
        try:
            bench.run(NUM_STEPS)
        finally:
            bench.memory.close()
        tokens.append([request.output_token_ids for request in bench.requests])
        misses.append(bench.totals[1])
    assert tokens[0] == tokens[1] == tokens[2]
    assert min(misses) > 0


@pytest.mark.parametrize("num_reqs", [72, 128])
def test_a_node_times_all_ways_for_a_model_of_full_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_reqs: int
) -> None:
    """Products of two micro-batches then share the multiprocessors with each other and with copies, in sizes
    that no other test has."""
    write_synthetic(
        tmp_path, SyntheticShape(2, 4, 7168, 8192, 8192, expert_size=2048), 0, DEVICE, in_fp8=True
    )
    found: list[SplitChoice] = []

    def choose(sizes: Sequence[int], measure: Callable[[int], Secs | None]) -> SplitChoice:
        found.append(choose_splits(sizes, measure))
        return found[-1]

    monkeypatch.setattr(forwards, "choose_splits", choose)
    with bench_of(tmp_path, Mode.HISPARSE, num_reqs, 0, "--buffer", "2112", num_steps=NUM_STEPS) as bench:
        bench.run(NUM_STEPS)
    (choice,) = found
    assert choice.measured[num_reqs].keys() == {Split.WHOLE, *SPLITS}
    assert min(choice.measured[num_reqs].values()) > 0
