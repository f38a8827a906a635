"""Streams whose decode node is lost go on at the other one, with the events that they would have had (I5).

The losses are connections that are cut behind every so many tokens, and nodes that are killed or told to
leave. What is compared are the events of a stream that nothing happens to, but for how they are cut.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cutting_proxy import CuttingProxy
from tests.integration.harness import (
    REQUEST_TIMEOUT_SECS,
    Deployment,
    decode_service,
    prefill_service,
    router_service,
    running,
)

Json = dict[str, Any]


@dataclass
class Cut:
    nodes: Deployment
    proxies: list[CuttingProxy]

    def cut_after(self, num_tokens: int | None) -> None:
        for proxy in self.proxies:
            proxy.cut_after = num_tokens


@pytest.fixture(scope="module")
def cut(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    checkpoint, directory = tiny_checkpoint("v32"), tmp_path_factory.mktemp("resume")
    prefill = [prefill_service(checkpoint, directory, "prefill")]
    options = ["--device-buffer-size", "128", "--speculative-num-steps", "0"]
    decode = [decode_service(checkpoint, directory, f"decode-{number}", options) for number in range(2)]
    with running([*prefill, *decode]), contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(CuttingProxy(node.url).running()) for node in decode]
        router = router_service(prefill, proxies, directory, ["--health-interval-secs", "0.5"])
        with running([router]):
            yield Cut(Deployment(prefill, decode, router), proxies)


def events_of(url: str, path: str, body: Json) -> list[Any]:
    answer = httpx.post(f"{url}{path}", json={**body, "stream": True}, timeout=REQUEST_TIMEOUT_SECS)
    assert answer.status_code == 200, answer.text
    assert ":journal" not in answer.text
    lines = [line for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def test_generate(cut: Cut) -> None:
    body = {"text": "Once upon a time " * 20, "sampling_params": {"temperature": 0, "max_new_tokens": 60}}
    undisturbed = events_of(cut.nodes.url, "/generate", body)
    cut.cut_after(20)
    try:
        found = events_of(cut.nodes.url, "/generate", body)
    finally:
        cut.cut_after(None)
    assert found[-1]["output_ids"] == undisturbed[-1]["output_ids"]
    assert found[-1]["text"] == undisturbed[-1]["text"]
    assert [len(e["output_ids"]) for e in found] == [len(e["output_ids"]) for e in undisturbed]
    assert sum(p.num_cuts for p in cut.proxies) >= 2
