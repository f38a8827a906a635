"""The benchmark of agreements runs as many ranks as it is told to, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import rank_agreement


@pytest.mark.slow
def test_two_ranks_agree_through_memory_and_over_the_network(tmp_path: Path) -> None:
    out = tmp_path / "agreements"
    options = "--ranks 2 --calls 5 --rest-ms 0 1"
    assert rank_agreement.main([*options.split(), "--out", str(out)]) == 0
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [(row["ranks"], row["rest_ms"]) for row in rows] == [(2, 0), (2, 1)]
    for row in rows:
        for way in ("memory", "network"):
            assert 0 < row[f"{way}_median_us"] <= row[f"{way}_p99_us"] <= row[f"{way}_max_us"]
