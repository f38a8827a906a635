"""What one request, or many, may cost a front: bytes to the engine, and places in the queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine.messages import ToEngine, unpack_token_ids
from hisparse_pd.engine.sockets import FrontSocket
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.requests import RequestLimits, plan_samples
from hisparse_pd.serving.api.schemas import parse_request
from hisparse_pd.serving.http.http_errors import ApiError, QueueFull
from hisparse_pd.serving.http.queue_limits import QueueLimits
from tests.property.fuzzing import peak_bytes
from tests.unit.api import scripted_engine
from tests.unit.api.scripted_engine import plays, say
from tests.unit.api.support import BODY, CODEC, ROOM, connectionless_link, group_of, parse, serving
from tests.waiting import until

pytestmark = pytest.mark.anyio


# --- what goes to the engine -------------------------------------------------------------------------


@pytest.mark.I7
@pytest.mark.I8
async def test_a_prompt_goes_to_the_engine_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONTEXT_LENGTH", "POOL_HISPARSE", "POOL_DENSE"):
        monkeypatch.setattr(scripted_engine, name, 140_000)
    sent: list[bytes] = []

    class Spy(FrontSocket):
        def send(self, message: ToEngine) -> bool:
            sent.append(engine_messages.encoder.encode(message))
            return super().send(message)

    monkeypatch.setattr("hisparse_pd.serving.http.rank_link.FrontSocket", Spy)
    prompt = [i % 251 for i in range(131_072)]
    async with serving(say("x"), tmp_path) as node:
        answer = await node.post("/v1/completions", **{**BODY, "prompt": prompt, "n": 128})
        assert answer.status_code == 200
        (group,) = node.engine.groups
        assert len(group.samples) == 128
        assert unpack_token_ids(group.prompt).tolist() == prompt
        assert {sample.num_prompt_tokens for sample in group.samples} == {131_072}
    assert sum(map(len, sent)) < 4 * 131_072 + 18 * 2048 + 128 * 400, "with a key for each page"


# --- what a request may ask for ----------------------------------------------------------------------


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize("item", [b"[0]", b'"a"', b"{}"])
def test_a_hostile_body_makes_no_objects(item: bytes) -> None:
    room = json.dumps(ROOM).encode()[1:]
    body = b'{"prompt":[[0],' + b",".join([item] * (1 << 20)) + b"]," + room
    refused = []

    def refuse() -> None:
        with pytest.raises(ApiError) as caught:
            parse_request(Endpoint.COMPLETIONS, body, "tiny")
        refused.append(caught.value)

    # What other threads of the process allocate counts, too, but not three times in a row.
    assert min(peak_bytes(refuse) for _ in range(3)) < len(body) + (2 << 20)
    assert (refused[0].status, refused[0].param) == (400, "prompt")
    assert "at most 4096" in refused[0].message


@pytest.mark.I8
def test_ids_of_many_pieces_are_checked_one_by_one() -> None:
    ids: list[Any] = [i % 251 for i in range(60_000)]

    def packed(given: list[Any]) -> list[int]:
        (prompt,) = parse(Endpoint.COMPLETIONS, prompt=given).prompts
        assert isinstance(prompt, bytes)
        values: list[int] = unpack_token_ids(prompt).tolist()
        return values

    assert packed(ids) == ids
    for value, shown in ((True, "true"), (1.5, "1.5"), (-1, "-1"), (2**31, "2147483648"), ("7", '"7"')):
        with pytest.raises(ApiError) as caught:
            packed([*ids[:45_000], value, *ids[45_001:]])
        assert caught.value.param == "prompt[45000]"
        assert caught.value.message.startswith(f"prompt[45000]: {shown} must be")
    with pytest.raises(ApiError, match="prompt: must have nothing but token ids"):
        packed([0, [1, 2, 3] * 60_000])  # the first piece ends within an entry


@pytest.mark.I7
@pytest.mark.I8
def test_prompt_tokens_times_samples_are_bounded() -> None:
    limits, n = RequestLimits(256, 256, 256), 128
    most = 128 * 256

    def plan(num_tokens: int) -> int:
        request = parse(Endpoint.COMPLETIONS, prompt=[[1] * num_tokens] * 2, n=n, max_tokens=1)
        return len(asyncio.run(plan_samples(request, CODEC, limits, 64)))

    assert plan(most // n // 2) == 2 * n
    with pytest.raises(ApiError, match=f"at least {most + 2 * n}; one request may have {most}:") as caught:
        plan(most // n // 2 + 1)
    assert caught.value.status == 400


# --- the queue ---------------------------------------------------------------------------------------


@pytest.mark.I7
@pytest.mark.I8
async def test_a_full_queue_answers_429_until_there_is_a_place(tmp_path: Path) -> None:
    async with serving(plays(60.0), tmp_path) as node:
        node.link.limits = QueueLimits(3, 1000)
        posts = [asyncio.create_task(node.post("/v1/completions", **BODY)) for _ in range(3)]
        await until(lambda: node.link.num_in_flight == 3, "three are in flight")
        refused = await node.post("/v1/completions", **BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "3 requests run or wait here, and 1 more would exceed 3" in refused.json()["error"]["message"]
        assert "--max-queued-requests" in refused.json()["error"]["message"]
        never = await node.post("/v1/completions", **{**BODY, "n": 4})
        assert (never.status_code, "retry-after" in never.headers) == (400, False)
        assert "4 samples are in this request, 3 fit" in never.json()["error"]["message"]
        posts.pop().cancel()
        await until(lambda: len(node.engine.aborts) == 1, "the engine heard of it")
        posts.append(asyncio.create_task(node.post("/v1/completions", **BODY)))
        await until(lambda: len(node.engine.generates) == 4, "there was a place")
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


@pytest.mark.I8
async def test_prompts_in_flight_are_bounded_by_their_tokens() -> None:
    link = connectionless_link(QueueLimits(1000, 100))
    with link.open([group_of(128, 60)]):  # once for all samples
        with pytest.raises(QueueFull, match="60 tokens run or wait here, and 50 more would exceed 100"):
            link.open([group_of(1, 50, "other")]).__enter__()
        link.require_place(1, 40)
        with pytest.raises(ApiError, match="101 prompt tokens are in this request, 100 fit") as caught:
            link.require_place(1, 101)
        assert caught.value.status == 400


@pytest.mark.I7
@pytest.mark.I8
async def test_what_an_engine_that_hangs_has_not_taken_counts_though_its_client_left() -> None:
    """Otherwise clients that come and go would fill the memory of a front whose engine reads nothing."""
    link = connectionless_link(QueueLimits(50, 1000))
    num_opened = 0
    with contextlib.suppress(QueueFull):
        for number in range(100):
            with link.open([group_of(1, 10, f"r{number}")]):
                num_opened += 1
    assert 0 < num_opened <= 50
    link.limits = QueueLimits(10**6, 10 * num_opened)
    with pytest.raises(QueueFull, match="tokens run or wait"):
        link.require_place(1, 1)


@pytest.mark.I8
async def test_tokens_have_a_place_again_once_the_engine_took_the_prompt(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        node.link.limits = QueueLimits(1000, 5)
        for _ in range(3):
            assert (await node.post("/v1/completions", **BODY)).status_code == 200
