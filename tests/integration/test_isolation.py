"""Clients that leave, garbage, missing peers and full pools disturb no other request.

The pools are whole again afterwards. Invariants I2, I5 and I7.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hisparse_pd.protocol import bootstrap, messages
from hisparse_pd.protocol.channels import ControlClient
from tests.integration.harness import (
    DEVICE,
    PROMPT,
    Deployment,
    Service,
    deployment,
    generate,
    generate_body,
    is_idle,
    pool_usage,
    wait_until,
)
from tools.bench import same_tokens

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def cramped(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A pair with smaller pages than ``pair`` and a small device pool."""
    common = ["--page-size", "8", "--served-model-name", "tiny"]
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path_factory.mktemp("cramped"),
        prefill_options=common,
        # Three dense requests of 44 pages each grow side by side in 100, until one has to leave its own.
        decode_options=[
            *common,
            *("--device-pool-tokens", "800", "--device-buffer-size", "96"),
        ],
    ) as started:
        yield started


@pytest.mark.skipif(DEVICE != "cpu", reason="float32 products of a GPU follow the number of rows")
def test_answers_have_the_same_bits_alone_beside_others_and_in_every_mode(pair: Deployment) -> None:
    asked = argparse.Namespace(
        url=f"{pair.url}/v1",
        node_urls=[node.url for node in (*pair.prefill, *pair.decode)],
        requests=2,
        prompt_tokens=190,
        output_tokens=4,
        token_range=(3, 250),
        seed=0,
    )
    rows = same_tokens.measure(asked)
    for row in rows:
        assert row["equal logprobs"] == row["answers"] == 2, row["question"]
        assert row["leading equal tokens"] == 4 or "going on" in row["question"]
    assert rows[-1]["tokens read"] > 0


def test_a_client_that_leaves_frees_everything(pair: Deployment) -> None:
    decode = pair.decode[0]
    aborted = "hisparse_pd:aborted_requests_total"
    for hisparse in (True, False):
        body = generate_body(stream=True, params={"max_new_tokens": 4000}, hisparse=hisparse)
        with httpx.stream("POST", f"{pair.url}/generate", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # kept: closing it would close the answer
            next(lines)
            wait_until(lambda: decode.metrics()["hisparse_pd:num_running_reqs"] == 1, "the request runs")
            assert pool_usage(decode) > 0
            num_aborted = decode.metrics()[aborted]  # all earlier requests have ended, and are counted
        wait_until(
            lambda before=num_aborted: decode.metrics()[aborted] == before + 1,  # type: ignore[misc]
            "the abort",
        )
        wait_until(lambda: is_idle(decode) and pool_usage(decode) == 0, "pools whole after the abort")


def test_garbage_at_the_control_socket_is_counted_and_harmless(pair: Deployment) -> None:
    prefill = pair.prefill[0]
    info = bootstrap.look_up("127.0.0.1", prefill.bootstrap_port)
    client = ControlClient(info.control_endpoint("127.0.0.1"))
    dropped = 'hisparse_pd:control_messages_dropped_total{reason="malformed"}'
    before = prefill.metrics().get(dropped, 0)
    try:
        no_text = b"\x93\x04\x03\xa2\xff\xfe"  # an abort whose reason is no UTF-8
        too_deep = b"\x93\x02\x09" + b"\x91" * 100_000 + b"\xc0"  # a heartbeat with a nested further field
        for frame in (b"", b"\xff" * 100, b"\x91\x63", b"\x80", messages.encoder.encode([3, 1])):
            client.socket.send(frame)
        client.socket.send(no_text)
        client.socket.send(too_deep)
        extents = (messages.Extent(0, 1),)
        client.send(messages.Bootstrap(1, extents, extents, 0, bytes(8), bytes(messages.ROOT_BYTES)))
        wait_until(lambda: prefill.metrics().get(dropped, 0) >= before + 7, "garbage counted")
    finally:
        client.close()
    assert generate(pair.url).status_code == 200


@pytest.mark.I5
@pytest.mark.slow
def test_retraction_under_pressure_keeps_the_tokens(pair: Deployment, cramped: Deployment) -> None:
    """Dense requests that outgrow the device pool push others out; every answer is as with room for all."""
    decode = cramped.decode[0]
    prompts = [f"{number} {PROMPT[:24]}" for number in range(8)]
    params = {"max_new_tokens": 320}
    flags = [False, False, False, True, False, False, True, False]
    first, others = range(3), range(3, len(prompts))

    def num_retractions(node: Service) -> float:
        return node.metrics()["hisparse_pd:retractions_total"]

    def answer(url: str, number: int) -> httpx.Response:
        return generate(url, text=prompts[number], params=params, hisparse=flags[number])

    before = num_retractions(pair.decode[0])
    with ThreadPoolExecutor(len(prompts)) as threads:
        pending = [threads.submit(answer, pair.url, number) for number in range(len(prompts))]
        expected = [future.result().json()["output_ids"] for future in pending]
        assert num_retractions(pair.decode[0]) == before
        assert num_retractions(decode) == 0
        pending = [threads.submit(answer, cramped.url, number) for number in first]
        wait_until(lambda: num_retractions(decode) > 0, "the third is pushed out")
        pending += [threads.submit(answer, cramped.url, number) for number in others]
        answers = [future.result() for future in pending]
    assert [answer.status_code for answer in answers] == [200] * len(prompts), answers[0].text
    assert [answer.json()["output_ids"] for answer in answers] == expected
    wait_until(lambda: pool_usage(decode) == 0, "pools whole")


@pytest.mark.slow
def test_health_does_not_depend_on_the_peer(pair: Deployment) -> None:
    decode = pair.decode[0]
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 5}
    answer = generate(decode.url, **room)
    assert answer.status_code in (502, 503)
    assert "127.0.0.1:1" in json.dumps(answer.json())
    assert decode.is_healthy()
    wait_until(lambda: pool_usage(decode) == 0, "the report behind the request's end")
