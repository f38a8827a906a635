"""What counts as a wait of a running request, and the options of a pair on two devices."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.pair import add_pair_options, options_of_pair
from bench.prefix_copies import Streams, Window, summary
from hisparse_pd import pair_settings


def test_a_wait_counts_where_its_token_came() -> None:
    streams = Streams([[1.0, 2.0, 4.0, 7.0], [3.5, 3.75]])
    assert streams.itl_secs(2.5, 4.0) == [2.0, 0.25]
    assert streams.itl_secs(7.5, 9.0) == []


def test_windows_of_a_name_are_put_together() -> None:
    windows = [
        Window("alone", [0.001] * 99),
        Window("copied", [0.001, 0.003], 0.5, 64),
        Window("copied", [0.002], 0.25, 128),
        Window("nothing came", []),
    ]
    figures = summary(windows)
    assert list(figures) == ["alone", "copied", "nothing came"]
    assert figures["alone"]["itl_p99_ms"] == pytest.approx(1.0)
    copied = figures["copied"]
    assert (copied["requests"], copied["tokens"], copied["held_tokens"]) == (2, 3, [64, 128])
    assert copied["itl_p50_ms"] == pytest.approx(2.0)
    assert copied["itl_max_ms"] == pytest.approx(3.0)
    assert copied["ttft_ms"] == [500.0, 250.0]
    assert figures["nothing came"]["itl_p99_ms"] == 0


def test_each_node_gets_its_device_and_pools_that_are_large_enough(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_pair_options(parser)
    words = ["--devices", "cuda:0", "cuda:1", "--pair-option", "host-pool-tokens=4096"]
    with options_of_pair(parser.parse_args(words), {"kv": 1025, "host": 99999, "device": 5000}) as found:
        given = {name.removeprefix("--").replace("-", "_"): value for name, value in found.items()}
        config = Path(str(given.pop("config")))
        _, prefill, decode, _ = pair_settings({"model_path": tmp_path, **given}, config)
    assert not config.exists()
    assert (prefill.device, decode.device) == ("cuda:0", "cuda:1")
    assert (prefill.kv_pool_tokens, decode.host_pool_tokens, decode.device_pool_tokens) == (2048, 4096, 5120)
