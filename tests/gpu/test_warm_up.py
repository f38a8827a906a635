"""After a prefill node's warm-up no forward compiles anything: only the start waits for a compiler."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec", reason="msgspec is not installed")

from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.prefill_node.compute import PromptRunner
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.protocol.messages import Room
from hisparse_pd.protocol.prompt_scores import WantedScores
from tests.gpu.support import needs_gpu
from tests.unit.prefill_node.support import bootstrap_of
from tools.checkpoints.make_tiny import write_checkpoint

pytestmark = needs_gpu

MODULES = ("attention", "bit_masks", "experts", "fp8", "indexer", "kv_format", "rope")
MOST_TOKENS = 300
PAGE_SIZE = 16


def num_compiled() -> dict[str, int]:
    """Return the numbers of compiled Triton kernels by name."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"hisparse_pd.kernels.triton_{name}")
        for attribute, value in vars(module).items():
            if hasattr(value, "device_caches"):
                found[f"{name}.{attribute}"] = sum(len(caches[0]) for caches in value.device_caches.values())
    return found


def part(room: int, start: int, stop: int, num_tokens: int, pages: range) -> tuple[PrefillRequest, Chunk]:
    """Return positions [start, stop) of a prompt, of which ``num_tokens`` tokens are computed."""
    tokens = np.arange(num_tokens + 1) % 90 + 32
    nobody = Peer("", "", b"", PAGE_SIZE, {}, 0.0)
    bootstrap = bootstrap_of(room, tokens.tolist(), scores=WantedScores(1, 2))
    record = PrefillRequest(nobody, bootstrap, 0.0, page_ids=list(pages))
    return record, Chunk(Room(room), start, stop, admits=start == 0)


def make_runner(checkpoint: Path, kv_format: str) -> PromptRunner:
    write_checkpoint(checkpoint, "glm", draft_gain=1.0)
    dtype = "float32" if kv_format == "float32" else "bfloat16"
    spec = load_spec(checkpoint, num_draft_layers=1, dtype=dtype, kv_cache_dtype=kv_format)
    model = load_model(checkpoint, spec, "cuda")
    memory = PrefillMemory(spec, num_slots=128 * PAGE_SIZE, num_aux_slots=1, device="cuda")
    return PromptRunner(model, memory, PAGE_SIZE, chunk_tokens=MOST_TOKENS)


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "fp8_e4m3"])
def test_forwards_behind_the_warm_up_compile_nothing(tmp_path: Path, kv_format: str) -> None:
    runner = make_runner(tmp_path, kv_format)
    started = time.monotonic()
    runner.warm_up(MOST_TOKENS)
    warm, cold_secs = num_compiled(), time.monotonic() - started
    for size in (1, 2, 7, 16, 37, 100, 129, 255, 256, MOST_TOKENS):
        runner.run([part(1, 0, size, size, range(20))])
    runner.run(
        [part(1, 48, 99, 300, range(20)), part(2, 0, 33, 33, range(20, 24)), part(3, 0, 1, 9, range(30, 31))]
    )
    runner.run([part(1, 299, 300, 300, range(20))])
    print(f"{kv_format}: {sum(warm.values())} kernels in {cold_secs:.1f} s")
    assert num_compiled() == warm


def test_graphs_are_captured_behind_what_fills_their_padding(tmp_path: Path) -> None:
    """This holds even while the device is busy, and if the graphs get used memory, whose numbers are not
    token ids."""
    runner = make_runner(tmp_path, "bfloat16")
    runner.warm_up(MOST_TOKENS)
    torch.full((1 << 22,), -1, device="cuda")
    torch.cuda._sleep(1 << 29)
    runner.short.capture(MOST_TOKENS)
    torch.cuda.synchronize()
