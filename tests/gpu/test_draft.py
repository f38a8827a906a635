"""The MTP layer on a GPU, in bfloat16 and fp8: its guesses are right as often as the layer was made for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import load_spec
from tests.gpu.support import needs_gpu
from tools.bench import decode_step
from tools.checkpoints.files import NUM_BYTES
from tools.checkpoints.make_synthetic import SyntheticShape, write_synthetic

pytestmark = needs_gpu

DEVICE = "cuda:0"
SHARE = 0.7
NUM_TOKENS, PAGE_SIZE = 1024, 64
SHAPE = SyntheticShape(
    num_layers=2, hidden_size=1024, vocab_size=8192, context_length=4096, draft_agreement=SHARE
)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_a_chain_of_two_guesses(tmp_path: Path, in_fp8: bool, kv_dtype: str) -> None:
    write_synthetic(tmp_path, SHAPE, seed=3, device=DEVICE, in_fp8=in_fp8)
    spec = load_spec(tmp_path, "bfloat16", kv_dtype, device=DEVICE)
    model = load_model(tmp_path, spec, DEVICE)
    kernels = AttentionKernels.choose(model, "auto", scratch_tokens=NUM_TOKENS)
    pools = [
        torch.zeros((layers, NUM_TOKENS, num_bytes), dtype=torch.uint8, device=DEVICE)
        for layers, num_bytes in (
            (spec.num_kv_layers, spec.item_bytes),
            (spec.num_index_groups, spec.index_item_bytes),
        )
    ]
    pages = torch.arange(NUM_TOKENS // PAGE_SIZE, device=DEVICE)
    request = PagedRequest(pages, 0, NUM_TOKENS)
    kv = PagedKv(spec, pools[0], pools[1], PAGE_SIZE, [request], kernels=kernels)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(NUM_BYTES, SHAPE.vocab_size - 6, (NUM_TOKENS + 1,), generator=generator)
    tokens, rows = tokens.to(DEVICE), torch.arange(NUM_TOKENS, device=DEVICE)

    logits, hidden = model.forward_with_hidden(tokens[:-1], kv.positions, kv, rows)
    drawn = logits.argmax(1)
    logits, state = model.draft(tokens[1:], hidden, kv.positions, kv, rows)
    first = logits.argmax(1)
    assert abs(float((first[:-1] == drawn[1:]).float().mean()) - SHARE) < 0.06
    (hint,) = kv.hints
    assert hint is not None
    assert int((hint[-1] >= 0).sum()) == min(NUM_TOKENS, spec.index_topk)

    logits, _ = model.draft(first, state, kv.positions, kv, rows)
    second = logits.argmax(1)
    drawn = model.forward(first, kv.positions, kv, rows).argmax(1)
    assert abs(float((second == drawn).float().mean()) - SHARE) < 0.08
    assert pools[0][-1].any(dim=1).all()
    assert pools[1][-1].any(dim=1).all()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("shares", [False, True])
def test_steps_of_graphs_with_seven_drafts(tmp_path: Path, shares: bool) -> None:
    """Drafts with their own selections, or the first draft's, are right as often as the layer was made
    for."""
    shape = SyntheticShape(2, 2, 256, 8192, 8192, index_topk=256, draft_agreement=0.8)
    checkpoint = tmp_path / "model"
    write_synthetic(checkpoint, shape, 0, DEVICE)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"index_share_for_mtp_iteration": shares}))
    out = tmp_path / "report"
    options = "--batch 1 8 --context 4096 --chunk 4096 --steps 24 --buffer 2056 --speculative-num-steps 7"
    decode_step.main(["--model-path", str(checkpoint), *options.split(), "--out", str(out)])
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [(row["mode"], row["batch"]) for row in rows] == [
        (mode, batch) for batch in (1, 8) for mode in ("dense", "hisparse")
    ]
    # 4.2 tokens a step are expected if each draft is right in 8 of 10 cases.
    assert all(2.5 < row["tokens_a_step"] < 6 for row in rows)
