"""A pair whose decode node has two fronts, behind a router."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.harness import (
    FLAGS,
    PROMPT,
    Deployment,
    Service,
    at_once,
    deployment,
    engine_pids,
    output_ids,
    wait_until,
)

NAME = ("--served-model-name", "tiny")
FRONTS = ("--api-server-count", "2")
NUM_ANSWERS = 24
GENERATED = "hisparse_pd:generation_tokens_total"


def ask(url: str, number: int) -> list[int]:
    return output_ids(url, text=PROMPT[number % 8 :], hisparse=FLAGS[number % 3])


def counted(service: Service, name: str) -> float:
    return service.metrics().get(f'hisparse_pd:{name}_total{{endpoint="/generate",status="200"}}', 0.0)


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_fronts_serve_as_one(
    pair: Deployment, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        prefill_options=NAME,
        decode_options=[*NAME, *FRONTS, "--device-buffer-size", "128"],
        router_options=["--policy", "cache_aware"],
    ) as started:
        (prefill,), (decode,) = started.prefill, started.decode
        got = at_once(lambda number: ask(started.url, number), range(NUM_ANSWERS), 8)
        assert got == [ask(pair.url, number) for number in range(NUM_ANSWERS)]
        for service, name in ((started.router, "router_requests"), (decode, "num_requests")):
            wait_until(lambda of=name, at=service: counted(at, of) == NUM_ANSWERS, name)  # type: ignore[misc]
        for _ in range(4):  # whichever process is asked
            assert counted(started.router, "router_requests") == NUM_ANSWERS
            assert counted(decode, "num_requests") == NUM_ANSWERS

        def num_generated() -> float:
            return sum(count for name, count in decode.metrics().items() if name.startswith(GENERATED))

        wait_until(lambda: num_generated() == 16 * NUM_ANSWERS, "the engine's report")
        children = engine_pids(decode)  # and what else it has spawned: its other front
        assert (len(children), len(engine_pids(prefill))) == (2, 1)
        *_, front = children
        os.kill(front, signal.SIGKILL)
        assert decode.exit_status() == 1
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        children = engine_pids(prefill)
        assert [prefill.stop(), started.router.stop()] == [0, 0]
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
