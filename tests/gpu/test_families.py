"""Parts that differ between families, on a GPU: the logits of a CPU, and steps of graphs over shared KV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import load_spec
from tests.gpu.support import DEVICE, needs_gpu
from tools.bench import decode_step
from tools.checkpoints.make_tiny import write_checkpoint

pytestmark = needs_gpu

PAGE_SIZE, NUM_TOKENS = 64, 384


def write(path: Path, variant: str) -> None:
    write_checkpoint(path, variant)
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"the transformers installed here does not know {model_type}")


def logits_on(checkpoint: Path, device: str) -> Tensor:
    """Return the logits of every token of a prompt, which is computed in two chunks."""
    spec = load_spec(checkpoint, "float32")
    model = load_model(checkpoint, spec, device)
    kernels = AttentionKernels.choose(model, "auto", scratch_tokens=NUM_TOKENS)
    kv_pool, index_pool = (
        torch.zeros((layers, NUM_TOKENS, num_bytes), dtype=torch.uint8, device=device)
        for layers, num_bytes in (
            (spec.num_kv_layers, spec.item_bytes),
            (spec.num_index_groups, spec.index_item_bytes),
        )
    )
    pages = torch.arange(NUM_TOKENS // PAGE_SIZE, device=device)
    tokens = torch.randint(32, 127, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).to(device)
    chunks = []
    for start, stop in ((0, 300), (300, NUM_TOKENS)):
        request = PagedRequest(pages, start, stop - start)
        kv = PagedKv(spec, kv_pool, index_pool, PAGE_SIZE, [request], kernels=kernels)
        chunks.append(model.forward(tokens[start:stop], kv.positions, kv, None).cpu())
    return torch.cat(chunks)


@pytest.mark.parametrize("variant", ["v32", "axk2", "mistral"])
def test_logits_are_those_of_a_cpu(tmp_path: Path, variant: str) -> None:
    """Logits may differ where two scores at the end of a selection are nearly equal."""
    write(tmp_path, variant)
    expected, found = logits_on(tmp_path, "cpu"), logits_on(tmp_path, DEVICE)
    off = (found - expected).abs().amax(dim=1)
    assert float((off < 0.01).float().mean()) > 0.95
    assert float((found.argmax(1) == expected.argmax(1)).float().mean()) > 0.98


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_steps_of_graphs_whose_index_groups_share_hot_buffers(tmp_path: Path) -> None:
    """Each copied row is verified, so that a row at a wrong place would end the step."""
    checkpoint, out = tmp_path / "model", tmp_path / "report"
    write(checkpoint, "mistral")
    options = "--batch 1 8 --context 2048 --chunk 512 --steps 24 --buffer 160 --verify-rows"
    decode_step.main(["--model-path", str(checkpoint), *options.split(), "--out", str(out)])
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [(row["mode"], row["batch"]) for row in rows] == [
        (mode, batch) for batch in (1, 8) for mode in ("dense", "hisparse")
    ]
    assert all(0 < row["hit_rate"] < 1 for row in rows if row["mode"] == "hisparse")
