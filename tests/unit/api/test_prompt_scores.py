"""Logprobs of prompts in each dialect, as the decode node's front writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED, FinishReason, SamplingParams
from hisparse_pd.engine.messages import PromptScores, RequestFailed, Tokens
from hisparse_pd.protocol.prompt_scores import score_dtype
from hisparse_pd.serving.api import prompt_scores
from tests.unit.api.scored_prompts import scores
from tests.unit.api.scripted_engine import plays, say
from tests.unit.api.streams import whole_and_streamed
from tests.unit.api.support import BODY, MESSAGES, NATIVE, serving

pytestmark = pytest.mark.anyio


def best(position: int, own: str, num: int) -> dict[str, float]:
    """Return ``top_logprobs``, which has the token itself once if it is among the best."""
    likeliest = {chr(ord("a") + rank): -position / 2 - rank for rank in range(num)}
    return likeliest | ({} if own in likeliest else {own: -float(position)})


ONE = {"max_new_tokens": 1}
INPUT_LOGPROBS = [[None, 108, "l"], [-3.0, 108, "l"], [-4.0, 111, "o"]]
NOTHING: dict[str, Any] = {"max_tokens": 0}
ECHOED: dict[str, Any] = BODY | {"echo": True}
ECHO: dict[str, Any] = {
    "tokens": ["h", "e", "l", "l", "o"],
    "token_logprobs": [None, -1.0, -2.0, -3.0, -4.0],
    "top_logprobs": [None, best(1, "e", 1), best(2, "l", 1), best(3, "l", 1), best(4, "o", 1)],
    "text_offset": [0, 1, 2, 3, 4],
}
BY_ID = [None] + [
    {
        str(ord(char)): {"logprob": -float(position), "rank": position, "decoded_token": char},
        "97": {"logprob": -position / 2, "rank": 1, "decoded_token": "a"},
    }
    for position, char in enumerate("ello", 1)
]


async def test_a_prompt_alone(tmp_path: Path) -> None:
    """The engine draws a token that is not shown."""
    async with serving(scores, tmp_path) as node:
        asked = ECHOED | {"max_tokens": 0, "logprobs": 1, "prompt_logprobs": 1, "temperature": 0.5}
        answer = await node.answer("/v1/completions", **asked)
        (choice,) = answer["choices"]
        assert choice == {
            "index": 0,
            "text": "hello",
            "logprobs": ECHO,
            "finish_reason": "length",
            "matched_stop": None,
            "prompt_logprobs": BY_ID,
        }
        whole, streamed = await whole_and_streamed(node, "/v1/completions", asked)
        assert streamed == whole
        assert answer["object"] == "text_completion"
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 0)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
        assert answer["usage"]["hisparse"]["mode"] == "dense"
        assert node.engine.generates[-1].sampling == SamplingParams(1, temperature=0.0)
        assert await node.metric("hisparse_pd:time_to_first_token_seconds_count") == 0
        twice = await node.answer("/v1/completions", **asked | {"prompt": ["hello", "h"]}, n=2)
        assert [choice["text"] for choice in twice["choices"]] == ["hello", "hello", "h", "h"]
        assert [choice["logprobs"]["tokens"] for choice in twice["choices"]] == [ECHO["tokens"]] * 2 + [
            ["h"]
        ] * 2
        wanted = [generate.scores is not None for generate in node.engine.generates[3:]]
        assert wanted == [True, False, False, False], "once a prompt, and not of one token"


async def test_an_echo_beside_a_whole_answer(tmp_path: Path) -> None:
    async with serving(scores, tmp_path) as node:
        asked = ECHOED | {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 1, "n": 2}
        answer = await node.answer("/v1/completions", **asked)
        for choice in answer["choices"]:
            assert choice["text"] == "hello!!!"
            assert choice["logprobs"]["tokens"] == [*ECHO["tokens"], "!", "!", "!"]
            assert choice["logprobs"]["token_logprobs"] == [*ECHO["token_logprobs"], -9.0, -9.0, -9.0]
            assert choice["logprobs"]["text_offset"] == list(range(8))
            assert choice["prompt_logprobs"] == BY_ID
        assert answer["usage"]["completion_tokens"] == 6


async def test_an_echo_of_parts_of_characters(tmp_path: Path) -> None:
    """The name of such a token is its bytes; it begins in the character of which it is a part."""
    async with serving(scores, tmp_path) as node:
        asked = ECHOED | {"prompt": "é€", "max_tokens": 1, "logprobs": 0}
        (choice,) = (await node.answer("/v1/completions", **asked))["choices"]
        assert choice["text"] == "é€!"
        assert choice["logprobs"]["tokens"] == [*(f"bytes:\\x{byte:02x}" for byte in "é€".encode()), "!"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2]
        assert choice["logprobs"]["top_logprobs"][1] == {"bytes:\\xa9": -1.0}
        (choice,) = (await node.answer("/v1/completions", **asked, return_tokens_as_token_ids=True))[
            "choices"
        ]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in "é€!".encode()]
        assert choice["logprobs"]["top_logprobs"][-1] == {"token_id:33": -9.0}
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2]


async def test_an_echo_with_one_token_more(tmp_path: Path) -> None:
    async with serving(scores, tmp_path) as node:
        asked = ECHOED | {"prompt": [[104, 105], [106]], "max_tokens": 1, "logprobs": 1}
        answer = await node.post("/v1/completions", **asked | {"bootstrap_room": [7, 8]})
        first, second = answer.json()["choices"]
        assert (first["text"], second["text"]) == ("hi!", "j!")
        assert first["logprobs"] == {
            "tokens": ["h", "i", "!"],
            "token_logprobs": [None, -1.0, -9.0],
            "top_logprobs": [None, best(1, "i", 1), {"!": -9.0}],
            "text_offset": [0, 1, 2],
        }
        assert second["logprobs"]["token_logprobs"] == [None, -9.0]


async def test_the_other_dialects(tmp_path: Path) -> None:
    chat = {**BODY, "messages": MESSAGES, "max_tokens": 0, "prompt_logprobs": 0}
    native = {**NATIVE, "return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 1}
    native |= {"return_text_in_logprobs": True}
    async with serving(scores, tmp_path) as node:
        of_chat = (await node.answer("/v1/chat/completions", **chat, n=2))["prompt_logprobs"]
        assert of_chat[0] is None
        ranks = [entry["rank"] for entries in of_chat[1:] for entry in entries.values()]
        assert ranks == list(range(1, len(of_chat)))
        twice = native | {"text": ["hello", "ab"], "bootstrap_room": [7, 8]}
        first, second = await node.answer("/generate", **twice | {"sampling_params": ONE})
        meta = first["meta_info"]
        assert meta["input_token_logprobs"] == INPUT_LOGPROBS
        assert meta["input_top_logprobs"] == [None, [[-1.5, 97, "a"]], [[-2.0, 97, "a"]]]
        assert len(meta["output_token_logprobs"]) == 1
        assert second["meta_info"]["input_token_logprobs"] == []
        # SGLang's routers join the lists of both nodes, and the prefill node has none.
        entry = await node.answer("/generate", **native)
        assert entry["meta_info"]["input_token_logprobs"] == INPUT_LOGPROBS
        assert len(entry["meta_info"]["output_token_logprobs"]) == 5


async def test_a_prompt_that_cannot_be_scored_is_an_error_of_the_request(tmp_path: Path) -> None:
    fails = plays(RequestFailed("", 502, "room 7: the prefill node is gone", PREFILL_NODE_FAILED))
    async with serving(fails, tmp_path) as node:
        answer = await node.post("/v1/completions", **ECHOED | NOTHING, logprobs=0)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, PREFILL_NODE_FAILED)


ASKED_IN_STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": ECHOED | {"max_tokens": 2, "logprobs": 1, "prompt_logprobs": 2, "n": 2},
    "/v1/chat/completions": {**BODY, "messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 1, "n": 2},
    "/generate": NATIVE | {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1},
}


@pytest.mark.parametrize("path", ASKED_IN_STREAMS)
async def test_a_stream_has_the_logprobs_of_a_whole_answer(tmp_path: Path, path: str) -> None:
    async with serving(scores, tmp_path) as node:
        whole, streamed = await whole_and_streamed(node, path, ASKED_IN_STREAMS[path])
    assert streamed == whole
    assert "prompt_logprobs" in str(whole) or "input_top_logprobs" in str(whole)


async def test_a_stream_shows_a_prompt_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "_PIECE_ENTRIES", 4)
    async with serving(scores, tmp_path) as node:
        asked = ECHOED | {"prompt": "h€llo", "max_tokens": 1, "logprobs": 1}
        events = await node.events("/v1/completions", **asked)
        shown = [(choice["text"], choice["logprobs"]) for event in events for choice in event["choices"]]
        assert [text for text, _ in shown] == ["h", "€", "ll", "o", "!"]
        assert [logprobs["text_offset"] for _, logprobs in shown] == [[0, 1, 1], [1], [2, 3], [4], [5]]
        chat = {**BODY, "messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 0}
        first, second, *_ = await node.events("/v1/chat/completions", **chat)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [len(event["prompt_logprobs"]) for event in (first, second)] == [5, 4]
        assert (first["prompt_logprobs"][0], second["choices"][0]["delta"]) == (None, {})
        native = NATIVE | {"return_logprob": True, "logprob_start_len": 2}
        events = await node.events("/generate", **native)
        logprobs = [event["meta_info"]["input_token_logprobs"] for event in events]
        assert [len(entries) for entries in (logprobs[0], logprobs[-1])] == [3, 3]
        assert not any(logprobs[1:-1]), "between, they would be sent again with each token"


async def test_no_token_is_shown_where_none_is_wanted(tmp_path: Path) -> None:
    async with serving(say("AB"), tmp_path) as node:
        nothing = BODY | NOTHING | {"echo": True}
        answer = await node.answer("/v1/completions", **nothing)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("hello", "length")
        assert answer["usage"]["completion_tokens"] == 0
        native = await node.post("/generate", **NATIVE | {"sampling_params": {"max_new_tokens": 0}})
        assert native.json()["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        streamed = await node.events("/v1/completions", **nothing)
        assert [event["choices"][0]["finish_reason"] for event in streamed] == ["length"]
        assert [event["choices"][0]["text"] for event in streamed] == ["hello"]
        answer = await node.post("/v1/chat/completions", **BODY | NOTHING, messages=MESSAGES)
        assert answer.json()["choices"][0]["message"]["content"] == ""
        assert {generate.sampling for generate in node.engine.generates} == {
            SamplingParams(1, temperature=0.0)
        }, "the prompt is computed, and kept for others"


async def test_prompts_of_which_some_have_no_answer(tmp_path: Path) -> None:
    two = {"text": ["ab", "c", "de"], "bootstrap_room": [7, 8, 9], "return_logprob": True}
    params = [{"max_new_tokens": number} for number in (0, 2, 0)]
    async with serving(scores, tmp_path) as node:
        answers = await node.answer("/generate", **NATIVE | two | {"sampling_params": params})
        assert [answer["text"] for answer in answers] == ["", "!!", ""]
        assert [len(answer["meta_info"]["output_token_logprobs"]) for answer in answers] == [0, 2, 0]
        assert [generate.room for generate in node.engine.generates] == [7, 8, 9]


async def test_the_echo_comes_first_in_a_stream(tmp_path: Path) -> None:
    async with serving(say("AB"), tmp_path) as node:
        streamed = await node.events("/v1/completions", **BODY, n=2, echo=True)
        for index in (0, 1):
            texts = [c["text"] for event in streamed for c in event["choices"] if c["index"] == index]
            assert texts == ["helloA", "B"]
        ids = {**BODY, "prompt": list("hä".encode())}
        assert (await node.events("/v1/completions", **ids, echo=True))[0]["choices"][0]["text"] == "häA"


async def test_long_lists_are_written_in_pieces(tmp_path: Path) -> None:
    async with serving(scores, tmp_path) as node:
        asked = ECHOED | NOTHING | {"prompt": "x" * 190, "prompt_logprobs": 20, "logprobs": 0}
        (choice,) = (await node.answer("/v1/completions", **asked))["choices"]
        assert [entry["120"]["rank"] for entry in choice["prompt_logprobs"][1:]] == list(range(1, 190))
        assert len(choice["prompt_logprobs"][7]) == 21
        assert choice["logprobs"]["text_offset"] == list(range(190))
        assert choice["logprobs"]["top_logprobs"][7] == {"x": -7.0}


async def test_positions_that_lack_are_an_error(tmp_path: Path) -> None:
    one_row = PromptScores("", 0, b"\0" * score_dtype(0).itemsize)
    lossy = plays(one_row, Tokens("", (), finish_reason=FinishReason.LENGTH))
    async with serving(lossy, tmp_path) as node:
        answer = await node.post("/v1/completions", **ECHOED | NOTHING, prompt_logprobs=0)
        assert answer.status_code == 500
        assert "1 logprobs for 5 tokens" in answer.json()["error"]["message"]
