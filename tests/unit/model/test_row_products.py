"""Every product of a forward on a CPU is one of ``kernels.row_math``, so that no token's bits depend on what
shares its batch or on the number of threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedRequest
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.kernels import row_math
from tests.checkpoint_edits import edit_config
from tests.unit.model.paged_model import PagedModel
from tools.checkpoints.make_tiny import VARIANTS, write_checkpoint

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "einsum", "_scaled_mm"}
ODD = {
    "hidden_size": 75,
    "intermediate_size": 53,
    "moe_intermediate_size": 21,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 6,
    "q_lora_rank": 37,
    "kv_lora_rank": 29,
    "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 10,
    "v_head_dim": 13,
    "index_n_heads": 5,
    "index_head_dim": 27,
    "index_topk": 23,
    "n_group": 1,
    "topk_group": 1,
}
"""Sizes that fill no vector register, and so few heads and experts that libraries have code for them."""
LENGTHS = (1, 9, 40, 150)
SAMPLE = ("v32", "mistral")
"""Variants of the default run, of which the second has layers without rope and of shared KV."""


class Watch(TorchDispatchMode):
    """Products that are made outside of ``kernels.row_math``, and how many inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elsewhere: list[str] = []
        self.num_inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        # With an inner size of 1 nothing is added up: transformers makes angles of positions so.
        if name in PRODUCTS and not (name == "bmm" and tensors[1].shape[1] == 1):
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back
            if frame.f_code.co_filename == row_math.__file__:
                self.num_inside += 1
            else:
                self.elsewhere.append(f"{name} in {frame.f_code.co_filename}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def paged(path: Path, num_draft_layers: int = 0, **options: Any) -> PagedModel:
    spec = load_spec(path, num_draft_layers=num_draft_layers, **options)
    return PagedModel(spec, load_model(path, spec), 48, 32)


@pytest.mark.I5
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        # Each variant, and the other dtype with those of ``SAMPLE``.
        pytest.param(name, dtype, marks=() if dtype == "float32" or name in SAMPLE else pytest.mark.slow)
        for name in VARIANTS
        for dtype in ("float32", "bfloat16")
    ],
)
def test_every_product_of_a_forward_is_made_in_one_place(
    variant: str,
    dtype: str,
    tiny_checkpoint: Callable[[str], Path],
    drafting_checkpoint: Callable[[str], Path],
) -> None:
    has_drafts = variant in ("v32", "glm")
    path = (drafting_checkpoint if has_drafts else tiny_checkpoint)(variant)
    model = paged(path, int(has_drafts), dtype=dtype)
    pages = model.free_pages[:30]
    with Watch() as watch:
        for start, tokens in ((0, [65] * 100), (100, [66])):
            ids, kv = torch.tensor(tokens), model.kv(PagedRequest(pages, start, len(tokens)))
            logits, hidden = model.model.forward_with_hidden(ids, kv.positions, kv, None)
            model.model.logits(hidden)
            if has_drafts:
                model.model.draft(ids, hidden, kv.positions, kv, kv.last_rows)
                model.model.write_draft_kv(ids, hidden, kv.positions, kv)
    assert logits.isfinite().all()
    assert watch.num_inside > 100
    assert not watch.elsewhere


def logits_of(model: PagedModel, chunk: int, *, together: bool) -> list[Tensor]:
    """Each prompt's logits behind its last token, and behind one token more: of all in one batch, or not."""
    generator = torch.Generator().manual_seed(6)
    sizes = [-(-(length + 1) // model.page_size) for length in LENGTHS]
    prompts = [
        (pages, torch.randint(32, 127, (length,), generator=generator).tolist())
        for pages, length in zip(model.free_pages[: sum(sizes)].split(sizes), LENGTHS, strict=True)
    ]
    found = []
    for batch in [prompts] if together else [[prompt] for prompt in prompts]:
        last: list[Tensor] = [torch.empty(0)] * len(batch)
        for start in range(0, max(len(tokens) for _, tokens in batch), chunk):
            parts = [(pages, start, tokens[start : start + chunk]) for pages, tokens in batch]
            some = [number for number, (_, _, tokens) in enumerate(parts) if tokens]
            logits, _ = model.extend([parts[number] for number in some])
            for number, row in zip(some, logits, strict=True):
                last[number] = row
        step, _ = model.extend([(pages, len(tokens), [65]) for pages, tokens in batch])
        found += [torch.stack(rows) for rows in zip(last, step, strict=True)]
    return found


@pytest.mark.I5
@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in VARIANTS],
)
def test_odd_sizes_have_the_same_bits_in_any_company_and_threads(
    variant: str, tmp_path: Path, set_threads: Callable[[int], None]
) -> None:
    write_checkpoint(tmp_path, variant)
    edit_config(tmp_path, **ODD)
    model = paged(tmp_path, load_format="dummy")
    set_threads(1)
    alone = logits_of(model, 1000, together=False)
    for num_threads, chunk in ((1, 37), (2, 1000), (4, 37)):
        set_threads(num_threads)
        found = logits_of(model, chunk, together=True)
        for length, ours, expected in zip(LENGTHS, found, alone, strict=True):
            assert torch.equal(ours, expected), (num_threads, chunk, length)
