"""Answers of a node's front to OpenAI's and SGLang's requests; a scripted engine says the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import FinishReason, HisparseFlag, Mode
from hisparse_pd.engine.messages import Abort, FromEngine, Generate, RequestStats, Tokens
from tests.unit.api.scripted_engine import plays, say
from tests.unit.api.support import BODY, MESSAGES, NATIVE, ROOM, TOKENIZER, decode_events, serving
from tests.unit.api.tiny_tokenizer import EOS
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_completion(tmp_path: Path) -> None:
    async with serving(say("abcdefgh", mode=Mode.HISPARSE), tmp_path) as node:
        answer = await node.answer("/v1/completions", **BODY, hisparse=True)
        assert answer["object"] == "text_completion"
        assert answer["model"] == "tiny"
        assert answer["choices"] == [
            {"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length", "matched_stop": None}
        ]
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {
                "cached_tokens": 2,
                "cached_tokens_details": {"device": 0, "host": 2, "storage": 0, "decode": 0},
                "held_tokens": 1,
            },
            "hisparse": {"mode": "hisparse", "hits": 10, "misses": 4},
        }
        (generate,) = node.engine.generates
        assert (generate.bootstrap_host, generate.bootstrap_port, generate.room) == ("10.0.0.1", 8998, 7)
        assert generate.hisparse is HisparseFlag.TRUE
        assert generate.num_prompt_tokens == 5
        assert node.engine.aborts == []
        assert (
            await node.metric('hisparse_pd:num_requests_total{endpoint="/v1/completions",status="200"}') == 1
        )
        assert await node.metric("hisparse_pd:time_to_first_token_seconds_count") == 1
        assert await node.metric("hisparse_pd:inter_token_latency_seconds_count") == 4
        assert await node.metric("hisparse_pd:e2e_request_latency_seconds_count") == 1


async def test_streamed_completion(tmp_path: Path) -> None:
    async with serving(say("a€bc"), tmp_path) as node:
        answer = await node.post("/v1/completions", **BODY, stream=True)
        # Clients after the letter of HTTP take text without a charset for ISO-8859-1.
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        plain = decode_events(answer.text)
        assert [chunk["choices"][0]["text"] for chunk in plain] == ["a", "€", "b"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in plain] == [None, None, "length"]
        assert all("usage" not in chunk for chunk in plain)
        counted = await node.events("/v1/completions", **BODY, stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in counted[:-1]] == [None, None, None]
        assert counted[-1]["choices"] == []
        assert counted[-1]["usage"]["completion_tokens"] == 5
        assert counted[-1]["usage"]["hisparse"] == {"mode": "dense", "hits": 10, "misses": 4}
        assert len({chunk["id"] for chunk in counted}) == 1


async def test_usage_in_every_chunk(tmp_path: Path) -> None:
    async with serving(say("abcde"), tmp_path) as node:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await node.events("/v1/completions", **BODY, n=2, stream_options=options)
        for index in (0, 1):
            mine = [chunk["usage"] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
            assert [usage["completion_tokens"] for usage in mine] == [1, 2, 3, 4, 5]
            assert [usage["total_tokens"] for usage in mine] == [6, 7, 8, 9, 10]
        assert chunks[-1]["usage"]["completion_tokens"] == 10


async def test_completion_logprobs(tmp_path: Path) -> None:
    async with serving(say("abcd", per_message=2), tmp_path) as node:
        for choice in (await node.answer("/v1/completions", **BODY, logprobs=2, n=2))["choices"]:
            whole = choice["logprobs"]
            assert whole["tokens"] == list("abcd")
            assert whole["token_logprobs"] == [-0.5] * 4
            assert whole["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
            assert whole["text_offset"] == [0, 1, 2, 3]


async def test_token_ids_of_prompts_and_answers(tmp_path: Path) -> None:
    """Ids are shown even where a token shows no text yet."""
    said = list("a€b".encode())
    async with serving(say("a€b"), tmp_path) as node:
        body: dict[str, Any] = {**BODY, "prompt": ["ab", "c"], "n": 2, "return_token_ids": True}
        choices = (await node.answer("/v1/completions", **body))["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [97, 98], [99], [99]]
        assert [choice["token_ids"] for choice in choices] == [said] * 4
        streamed = [chunk["choices"][0] for chunk in await node.events("/v1/completions", **BODY)]
        assert [chunk["text"] for chunk in streamed] == ["a", "€", "b"], "what shows nothing is no event"
        streamed = [c for e in await node.events("/v1/completions", **body) for c in e["choices"]]
        assert [choice["text"] for choice in streamed if choice["index"] == 0] == ["a", "", "", "€", "b"]
        chat: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5, "n": 2, **ROOM}
        whole = await node.answer("/v1/chat/completions", **chat, return_token_ids=True)
        assert whole["prompt_token_ids"] == TOKENIZER("[user]hi[assistant]").input_ids
        assert [choice["token_ids"] for choice in whole["choices"]] == [said] * 2
        plain = await node.answer("/v1/chat/completions", **chat, return_token_ids=False)
        assert "prompt_token_ids" not in plain
        assert "token_ids" not in plain["choices"][0]


async def test_chat(tmp_path: Path) -> None:
    async with serving(say("abcdef"), tmp_path, default_max_tokens=3) as node:
        body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, **ROOM}
        answer = await node.answer("/v1/chat/completions", **body, metadata={"hisparse": "false"})
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abc", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "length"
        assert node.engine.generates[0].hisparse is HisparseFlag.FALSE
        answer = await node.answer("/v1/chat/completions", **body, logprobs=True, top_logprobs=1)
        token = {"token": "a", "logprob": -0.5, "bytes": [97]}
        assert answer["choices"][0]["logprobs"]["content"][0] == token | {"top_logprobs": [token]}


async def test_n_and_several_prompts(tmp_path: Path) -> None:
    modes = itertools.cycle((Mode.HISPARSE, Mode.DENSE))
    async with serving(lambda generate: say("xyz", mode=next(modes))(generate), tmp_path) as node:
        answer = await node.answer("/v1/completions", **{**BODY, "prompt": ["ab", "cd"]}, n=2, seed=1)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [generate.sampling.seed for generate in node.engine.generates] == [1, 2, 1, 2]
        assert len({generate.room for generate in node.engine.generates}) == 4
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 12)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4
        of_samples = ["hisparse", "dense", "hisparse", "dense"]
        assert usage["hisparse"] == {"mode": "mixed", "hits": 40, "misses": 16, "modes": of_samples}


@pytest.mark.parametrize("per_message", [1, 3, 8])
async def test_stop_strings(tmp_path: Path, per_message: int) -> None:
    def script(generate: Generate) -> Iterable[FromEngine | float]:
        """Say the text slowly: an engine that ends first is not told of the stop string."""
        num_said = 0
        for event in say("abcdefgh", per_message=per_message)(generate):
            yield event
            num_said += per_message
            if 5 <= num_said < 8:
                yield 60.0

    async with serving(script, tmp_path) as node:
        body = {**BODY, "max_tokens": 8, "stop": ["never", "de"]}
        choice = (await node.answer("/v1/completions", **body))["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("abc", "stop", "de")
        chunks = await node.events("/v1/completions", **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        vllms = await node.answer("/v1/completions", **body, include_stop_str_in_output=True)
        assert vllms["choices"][0]["text"] == "abcde"
        kept = await node.answer("/v1/completions", **body, no_stop_trim=True)
        assert kept["choices"][0]["text"] == "abcde"
        assert kept["usage"]["completion_tokens"] == 5
        assert kept["usage"]["hisparse"] == {"mode": "dense", "hits": 10, "misses": 4}
        if per_message < 8:  # the engine was still at work
            aborted = [generate.request_id for generate in node.engine.generates]
            await until(lambda: node.engine.aborts == aborted, "the engine was told")
            assert all(m.has_finished for m in node.engine.received if isinstance(m, Abort))
        assert node.link.num_in_flight == 0


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "ok"), (True, "ok!")])
async def test_a_stop_token_is_not_shown(tmp_path: Path, no_stop_trim: bool, text: str) -> None:
    stop = Tokens("", tuple(b"!"), (), FinishReason.STOP, ord("!"), RequestStats(Mode.DENSE))
    async with serving(plays(Tokens("", tuple(b"ok")), stop), tmp_path) as node:
        answer = await node.answer("/v1/completions", **BODY, no_stop_trim=no_stop_trim)
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["matched_stop"] == 33
        assert answer["usage"]["completion_tokens"] == 3


async def test_usage_says_what_became_of_drafts(tmp_path: Path) -> None:
    drafted = RequestStats(Mode.DENSE, num_drafted=7, num_accepted=3)
    said = Tokens("", tuple(b"ok"), (), FinishReason.LENGTH, None, drafted)
    async with serving(plays(said), tmp_path) as node:
        answer = await node.answer("/v1/completions", **BODY, speculative=False)
        drafts = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
        assert answer["usage"]["completion_tokens_details"] == drafts
        meta = (await node.answer("/generate", **NATIVE))["meta_info"]
        assert (meta["spec_draft_token_num"], meta["spec_accept_token_num"]) == (7, 3)
        assert [generate.is_speculative for generate in node.engine.generates] == [False, True]


async def test_eos_is_shown_only_on_request(tmp_path: Path) -> None:
    eos_id = TOKENIZER.convert_tokens_to_ids(EOS)
    async with serving(plays(Tokens("", (111, eos_id), (), FinishReason.STOP)), tmp_path) as node:
        for options, text in (({}, "o"), ({"skip_special_tokens": False}, f"o{EOS}")):
            answer = await node.answer("/v1/completions", **BODY, **options)
            assert answer["choices"][0]["text"] == text


async def test_generate(tmp_path: Path) -> None:
    async with serving(say("abc"), tmp_path) as node:
        body = NATIVE | {"rid": "mine", "return_logprob": True}
        answer = await node.answer("/generate", **body)
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"]) == ("abc", list(b"abc"))
        assert meta.pop("e2e_latency") > 0
        assert meta == {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "cached_tokens_details": {"device": 0, "host": 2, "storage": 0, "decode": 0},
            "held_tokens": 1,
            "hisparse": {"mode": "dense", "hits": 10, "misses": 4},
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5, 97, None], [-0.5, 98, None], [-0.5, 99, None]],
        }
        body |= {"top_logprobs_num": 2, "return_text_in_logprobs": True}
        meta = (await node.answer("/generate", **body))["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, 98, "b"], [-0.5, 99, "c"]]
        assert meta["output_top_logprobs"][0] == [[-0.5, 97, "a"], [-1.5, 98, "b"]]


async def test_generate_streams_cumulative_text(tmp_path: Path) -> None:
    async with serving(say("a€bc"), tmp_path) as node:
        events = await node.events("/generate", **NATIVE)
        counts = [len(event["output_ids"]) for event in events]  # some are left out when the front is slow
        assert counts == sorted(set(counts))
        assert counts[-1] == 5
        texts = {1: "a", 2: "a", 3: "a", 4: "a€", 5: "a€b"}
        assert [event["text"] for event in events] == [texts[count] for count in counts]
        ends = [event["meta_info"]["finish_reason"] is not None for event in events]
        assert ends == [count == 5 for count in counts]
        assert "index" not in events[0]


async def test_generate_answers_a_list_with_a_list(tmp_path: Path) -> None:
    async with serving(say("abc"), tmp_path) as node:
        lists = {"bootstrap_host": ["h"] * 2, "bootstrap_port": [None] * 2, "bootstrap_room": [1, 2]}
        answers = await node.answer("/generate", input_ids=[[1], [2, 3]], **lists)
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2]
        one = {"bootstrap_host": ["h"], "bootstrap_port": [None], "bootstrap_room": [1]}
        assert len(await node.answer("/generate", text=["a"], **one)) == 1
        events = await node.events("/generate", text=["a", "b"], **lists)
        last = {event["index"]: event["text"] for event in events}
        assert last == {0: "abc", 1: "abc"}
