"""On a GPU, a request's bits depend on the request alone, in steps and in a prompt's forwards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.decode_node import forward_results, forwards
from hisparse_pd.decode_node.drafting import full_buffer
from hisparse_pd.decode_node.split_choice import SPLITS, Split
from hisparse_pd.prefill_node.compute import PromptRunner
from hisparse_pd.prefill_node.memory import PrefillMemory
from tests.gpu.support import DEVICE, needs_gpu
from tools.bench.step_bench import Bench
from tools.bench.step_options import add_node_options, load_shared_spec, make_settings
from tools.bench.step_prompt import prefill, random_tokens
from tools.checkpoints.make_synthetic import SyntheticShape, write_synthetic

pytestmark = [*needs_gpu, pytest.mark.I5]

SHAPE = SyntheticShape(
    3, 8, 7168, vocab_size=16384, context_length=8192, expert_size=2048, jitter=0.5, draft_agreement=0.5
)
CONTEXT, NUM_DRAFTS, PAGE_SIZE = 4096, 3, 64
PROMPT = 2300


class Node:
    """An fp8 model, also with experts in four bits, a prompt's KV, and the logits of steps over copies of
    it."""

    def __init__(self, path: Path, *, in_int4: bool = False) -> None:
        write_synthetic(path, SHAPE, 0, DEVICE, in_fp8=True, in_int4=in_int4)
        parser = argparse.ArgumentParser()
        add_node_options(parser)
        self.arguments = parser.parse_args(["--kv-cache-dtype", "fp8_e4m3"])
        self.arguments.model_path, self.arguments.no_graphs = path, False
        self.arguments.micro_batch_min_bs = 0
        self.spec: ModelSpec = load_shared_spec(self.arguments, NUM_DRAFTS)
        self.model: DsaModel = load_model(path, self.spec, DEVICE)
        self.prompt = prefill(self.spec, self.model, self.settings(1, 0), 2048, CONTEXT)
        self.alone = self.first_logits(Mode.DENSE, 1)

    def settings(self, batch: int, num_drafts: int) -> Any:
        return make_settings(self.arguments, batch, num_drafts)

    def first_logits(self, mode: Mode, batch: int, num_running: int = 0, num_drafts: int = 0) -> Tensor:
        """Return the logits of the newest tokens of ``num_running`` requests, float32 [num_running,
        vocab_size], in a graph of ``batch``. The last request's newest token is the first one's."""
        settings = self.settings(batch, num_drafts)
        bench = Bench(self.spec, self.model, settings, self.prompt, mode, 2, None)
        try:
            bench.requests = bench.requests[: num_running or batch]
            bench.requests[-1].output_token_ids[-1] = bench.requests[0].output_token_ids[-1]
            with pytest.MonkeyPatch.context() as patch:
                seen: list[forward_results.Forward] = []
                launch = forwards.Forwards.launch

                def keep(self: forwards.Forwards, *args: Any, **kwargs: Any) -> forward_results.Forward:
                    seen.append(launch(self, *args, **kwargs))
                    return seen[-1]

                patch.setattr(forwards.Forwards, "launch", keep)
                bench.run(1)
            return seen[0].logits[:: num_drafts + 1][: len(bench.requests)].clone()
        finally:
            bench.memory.close()

    def check(self, logits: Tensor) -> None:
        """Check the first and the last request, which are the one whose step alone is known."""
        assert torch.equal(logits[0], self.alone[0])
        assert torch.equal(logits[-1], self.alone[0])

    def behind_prompt(self, num_tokens: int) -> Tensor:
        """Return the logits of the first request's newest token, float32 [1, vocab_size], computed as the
        last of ``num_tokens`` tokens in a prompt's forward."""
        memory = self.memory(CONTEXT // PAGE_SIZE + 1)
        memory.kv[:, :CONTEXT], memory.index[:, :CONTEXT] = self.prompt.kv, self.prompt.index
        tokens = random_tokens(self.spec, CONTEXT)
        tokens = torch.cat((tokens, random_tokens(self.spec, 1))).to(self.model.device)
        pages = torch.arange(CONTEXT // PAGE_SIZE + 1, device=self.model.device)
        request = PagedRequest(pages, CONTEXT + 1 - num_tokens, num_tokens)
        pools = memory.kv, memory.index, PAGE_SIZE
        kv = PagedKv(self.spec, *pools, [request], None, self.prefill_kernels(memory), memory.row_checks)
        return self.model.forward(tokens[-num_tokens:], kv.positions, kv, kv.last_rows)

    def memory(self, pages: int) -> PrefillMemory:
        num_slots = pages * PAGE_SIZE
        return PrefillMemory(self.spec, num_slots=num_slots, num_aux_slots=1, device=self.model.device)

    def prefill_kernels(self, memory: PrefillMemory) -> AttentionKernels:
        arguments = self.arguments
        runner = PromptRunner(
            self.model,
            memory,
            PAGE_SIZE,
            arguments.attention_backend,
            4096,
            arguments.attention_split_tile_size,
        )
        return runner.kernels

    def prefilled(
        self, forwards_of: Sequence[Sequence[tuple[int, int, int]]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return KV and index keys of prompt 0, [layers, PROMPT, bytes], and the logits of its last token. A
        forward has parts of prompts: each has a prompt's number, first position and end."""
        pages = -(-PROMPT // PAGE_SIZE)
        memory = self.memory(4 * pages)
        kernels = self.prefill_kernels(memory)
        tokens = random_tokens(self.spec, 2 * PROMPT).to(self.model.device)
        logits = tokens
        for parts in forwards_of:
            requests = [
                PagedRequest(
                    torch.arange(number * pages, (number + 1) * pages, device=tokens.device),
                    start,
                    stop - start,
                )
                for number, start, stop in parts
            ]
            pools = memory.kv, memory.index, PAGE_SIZE
            kv = PagedKv(self.spec, *pools, requests, None, kernels, memory.row_checks)
            of_parts = [tokens[100 * number + start : 100 * number + stop] for number, start, stop in parts]
            logits, _ = self.model.forward_with_hidden(torch.cat(of_parts), kv.positions, kv, kv.last_rows)
            row = [number for number, _, _ in parts].index(0)
        layers = self.spec.num_layers  # without the draft layer's, which follow
        return memory.kv[:layers, :PROMPT], memory.index[:layers, :PROMPT], logits[row]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return Node(tmp_path_factory.mktemp("same_bits"))


@pytest.fixture(scope="module")
def int4_node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return Node(tmp_path_factory.mktemp("same_bits_int4"), in_int4=True)


@pytest.mark.parametrize(("batch", "num_drafts"), [(2, 0), (24, 0), (65, 0), (128, 0), (16, NUM_DRAFTS)])
def test_a_step_with_experts_in_four_bits(
    int4_node: Node, monkeypatch: pytest.MonkeyPatch, batch: int, num_drafts: int
) -> None:
    if num_drafts:
        monkeypatch.setattr(int4_node.arguments, "buffer", full_buffer(num_drafts, int4_node.spec.index_topk))
    int4_node.check(int4_node.first_logits(Mode.HISPARSE, batch, num_drafts=num_drafts))


@torch.inference_mode()
def test_a_prompt_with_experts_in_four_bits(int4_node: Node) -> None:
    expected = int4_node.prefilled([[(0, 0, PROMPT)]])
    for forwards_of in (
        [[(0, start, min(start + 512, PROMPT))] for start in range(0, PROMPT, 512)],
        [[(0, 0, PROMPT - 70)], [(0, PROMPT - 70, PROMPT)]],
        [[(1, 0, 500), (0, 0, PROMPT), (2, 0, 77)]],
    ):
        for found, of_whole in zip(int4_node.prefilled(forwards_of), expected, strict=True):
            assert torch.equal(found, of_whole)


@pytest.mark.parametrize("batch", [1, 2, 3, 16, 24, 64, 65, 128])
@pytest.mark.parametrize("mode", [Mode.DENSE, Mode.HISPARSE])
def test_a_step_among_others(node: Node, mode: Mode, batch: int) -> None:
    node.check(node.first_logits(mode, batch))


@pytest.mark.parametrize(("batch", "num_running"), [(8, 1), (16, 3), (128, 20), (128, 70)])
def test_a_step_in_a_larger_graph(node: Node, batch: int, num_running: int) -> None:
    node.check(node.first_logits(Mode.HISPARSE, batch, num_running))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("batch", [5, 64, 128])
def test_a_split_step(node: Node, monkeypatch: pytest.MonkeyPatch, split: Split, batch: int) -> None:
    monkeypatch.setattr(node.arguments, "micro_batch_min_bs", 2)
    monkeypatch.setattr(forwards, "fastest", lambda secs: split)
    monkeypatch.setattr(forwards, "UNMEASURED_SPLIT", split)
    node.check(node.first_logits(Mode.HISPARSE, batch))


@pytest.mark.parametrize("batch", [1, 3, 16, 40])
def test_a_step_that_verifies_drafts(node: Node, batch: int) -> None:
    node.check(node.first_logits(Mode.DENSE, batch, num_drafts=NUM_DRAFTS))


@pytest.mark.parametrize(
    "forwards_of",
    [
        [[(0, start, min(start + 512, PROMPT))] for start in range(0, PROMPT, 512)],
        [[(0, 0, 1)], [(0, 1, 700)], [(0, 700, PROMPT)]],
        [[(0, 0, PROMPT - 1)], [(0, PROMPT - 1, PROMPT)]],
        [[(0, 0, PROMPT - 17)], [(0, PROMPT - 17, PROMPT)]],
        [[(0, 0, PROMPT - 70)], [(0, PROMPT - 70, PROMPT)]],
        [[(1, 0, 500), (0, 0, PROMPT), (2, 0, 77)]],
        [[(0, 0, PROMPT - 9), (1, 0, 30)], [(2, 0, 9), (0, PROMPT - 9, PROMPT), (3, 0, 5)]],
    ],
    ids=["chunks", "unlike chunks", "one behind", "17 behind", "70 behind", "beside", "both"],
)
@torch.inference_mode()
def test_a_prompt_in_any_forwards(node: Node, forwards_of: Sequence[Sequence[tuple[int, int, int]]]) -> None:
    expected = node.prefilled([[(0, 0, PROMPT)]])
    kv, index_keys, logits = node.prefilled(forwards_of)
    same = (kv == expected[0]).all(2) & (index_keys == expected[1]).all(2)
    assert same.all(), f"equal rows by layer: {same.sum(1).tolist()} of {PROMPT}"
    assert torch.equal(logits, expected[2])


@pytest.mark.parametrize("num_tokens", [1, 17, 200])
@torch.inference_mode()
def test_a_step_whose_queries_are_whole_is_a_prompts_forward(
    node: Node, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    monkeypatch.setattr(node.arguments, "attention_split_tile_size", 0)
    prompt = prefill(node.spec, node.model, node.settings(1, 0), 2048, CONTEXT)
    monkeypatch.setattr(node, "prompt", prompt)
    logits = node.first_logits(Mode.HISPARSE, 3)
    assert torch.equal(logits[0], node.behind_prompt(num_tokens)[0])
