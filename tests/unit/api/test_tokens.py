"""``/tokenize`` and ``/detokenize`` of a node, in vLLM's shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.serving.api.text_codec import TextCodec
from tests.unit.api import support
from tests.unit.api.scripted_engine import CONTEXT_LENGTH, say
from tests.unit.api.support import BODY, MESSAGES, NATIVE, serving
from tests.unit.api.tiny_tokenizer import BOS, EOS, make_tokenizer, write_checkpoint

pytestmark = pytest.mark.anyio

TOKENIZER = make_tokenizer(bos=True)
BOS_ID, EOS_ID = TOKENIZER.convert_tokens_to_ids([BOS, EOS])


@pytest.fixture(autouse=True)
def tokenizer_with_bos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "CODEC", TextCodec(TOKENIZER, len(TOKENIZER)))


async def test_a_text_in_tokens_and_back(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        text = "a page €"
        answer = await node.answer("/tokenize", model="tiny", prompt=text, return_token_strs=True)
        token_ids = TOKENIZER(text).input_ids
        assert token_ids[0] == BOS_ID
        assert answer == {
            "count": len(token_ids),
            "max_model_len": CONTEXT_LENGTH,
            "tokens": token_ids,
            "token_strs": TOKENIZER.convert_ids_to_tokens(token_ids),
        }
        bare = await node.answer("/tokenize", prompt=text, add_special_tokens=False)
        assert (bare["tokens"], bare["token_strs"]) == (token_ids[1:], None)
        back = await node.post("/detokenize", model="tiny", tokens=[*token_ids, EOS_ID])
        assert back.json() == {"prompt": BOS + text + EOS}
        assert await node.answer("/detokenize", tokens=[]) == {"prompt": ""}
        assert await node.metric('hisparse_pd:num_requests_total{endpoint="/detokenize",status="200"}') == 2


CONTINUED: dict[str, Any] = {
    "messages": [*MESSAGES, {"role": "assistant", "content": "Well"}],
    "continue_final_message": True,
}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "[user]hi[assistant]"),
        ({"add_generation_prompt": False}, "[user]hi"),
        ({"add_special_tokens": True}, BOS + "[user]hi[assistant]"),
        (CONTINUED, "[user]hi[assistant]Well"),
    ],
)
async def test_a_chat_in_tokens(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    async with serving(say("x"), tmp_path) as node:
        tokens = (await node.answer("/tokenize", **{"messages": MESSAGES, **options}))["tokens"]
        assert TOKENIZER.decode(tokens) == text


def edit_tokenizer_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.I5
@pytest.mark.parametrize("adds_bos", [True, False])
async def test_texts_begin_with_the_bos_token_where_the_configuration_alone_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adds_bos: bool
) -> None:
    """DeepSeek's tokenizers have ``add_bos_token`` and no post-processor that adds one."""
    checkpoint = write_checkpoint(tmp_path / "tokenizer")
    edit_tokenizer_config(checkpoint, add_bos_token=adds_bos)
    monkeypatch.setattr(support, "CODEC", TextCodec.load(checkpoint))
    texts = ("hello", BOS + "hello", "a " * 20)
    bare = [list(text.removeprefix(BOS).encode()) for text in texts]
    first = [BOS_ID] if adds_bos else []
    expected = [first + bare[0], [BOS_ID, *bare[1]], first + bare[2]]
    async with serving(say("x"), tmp_path) as node:
        for text, token_ids in zip(texts, expected, strict=True):
            answer = await node.answer("/tokenize", prompt=text)
            assert answer["tokens"] == token_ids
        unmarked = await node.post("/tokenize", prompt="hello", add_special_tokens=False)
        assert unmarked.json()["tokens"] == bare[0]
        chat = (await node.answer("/tokenize", messages=MESSAGES))["tokens"]
        assert TOKENIZER.decode(chat) == "[user]hi[assistant]"  # a template wrote it
        node.engine.received.clear()
        for text in texts:
            for path, body in (
                ("/v1/completions", BODY | {"prompt": text}),
                ("/v1/completions", BODY | {"prompt": text, "echo": True}),
                ("/generate", NATIVE | {"text": text}),
            ):
                assert (await node.post(path, **body)).status_code == 200
        lengths = [sample.num_prompt_tokens for sample in node.engine.generates]
        assert lengths == [len(token_ids) for token_ids in expected for _ in range(3)]


def test_a_bos_token_that_does_not_exist_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    edit_tokenizer_config(checkpoint, add_bos_token=True, bos_token=None)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: add_bos_token is true"):
        TextCodec.load(checkpoint)


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"config\.json: no such file; --model-path needs a Hugging Face"
    ):
        TextCodec.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[]", r"config\.json: expected a JSON object, got list"),
        ("tokenizer.json", "{}", "no usable tokenizer .*added_tokens"),
    ],
)
def test_files_of_another_form_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        TextCodec.load(checkpoint)


async def test_long_lists_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse_pd.serving.api.token_lists.TOKENS_A_PIECE", 32)
    monkeypatch.setattr("hisparse_pd.serving.api.token_lists._MAX_INLINE_TOKENS", 2)
    async with serving(say("x"), tmp_path) as node:
        text = "z" * (CONTEXT_LENGTH - 1)
        answer = await node.answer("/tokenize", prompt=text, return_token_strs=True)
        assert answer["tokens"] == [BOS_ID, *text.encode()]
        assert answer["token_strs"] == [BOS, *text]
        assert await node.answer("/detokenize", tokens=list(text.encode())) == {"prompt": text}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "exactly one of prompt and messages"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "exactly one of prompt and messages"),
    ("/tokenize", {"prompt": ["a"]}, "prompt: a list with 1 entries must be a string"),
    ("/tokenize", {"prompt": ""}, 'prompt: "" must not be empty'),
    ("/tokenize", {"prompt": "a" * 3000}, "the prompt has at least"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs: 1 must be `bool | null`"),
    ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    (
        "/tokenize",
        {**CONTINUED, "add_generation_prompt": True},
        "add_generation_prompt: true excludes continue_final_message",
    ),
    ("/detokenize", {}, "tokens: the field is needed"),
    ("/detokenize", {"tokens": "a"}, 'tokens: "a" must be a list of token ids'),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]: -1 must be a token id"),
    ("/detokenize", {"tokens": [1, 100000]}, "tokens[1]: 100000 is no token id"),
    ("/detokenize", {"tokens": [1] * (CONTEXT_LENGTH + 1)}, f"a context has {CONTEXT_LENGTH}"),
]


@pytest.mark.I8
async def test_what_is_refused(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        for path, body, message in REFUSED:
            answer = await node.post(path, **body)
            assert answer.status_code == 400, (path, body)
            assert message in answer.json()["error"]["message"]
        for path in ("/tokenize", "/detokenize"):
            assert (await node.post(path, model="other", prompt="a", tokens=[1])).status_code == 404


async def test_a_node_that_loads_says_so(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path, is_ready=False) as node:
        assert (await node.post("/tokenize", prompt="a")).status_code == 503
