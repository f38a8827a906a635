"""Masks on the GPU, and steps of the runner under them: every token that is drawn is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hisparse_pd.base.vocabulary import SamplingParams
from hisparse_pd.core.model.sampling import enqueue_sample
from hisparse_pd.kernels.bit_masks import allowed_logits
from tests.gpu.support import no_waiting
from tests.sampling import sample
from tools.bench import decode_step
from tools.checkpoints.make_synthetic import SyntheticShape, write_synthetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: this is about its kernels"),
]

EOS = (3,)
CHOICES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "min_new_tokens": 5},
    {"temperature": 1.0},
    {"top_k": 40, "num_logprobs": 2},
    {"temperature": 0.7, "top_p": 0.5},
]


def some(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((num_rows, vocab_size), generator=generator) * 4
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), generator=generator)
    words[::3] = -1
    return logits, words.to(torch.int32)


@pytest.mark.parametrize("vocab_size", [31, 100, 4096, 4097, 129280])
def test_the_kernel_gives_what_the_cpu_gives(vocab_size: int) -> None:
    logits, masks = some(64, vocab_size)
    on_gpu = logits.cuda()
    assert torch.equal(allowed_logits(on_gpu, masks.cuda()).cpu(), allowed_logits(logits, masks))
    assert torch.equal(on_gpu.cpu(), logits)
    assert allowed_logits(on_gpu[:0], masks[:0].cuda()).shape == (0, vocab_size)


@pytest.mark.I5
def test_what_is_drawn_under_masks_is_what_the_cpu_draws_and_nobody_waits() -> None:
    logits, masks = some(40, 32768)
    params = [
        SamplingParams(max_new_tokens=9, seed=row, **CHOICES[row % len(CHOICES)])  # type: ignore[arg-type]
        for row in range(40)
    ]
    expected, _ = sample(logits, params, [1] * 40, EOS, masks=masks)
    pinned = masks.pin_memory()
    logits_dev = logits.cuda()
    # the first call may wait for allocations
    enqueue_sample(logits_dev, params, [1] * 40, EOS, masks=pinned.cuda())
    with no_waiting():
        masks_dev = pinned.to("cuda", non_blocking=True)
        sampled = enqueue_sample(logits_dev, params, [1] * 40, EOS, masks=masks_dev)
    assert sampled.token_ids.tolist() == expected


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_steps_of_graphs_and_with_drafts_follow_the_grammar(tmp_path: Path) -> None:
    """The benchmark's matchers raise for a token that is not allowed; a graph is replayed in each step."""
    shape = SyntheticShape(2, 2, 256, 129280, 4096, draft_agreement=0.5)
    write_synthetic(tmp_path / "model", shape, 0, "cuda")
    options = (
        "--batch 8 --context 512 --chunk 512 --steps 12 --buffer 8448 --speculative-num-steps 0 3 --grammar"
    )
    out = tmp_path / "report"
    decode_step.main(["--model-path", str(tmp_path / "model"), *options.split(), "--out", str(out)])
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [(row["mode"], row["num_drafts"], row["has_grammar"]) for row in rows] == [
        (mode, num_drafts, has_grammar)
        for mode in ("dense", "hisparse")
        for num_drafts in (0, 3)
        for has_grammar in (False, True)
    ]
