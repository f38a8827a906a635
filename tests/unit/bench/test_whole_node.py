"""The benchmark of a whole node runs on CPUs, too, with two ranks of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from tools.bench import whole_node
from tools.bench.dummy_locality import DummyLocality


@pytest.mark.slow
def test_two_ranks_measure_what_fits_and_what_there_is_time_for(
    drafting_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = f"--model-path {drafting_checkpoint('v32')} --device cpu --dtype float32 --kv-cache-dtype auto"
    sizes = "--dp-size 2 --context 256 --chunk 64 --buffer 96 --batch 2 --drafts 0 1 --steps 2"
    sizes += " --computed-tokens 128 --verify-rows"
    small = "--collectives 1 --link-bytes 100000 --seconds 240"
    out = tmp_path / "node"
    assert whole_node.main([*f"{options} {sizes} {small}".split(), "--out", str(out)]) == 0
    report = json.loads(out.with_suffix(".json").read_text())
    cells = {(row["mode"], row["num_drafts"], row["jitter"]): row for row in report["rows"]}
    assert len(cells) == len(report["rows"]) == 6  # dense steps know no jitter
    assert cells["hisparse", 0, 0.1]["hit_rate"] > cells["hisparse", 0, 0.27]["hit_rate"]
    assert [link["rank"] for link in report["links"]] == [0, 1]
    assert all(link["to_device_all_gb_s"] > 0 for link in report["links"])
    assert report["agreement"]["median_us"] > 0
    (found,) = report["collectives"]
    assert (found["tokens_a_rank"], found["way"]) == (1, "gloo")
    assert (found["rows_arrive"], found["sums_in_order"]) == (True, True)


def test_queries_share_a_part_and_heads_come_in_pairs_in_fp8(tiny_checkpoint: Callable[[str], Path]) -> None:
    spec = load_spec(tiny_checkpoint("v32"), "float32", load_format="dummy", num_draft_layers=0)
    columns = 2 * spec.index_head_dim
    locality = DummyLocality(spec)
    heads = torch.empty((spec.index_num_heads * spec.index_head_dim, columns), dtype=FP8)
    locality.draw_weight("model.layers.0.self_attn.indexer.wq_b.weight", heads)
    pairs = heads.float().view(-1, 2, spec.index_head_dim, columns)
    assert torch.equal(pairs[:, 0], -pairs[:, 1])
    assert not torch.equal(pairs[0, 0], pairs[1, 0])
    shared = pairs[:, 0, :, 0] / columns**0.5
    torch.testing.assert_close(shared.norm(dim=1), torch.ones(len(shared)), atol=0.05, rtol=0)
    assert torch.equal(shared[0], shared[1])
