"""Names of tokens in logprobs, and the offsets of their texts, for any bytes, whole and streamed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import FinishReason, TokenLogprob
from hisparse_pd.engine.messages import FromEngine, Generate, Tokens
from hisparse_pd.serving.api.token_names import EchoOffsets, TextOffsets, TokenNames
from tests.unit.api.scored_prompts import scores
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import BODY, CODEC, MESSAGES, ROOM, TOKENIZER, serving
from tests.unit.api.tiny_tokenizer import BOS, EOS

BYTES = CODEC.token_bytes
EOS_ID, THE = TOKENIZER.convert_tokens_to_ids([EOS, "the"])
UNKNOWN = len(TOKENIZER) + 7
"""Id of a row of the embedding for which the tokenizer has no token."""


def offsets(*token_ids: int, **options: Any) -> list[int]:
    found = TextOffsets(BYTES, **options)
    return [found.next(token_id) for token_id in token_ids]


def test_a_token_begins_in_the_character_of_its_first_byte() -> None:
    assert offsets(*b"a", *"€".encode(), *b"b") == [0, 1, 1, 1, 2]
    assert offsets(0xE2, 0x82, *b"a") == [0, 0, 1]  # U+FFFD is before it
    assert offsets(0xE2, 0xE2, 0x82, 0xAC, *b"a") == [0, 1, 1, 1, 2]
    assert offsets(0x80, 0x80, *b"a") == [0, 1, 2]
    assert offsets(THE, *b"x", start=5) == [5, 8]
    assert offsets(*b"a", EOS_ID, UNKNOWN, *b"b", skip_special_tokens=True) == [0, 1, 1, 1]
    assert offsets(*b"a", EOS_ID, *b"b") == [0, 1, 1 + len(EOS)]


def test_tokens_before_the_text_begin_where_it_does() -> None:
    bos = TOKENIZER.convert_tokens_to_ids(BOS)
    for text in ("abc", "€a", "é"):
        found = EchoOffsets(BYTES, text)
        assert [found.next(token_id) for token_id in (bos, *text.encode(), *b"!!")] == [
            0,
            *offsets(*text.encode()),
            *[len(text)] * 2,
        ]


def test_likeliest_tokens_have_names_of_their_own() -> None:
    names = TokenNames(BYTES, are_ids=False)
    top = [(0xE2, -0.1), (0x80, -0.2), (UNKNOWN, -0.3), (UNKNOWN + 1, -0.4), (97, -0.5)]
    found = names.likeliest(UNKNOWN + 1, -0.4, top)
    assert found == {
        "bytes:\\xe2": -0.1,
        "bytes:\\x80": -0.2,
        f"token_id:{UNKNOWN}": -0.3,
        "": -0.4,
        "a": -0.5,
    }
    assert list(found) == ["bytes:\\xe2", "bytes:\\x80", f"token_id:{UNKNOWN}", "", "a"]
    assert names.likeliest(98, float("-inf"), top[:2])["b"] == -9999.0
    assert TokenNames(BYTES, are_ids=True).likeliest(98, -1.0, [(97, -0.5)]) == {
        "token_id:97": -0.5,
        "token_id:98": -1.0,
    }


# --- random outputs --------------------------------------------------------------------------------------

PIECES = ("😀", "👩‍👩‍👧", "漢字", "한", "é", "the", " page", "stop", "ab", "b", "\n", "x")


def random_tokens(choose: random.Random) -> list[int]:
    """Return tokens of a text that may have cut characters, and ids without text among them."""
    token_ids: list[int] = []
    for _ in range(choose.randrange(1, 12)):
        piece = choose.choice(PIECES)
        ids = TOKENIZER(piece, add_special_tokens=False).input_ids
        match choose.randrange(8):
            case 0:
                ids = ids[: choose.randrange(len(ids) + 1)]
            case 1:
                ids = [choose.randrange(256), EOS_ID, UNKNOWN][: choose.randrange(1, 4)]
        token_ids += ids
    return token_ids


def says_at_random(generate: Generate) -> Iterable[FromEngine]:
    """The answer depends on the seed. Its messages have random lengths, on which nothing may depend."""
    seed = generate.sampling.seed
    token_ids = random_tokens(random.Random(seed)) or [97]
    sizes = random.Random(generate.request_id)
    start = 0
    while start < len(token_ids):
        end = min(len(token_ids), start + sizes.randrange(1, 5))
        logprobs = []
        for token_id in token_ids[start:end]:
            top = tuple((top_id, -1.0 - rank) for rank, top_id in enumerate(random_top(token_id)))
            logprobs.append(TokenLogprob(token_id, -0.5, top))
        finish = FinishReason.LENGTH if end == len(token_ids) else None
        yield Tokens(generate.request_id, tuple(token_ids[start:end]), tuple(logprobs), finish)
        start = end


def named_bytes(name: str) -> bytes:
    """Return the bytes that a token's name spells."""
    if name.startswith("bytes:"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()


def check(choice: dict[str, Any], *, skips: bool, num_prompt_tokens: int = 0) -> None:
    """Check that the names spell the text, which a stop string may end before the tokens end."""
    text, logprobs = choice["text"], choice["logprobs"]
    names, begins = logprobs["tokens"], logprobs["text_offset"]
    token_ids = [*choice["prompt_token_ids"][:num_prompt_tokens], *choice["token_ids"]]
    assert [len(values) for values in logprobs.values()] == [len(token_ids)] * 4
    assert begins == sorted(begins)
    assert all(0 <= offset <= len(text) for offset in begins)
    spelled = [b"", b""]
    for index, (token_id, name, offset) in enumerate(zip(token_ids, names, begins, strict=True)):
        assert named_bytes(name) == BYTES.of(token_id)
        if skips and token_id == EOS_ID:
            continue
        if not name.startswith("bytes:") and offset + len(name) <= len(text):
            assert text[offset:].startswith(name)
        spelled[index >= num_prompt_tokens] += named_bytes(name)
    said = "".join(part.decode(errors="replace") for part in spelled)
    assert said == text if choice["matched_stop"] is None else said.startswith(text)
    for token_id, top in zip(token_ids, logprobs["top_logprobs"], strict=True):
        if not num_prompt_tokens:
            assert len(top) == len({token_id, *random_top(token_id)})


def random_top(token_id: int) -> list[int]:
    """Return likeliest tokens, some of them with equal names."""
    alike = [97, THE, EOS_ID, UNKNOWN, UNKNOWN + 1, UNKNOWN + 2]
    return random.Random(token_id).sample([*range(0x80, 0x90), *alike], 5)


@pytest.mark.anyio
@pytest.mark.parametrize("stop", [[], ["stop"], ["ab", "b\n", "字x"]])
async def test_names_spell_the_text_of_any_tokens(tmp_path: Path, stop: list[str]) -> None:
    """``tests/property/test_whole_answers.py`` has that streams say the same."""
    body = BODY | {"logprobs": 5, "n": 2, "max_tokens": 90, "return_token_ids": True, "stop": stop}
    async with serving(says_at_random, tmp_path) as node:
        for seed in range(8):
            for skips in (True, False):
                asked = body | {"seed": seed, "skip_special_tokens": skips}
                for choice in (await node.answer("/v1/completions", **asked))["choices"]:
                    check(choice, skips=skips)


@pytest.mark.anyio
@pytest.mark.parametrize("is_text", [True, False])
async def test_an_echo_says_the_same_of_any_tokens(tmp_path: Path, is_text: bool) -> None:
    body = BODY | {
        "echo": True,
        "max_tokens": 1,
        "logprobs": 1,
        "return_token_ids": True,
    }
    async with serving(scores, tmp_path) as node:
        for seed in range(20):
            choose = random.Random(seed)
            ids = [token_id for token_id in random_tokens(choose) if token_id != UNKNOWN]  # is no prompt's
            prompt = "".join(choose.choices(PIECES, k=4)) if is_text else [*ids, 97]
            (choice,) = (await node.answer("/v1/completions", **body | {"prompt": prompt}))["choices"]
            assert not is_text or choice["text"] == f"{prompt}!"
            check(choice, skips=False, num_prompt_tokens=len(choice["prompt_token_ids"]))


# --- ids in the place of names ---------------------------------------------------------------------------


@pytest.mark.anyio
async def test_tokens_as_token_ids(tmp_path: Path) -> None:
    async with serving(say("a€"), tmp_path) as node:
        body = BODY | {"logprobs": 1, "return_tokens_as_token_ids": True}
        (choice,) = (await node.answer("/v1/completions", **body))["choices"]
        names = [f"token_id:{i}" for i in "a€".encode()]
        assert choice["logprobs"]["tokens"] == names
        assert choice["logprobs"]["top_logprobs"] == [{name: -0.5} for name in names]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1]
        plain = (await node.answer("/v1/completions", **BODY, logprobs=1))["choices"][0]["logprobs"]
        assert plain["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
        chat = {"messages": MESSAGES, "max_tokens": 9, "logprobs": True, "top_logprobs": 1, **ROOM}
        plain_names = ["a", "\ufffd", "\ufffd", "\ufffd"]
        for options, shown in (({}, plain_names), ({"return_tokens_as_token_ids": True}, names)):
            answer = await node.answer("/v1/chat/completions", **chat, **options)
            events = await node.events("/v1/chat/completions", **chat, **options)
            whole = answer["choices"][0]["logprobs"]["content"]
            chunks = [choice for event in events for choice in event["choices"] if choice["logprobs"]]
            assert [entry for chunk in chunks for entry in chunk["logprobs"]["content"]] == whole
            assert [entry["token"] for entry in whole] == shown
            assert [entry["top_logprobs"][0]["token"] for entry in whole] == shown
            assert [entry["bytes"] for entry in whole] == [[byte] for byte in "a€".encode()]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_where_tokens_have_no_names_ids_are_refused(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with serving(say("a"), tmp_path) as node:
        answer = await node.post(path, **body, **ROOM, return_tokens_as_token_ids=True)
        assert answer.status_code == 400
        assert "return_tokens_as_token_ids" in answer.json()["error"]["message"]
