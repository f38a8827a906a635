"""Requests of a small synthetic model on a GPU, whose steps tests run one by one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.kernels.row_errors import HotBufferError
from tests.gpu.support import DEVICE
from tools.bench.step_bench import Bench
from tools.bench.step_options import add_node_options, load_shared_spec, make_settings
from tools.bench.step_prompt import prefill
from tools.checkpoints.make_synthetic import SyntheticShape, write_synthetic

NUM_STEPS = 6
"""Steps that a test runs at a time."""


def write_model(path: Path) -> Path:
    """Write a checkpoint of three layers to ``path``, and return that."""
    shape = SyntheticShape(3, 8, 1024, vocab_size=16384, context_length=8192, draft_agreement=0.5)
    write_synthetic(path, shape, 0, DEVICE, in_fp8=True)
    return path


@contextmanager
def bench_of(
    checkpoint: Path,
    mode: Mode,
    num_reqs: int,
    num_drafts: int,
    *options: str,
    is_resident: bool = False,
    num_steps: int = NUM_STEPS,
) -> Iterator[Bench]:
    """Yield requests with prompts of 3,000 tokens whose steps can be run, and check in the end that no row
    has an error. They have slots for four times ``num_steps``, and hot buffers that are no larger than all
    of these tokens."""
    parser = argparse.ArgumentParser()
    add_node_options(parser)
    arguments = parser.parse_args(["--kv-cache-dtype", "fp8_e4m3", "--verify-rows", *options])
    arguments.model_path, arguments.no_graphs = checkpoint, False
    spec = load_shared_spec(arguments, num_drafts)
    model = load_model(checkpoint, spec, DEVICE)
    settings = make_settings(arguments, num_reqs, num_drafts)
    prompt = prefill(spec, model, settings, 2048, 3000)
    bench = Bench(spec, model, settings, prompt, mode, num_steps, None, is_resident=is_resident)
    try:
        yield bench
        for request in bench.requests:
            assert int(bench.tables.state.error_flags[request.req_row]) == HotBufferError.NONE
    finally:
        bench.memory.close()
