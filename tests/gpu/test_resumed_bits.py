"""A prefill node gives a prompt's tail and resumed tokens the bits of a decode node's steps, on a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.prefill_node.compute import PromptRunner
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.protocol.messages import Room
from tests.gpu.support import DEVICE, needs_gpu
from tests.unit.prefill_node.support import bootstrap_of
from tools.bench.step_bench import Bench
from tools.bench.step_options import add_node_options, load_shared_spec, make_settings
from tools.bench.step_prompt import PAGE_SIZE, prefill, random_tokens
from tools.checkpoints.make_synthetic import SyntheticShape, write_synthetic

pytestmark = [*needs_gpu, pytest.mark.I5]

SHAPE = SyntheticShape(3, 8, 2048, vocab_size=16384, context_length=8192, expert_size=512, jitter=0.5)
PROMPT, NUM_STEPS = 4096, 150
"""A query sees more positions than it selects, in several splits; more tokens are resumed than one call
attends to. The prompt is whole pages."""
TAIL = 15
"""Tokens behind the whole pages of a prompt that resumes nothing, whose last token ends their block."""


@pytest.mark.parametrize(
    ("kv_format", "backend"), [("bfloat16", "auto"), ("fp8_e4m3", "auto"), ("bfloat16", "triton")]
)
@torch.inference_mode()
def test_the_last_rows_of_a_prompt_are_those_of_steps(tmp_path: Path, kv_format: str, backend: str) -> None:
    """The bits do not depend on whether earlier tokens are computed in the same forward, nor on graphs."""
    write_synthetic(tmp_path, SHAPE, 0, DEVICE, in_fp8=kv_format == "fp8_e4m3")
    parser = argparse.ArgumentParser()
    add_node_options(parser)
    arguments = parser.parse_args(["--kv-cache-dtype", kv_format, "--attention-backend", backend])
    arguments.model_path, arguments.no_graphs = tmp_path, False
    spec = load_shared_spec(arguments, 0)
    model = load_model(tmp_path, spec, DEVICE)
    settings = make_settings(arguments, 2)
    prompt = prefill(spec, model, settings, 2048, PROMPT)

    bench = Bench(spec, model, settings, prompt, Mode.DENSE, NUM_STEPS, None)
    try:
        bench.run(NUM_STEPS)
        request = bench.requests[0]
        kv, index_keys = (
            pool[:, slots_tensor(request.owned[kind])[PROMPT : PROMPT + NUM_STEPS].to(pool.device)].clone()
            for pool, kind in ((bench.memory.k_dev, PoolKind.DEVICE), (bench.memory.index, PoolKind.INDEX))
        )
        output = list(request.output_token_ids)
    finally:
        bench.memory.close()

    num_tokens = PROMPT + NUM_STEPS
    num_pages = -(-num_tokens // PAGE_SIZE)
    memory = PrefillMemory(spec, num_slots=num_pages * PAGE_SIZE, num_aux_slots=1, device=DEVICE)
    runner = PromptRunner(model, memory, PAGE_SIZE, backend, 1024)
    tokens = [*random_tokens(spec, PROMPT).tolist(), *output[: NUM_STEPS + 1]]
    nobody = Peer("", "", b"", PAGE_SIZE, {}, 0.0)

    def check(num_last: int, num_resumed: int, start: int) -> None:
        """Compute a prompt with so many tokens behind PROMPT ones, from ``start`` on."""
        memory.kv.zero_()
        memory.index.zero_()
        memory.kv[:, :start], memory.index[:, :start] = prompt.kv[:, :start], prompt.index[:, :start]
        bootstrap = bootstrap_of(1, tokens[: PROMPT + num_last + 1], num_resumed_tokens=num_resumed)
        record = PrefillRequest(nobody, bootstrap, 0.0, page_ids=list(range(num_pages)))
        assert record.first_stepped == PROMPT
        runner.run([(record, Chunk(Room(1), start, PROMPT + num_last, admits=True))])
        last = slice(PROMPT, PROMPT + num_last)
        same = (memory.kv[:, last] == kv[:, :num_last]).all(2)
        assert same.all(), f"from {start}: equal KV by layer: {same.sum(1).tolist()} of {num_last}"
        same = (memory.index[:, last] == index_keys[:, :num_last]).all(2)
        assert same.all(), f"from {start}: equal index keys by group: {same.sum(1).tolist()} of {num_last}"
        assert torch.equal(memory.kv[:, start:PROMPT], prompt.kv[:, start:])

    for start in (PROMPT, PROMPT - 70):
        check(NUM_STEPS, NUM_STEPS, start)
        check(TAIL, 0, start)
    runner.short.capture(1024)
    for start in (PROMPT, PROMPT - 70):
        check(TAIL, 0, start)
