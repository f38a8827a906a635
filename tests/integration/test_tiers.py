"""``tools.bench.tiers`` finds prefixes in the tiers to which it brings them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.integration.harness import deployment
from tests.waiting import NEVER_SECS
from tools.bench.pair import Pair
from tools.bench.tiers.__main__ import Run, main, parse

CONTEXTS = (256, 512)
SIZES = [
    *("--context", *map(str, CONTEXTS), "--turn-tokens", "50", "--repeats", "1"),
    *("--host-cache-tokens", "16384", "--conversation-tokens", "200", "--output-tokens", "4"),
]


@pytest.mark.slow
def test_prefixes_come_from_device_main_memory_and_decode_node(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint, out = tiny_checkpoint("v32"), tmp_path / "report"
    words = ["--model-path", str(checkpoint), *SIZES, "--conversations", "2", "--turns", "2"]
    options = parse([*words, "--link-gb-per-s", "0.001", "--out", str(out)])
    run = Run(options, Console(), time.monotonic() + NEVER_SECS)
    common = ("--page-size", "16")
    host = ("--host-cache-tokens", "16384", "--kv-pool-tokens", "1408")
    with deployment(checkpoint, tmp_path, prefill_options=[*common, *host], decode_options=common) as nodes:
        pair = Pair(nodes.url, nodes.prefill[0].url, nodes.decode[0].url)
        asyncio.run(run.measure_with("tiers", pair))
    run.show()
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["missing"] == []
    assert [(row["prefix"], row["context"], row["hisparse"]) for row in report["rows"]] == [
        (tier, context, mode)
        for tier in ("device", "host", "decode")
        for context in CONTEXTS
        for mode in ("true", "false")
    ]
    for row in report["rows"]:
        assert row["turns"] == 1, row
        num_bytes = row["context"] * report["token_bytes"]
        if row["prefix"] == "device":
            assert row["bound, ms"] is None
        else:
            assert row["on the link, ms"] == pytest.approx(num_bytes / 1e6 * 1e3)
            assert row["bound, ms"] > 1.3 * row["on the link, ms"]
    (said,) = report["conversations"]
    assert said["is_whole"]
    assert sorted(each["num_prompt_tokens"] for each in said["requests"]) == [200, 200, 254, 254]
    assert said["computed_tokens"] + said["cached_tokens"] == 908
    assert said["cached_tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pairs_of_its_own_compute_prefixes_and_have_a_store(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "report"
    status = main(
        [
            *("--model-path", str(tiny_checkpoint("v32")), *SIZES, "--hisparse", "true"),
            *("--pairs", "none", "store", "--store-gib", "1", "--seconds", "300", "--out", str(out)),
            "--pair-options=--page-size 16 --kv-pool-tokens 1408 --num-threads 1",
        ]
    )
    report = json.loads(out.with_suffix(".json").read_text())
    assert (status, report["missing"]) == (0, [])
    assert [(row["prefix"], row["turns"]) for row in report["rows"]] == [
        ("computed", 1),
        ("computed", 1),
        ("storage", 1),
        ("storage", 1),
    ]
