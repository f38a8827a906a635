"""Whole steps with verified rows, in CUDA graphs: plain ones, split ones, and with drafts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node import forwards
from hisparse_pd.decode_node.drafting import full_buffer
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.split_choice import Split
from hisparse_pd.kernels.row_check import row_checks_of, wrong_row
from hisparse_pd.kernels.row_errors import HotBufferError, ReadAt
from tests.gpu.support import DEVICE, needs_gpu
from tools.bench.step_bench import Bench
from tools.bench.step_options import make_settings
from tools.bench.step_prompt import prefill
from tools.checkpoints.make_synthetic import SyntheticShape, write_synthetic

pytestmark = [*needs_gpu, pytest.mark.I9]

TOP_K, CONTEXT, CHUNK, NUM_REQS, NUM_STEPS = 256, 2048, 1024, 5, 16


@pytest.mark.parametrize(
    ("num_drafts", "split"), [(0, Split.WHOLE), (0, Split.PARTS), (0, Split.MICRO_BATCHES), (3, Split.WHOLE)]
)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_wrong_rows_are_found_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, num_drafts: int, split: Split
) -> None:
    """Rows that steps wrote match their checks. A later change is found by the next steps of its request, and
    by no other request's."""
    shape = SyntheticShape(2, 2, 256, 8192, 8192, index_topk=TOP_K, draft_agreement=0.8)
    write_synthetic(tmp_path, shape, 0, DEVICE)
    has_drafts = int(num_drafts > 0)
    spec = load_spec(tmp_path, "bfloat16", kv_dtype, device=DEVICE, num_draft_layers=has_drafts)
    arguments = Namespace(
        model_path=tmp_path,
        device=DEVICE,
        dtype="bfloat16",
        kv_cache_dtype=kv_dtype,
        indexer_cache_dtype="auto",
        attention_backend="auto",
        attention_split_tile_size=None,
        load_format="auto",
        micro_batch_min_bs=0 if split is Split.WHOLE else 2,
        buffer=full_buffer(num_drafts, TOP_K),
        no_graphs=False,
    )
    monkeypatch.setattr(forwards, "UNMEASURED_SPLIT", split)
    monkeypatch.setattr(forwards, "fastest", lambda secs: split)
    settings = make_settings(arguments, NUM_REQS, num_drafts)
    model = load_model(tmp_path, spec, DEVICE)
    prompt = prefill(spec, model, settings, CHUNK, CONTEXT)
    bench = Bench(spec, model, settings, prompt, Mode.HISPARSE, NUM_STEPS, None)
    memory, state = bench.memory, bench.tables.state
    row_checks = state.require_row_checks()
    try:
        assert bench.runner.would_split(bench.requests) is (split is not Split.WHOLE)
        bench.run(NUM_STEPS)
        for request in bench.requests:
            slots, check_slots = (
                slots_tensor(request.extents(kind))[: request.num_kv_tokens].to(row_checks.device)
                for kind in (PoolKind.HOST, PoolKind.INDEX)
            )
            assert len(slots) >= CONTEXT + NUM_STEPS
            positions = torch.arange(len(slots), device=row_checks.device)
            assert torch.equal(row_checks_of(memory.k_host, slots, positions), row_checks[:, check_slots])
        victim = bench.requests[3]
        (extent, *_) = victim.extents(PoolKind.HOST)
        memory.k_host[:, extent.start : extent.start + CONTEXT, 5] ^= 1
        with pytest.raises(RuntimeError, match="WRONG_ROW"):
            bench.run(3 * NUM_STEPS)
        flags = state.error_flags.tolist()
        is_wrong = [bool(flags[request.req_row] & HotBufferError.WRONG_ROW) for request in bench.requests]
        assert is_wrong == [request is victim for request in bench.requests]
        found = wrong_row(state, victim.req_row)
        assert (found.read_at, found.is_on_host) == (ReadAt.SWAP_IN, True)
        assert found.item.slot == extent.start + found.item.position
    finally:
        memory.close()
