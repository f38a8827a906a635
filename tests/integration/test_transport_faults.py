"""A pair over a transport that drops, delays, repeats and reorders: right tokens or a clear error.

The decode node has canaries in its free slots, so a byte that lands where nobody waits for it is found, too.
The transport reorders descriptors within a batch: a room's next batch starts when one has landed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED
from tests.faults.transport import FaultRates
from tests.integration.harness import (
    FLAGS,
    NO_FAULTS,
    Deployment,
    at_once,
    deployment,
    generate,
    generate_by,
    is_empty,
    wait_until,
)

NUM_REQUESTS = 60
NUM_CLIENTS = 8
MAX_NEW_TOKENS = 8
LENGTHS = (1, 3, 64, 65, 130, 300)
RATES = {"dropped": 0.04, "partial": 0.06, "late": 0.06, "slow": 0.06, "twice": 0.15, "shuffled": 0.15}
PATIENCE_SECS = 60.0


def ask(url: str, prompt: Sequence[int], num_new_tokens: int, hisparse: bool | str) -> httpx.Response:
    return generate(url, input_ids=prompt, hisparse=hisparse, params={"max_new_tokens": num_new_tokens})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_right_tokens_or_a_clear_error(
    tiny_checkpoint: Callable[[str], Path], pair: Deployment, tmp_path: Path
) -> None:
    """``pair``, whose transport has no faults, gives the right tokens."""
    # Prompts that share beginnings: the prefix cache is used as well.
    prompts = [[40 + (start + p) % 80 for p in range(length)] for length in LENGTHS for start in (0, 7)]
    expected = [ask(pair.url, prompt, MAX_NEW_TOKENS, True).json()["output_ids"] for prompt in prompts]
    faults = tmp_path / "faults"
    rates = FaultRates(report=str(faults), seed=5, late_secs=1.0, slow_secs=0.3, **RATES)
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        prefill_options=["--same-host-lane", "off"],
        # Pools that are so small that freed slots are soon given out again.
        decode_options=[
            *("--host-pool-tokens", "1200", "--device-pool-tokens", "1024"),
            *("--quarantine-secs", "2", "--device-buffer-size", "128"),
        ],
        prefill_faults={"TRANSPORT_FAULTS": rates.to_json()},
        decode_faults={"CANARY_REPORT": str(tmp_path / "canaries.json")},
    ) as faulty:
        (prefill,), (decode,) = faulty.prefill, faulty.decode

        def answer(number: int) -> httpx.Response:
            prompt, flag = prompts[number % len(prompts)], FLAGS[number % len(FLAGS)]
            return ask(faulty.url, prompt, 1 + number % MAX_NEW_TOKENS, flag)

        answers = at_once(answer, range(NUM_REQUESTS), NUM_CLIENTS)
        wait_until(lambda: is_empty(decode), "the decode node's pools are whole")
        httpx.post(prefill.url + "/flush_cache", timeout=PATIENCE_SECS)
        wait_until(lambda: is_empty(prefill), "the prefill node's pools are whole")
        (report,) = tmp_path.glob("canaries-*.json")
        canaries = json.loads(report.read_text())
    for number, got in enumerate(answers):
        if got.status_code == 200:
            num_new_tokens = 1 + number % MAX_NEW_TOKENS
            assert got.json()["output_ids"] == expected[number % len(prompts)][:num_new_tokens]
        else:
            assert got.status_code in (502, 503, 504), got.text
            assert got.json()["error"]["message"]
    outcomes = Counter(got.status_code for got in answers)
    assert outcomes[200] >= NUM_REQUESTS // 4, outcomes
    seen = Counter(faults.read_text().splitlines())
    assert set(RATES) | {"landed late"} <= set(seen), seen
    assert canaries["findings"] == []
    assert canaries["bytes_checked"] > 0


@pytest.mark.I1
@pytest.mark.I7
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("lane", "quarantine_secs"), [("off", "2"), ("auto", "3600")], ids=["tcp", "shm"])
def test_a_prefill_node_that_is_killed_in_mid_transfer_fails_its_request_and_serves_again(
    tiny_checkpoint: Callable[[str], Path],
    pair: Deployment,
    tmp_path: Path,
    lane: str,
    quarantine_secs: str,
) -> None:
    """The decode node notices by itself, as there is no router. Heartbeats have their defaults.

    Over shared memory its slots are free as soon as the kernel has ended the writer, whatever the quarantine.
    """
    prompt = list(range(40, 110))
    expected = ask(pair.url, prompt, MAX_NEW_TOKENS, True).json()["output_ids"]
    faults = tmp_path / "faults"
    rates = FaultRates(str(faults), seed=1, slow=1.0, slow_secs=1e4)
    with (
        deployment(
            tiny_checkpoint("v32"),
            tmp_path,
            prefill_options=["--same-host-lane", lane],
            decode_options=["--quarantine-secs", quarantine_secs],
            prefill_faults={"TRANSPORT_FAULTS": rates.to_json()},
        ) as nodes,
        ThreadPoolExecutor(1) as threads,
    ):
        (prefill,), (decode,) = nodes.prefill, nodes.decode
        params = {"max_new_tokens": MAX_NEW_TOKENS}
        asked = threads.submit(
            generate_by, prefill, decode, 7, input_ids=prompt, hisparse=True, params=params
        )
        wait_until(faults.exists, "a write is under way")
        prefill.kill()
        answer = asked.result(PATIENCE_SECS)
        assert answer.status_code == 502, answer.text
        assert answer.json()["error"]["code"] == PREFILL_NODE_FAILED
        assert f"127.0.0.1:{prefill.bootstrap_port}" in answer.json()["error"]["message"]
        wait_until(lambda: is_empty(decode), "the decode node's pools are whole")
        prefill.put_in(NO_FAULTS)
        prefill.start()
        prefill.wait_healthy()

        def is_served() -> bool:
            again = ask(nodes.url, prompt, MAX_NEW_TOKENS, True)
            return again.status_code == 200 and again.json()["output_ids"] == expected

        wait_until(is_served, "the node that came back serves, and right")
