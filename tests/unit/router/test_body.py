"""The router takes a client's body apart, adds its fields, and refuses what is no body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hisparse_pd.router.body import MAX_PROMPTS, MAX_SMALL_FIELD_BYTES, RequestBody
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.http.http_errors import ApiError
from tests.property.fuzzing import peak_bytes

COMPLETIONS, CHAT, GENERATE = Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.GENERATE


def parse(fields: dict[str, Any], endpoint: Endpoint = COMPLETIONS) -> RequestBody:
    return RequestBody.parse(json.dumps(fields).encode(), endpoint)


def test_values_keep_the_bytes_of_the_client_and_bootstrap_fields_are_the_routers() -> None:
    values = b'"big": 123456789012345678901234567890, "f": 1.10, "e": 1E-2, '
    values += b'"nested": {"x" : [1.0,null]}, "u": "\\u00e4"'
    forged = b'"bootstrap_host": "10.0.0.1", "bootstrap_port": 1, "bootstrap_room": 8'
    sent = RequestBody.parse(b'{"text": "a", %b, %b}' % (values, forged), GENERATE).with_bootstrap("h", 9, 7)
    for value in (b"123456789012345678901234567890", b"1.10", b"1E-2", b'{"x" : [1.0,null]}', b'"\\u00e4"'):
        assert b":" + value in sent
    assert [sent.count(b"bootstrap_" + name) for name in (b"host", b"port", b"room")] == [1, 1, 1]
    decoded = json.loads(sent)
    ours = decoded["bootstrap_host"], decoded["bootstrap_port"], decoded["bootstrap_room"]
    assert ours == ("h", 9, 7)


@pytest.mark.parametrize(
    ("endpoint", "body", "num_prompts"),
    [
        (COMPLETIONS, {"prompt": "a"}, None),
        (COMPLETIONS, {"prompt": ["a"]}, 1),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2}, 3),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, None),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (COMPLETIONS, {"prompt": []}, None),
        (GENERATE, {"text": ["a", "b"]}, 2),
        (GENERATE, {"input_ids": [[1], [2], [3]]}, 3),
        (GENERATE, {"input_ids": [1, 2]}, None),
        (CHAT, {"messages": [{"role": "user"}], "n": 4}, None),
    ],
)
def test_a_list_of_prompts_gets_lists_of_bootstrap_fields(
    endpoint: Endpoint, body: dict[str, Any], num_prompts: int | None
) -> None:
    sent = json.loads(parse(body, endpoint).with_bootstrap("h", 8998, 7))
    host, port, room = (sent[f"bootstrap_{name}"] for name in ("host", "port", "room"))
    if num_prompts is None:
        assert (host, port, room) == ("h", 8998, 7)
    else:
        assert (host, port) == (["h"] * num_prompts, [8998] * num_prompts)
        assert len(set(room)) == num_prompts
        assert room[0] == 7
    assert {name: sent[name] for name in body} == body


@pytest.mark.parametrize(
    ("endpoint", "body", "prompt"),
    [
        (Endpoint.MESSAGES, b'{"messages": [1], "system": "S", "tools": []}', b'"S"[1]'),
        (GENERATE, b'{"text": null, "input_ids": [1, 2, 3]}', b"[1, 2, 3]"),
        (COMPLETIONS, b'{"model": "tiny"}', b""),
        (COMPLETIONS, b'{"prompt": "a", "extra_key": null}', b'"a"'),
        (COMPLETIONS, b'{"prompt": "a", "extra_key": "k", "cache_salt": "s"}', b'"s""k""a"'),
    ],
)
def test_prompts_are_told_apart_by_all_that_is_in_them(
    endpoint: Endpoint, body: bytes, prompt: bytes
) -> None:
    """The fields that isolate prompts come before them."""
    parsed = RequestBody.parse(body, endpoint)
    assert bytes(parsed.prompt) == prompt
    assert parsed.num_prompts is None


@pytest.mark.I7
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 100_000]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="body") as caught:
        RequestBody.parse(body, COMPLETIONS)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 9, "echo": True, "logprobs": 0}),
        (CHAT, {"messages": [], "prompt_logprobs": 3, "prefill_only": "mine"}),
        (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": 0}),
    ],
)
def test_what_a_request_asks_for_is_the_decode_nodes_to_judge(
    endpoint: Endpoint, fields: dict[str, Any]
) -> None:
    sent = json.loads(parse(fields, endpoint).with_bootstrap("h", 1, 7))
    assert sent == fields | {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7}


def test_half_of_a_surrogate_pair_is_named() -> None:
    for body in (b'{"prompt": "\\ud83d"}', b'{"prompt": "\\ude00"}'):
        with pytest.raises(ApiError, match="surrogate pair"):
            RequestBody.parse(body, COMPLETIONS)


@pytest.mark.I8
def test_a_body_of_nothing_but_fields_is_refused_before_it_is_taken_apart() -> None:
    large = {
        "prompt": "a" * MAX_SMALL_FIELD_BYTES,
        "tools": [{"a": "b" * MAX_SMALL_FIELD_BYTES}],
        "model": "m",
    }
    assert parse(large).fields.keys() == large.keys()
    with pytest.raises(ApiError, match=f"{MAX_SMALL_FIELD_BYTES} are the most") as caught:
        parse({"prompt": "a"} | {f"field {number}": 1 for number in range(1 << 17)})
    assert caught.value.status == 400


@pytest.mark.I8
@pytest.mark.parametrize("prompt", ["a", [0]], ids=str)
@pytest.mark.parametrize("num_prompts", [MAX_PROMPTS + 1, 1 << 20])
def test_too_many_prompts_are_refused(prompt: object, num_prompts: int) -> None:
    body = json.dumps({"prompt": [prompt] * num_prompts}).encode()

    def refuse() -> None:
        with pytest.raises(ApiError, match=f"at most {MAX_PROMPTS}") as caught:
            RequestBody.parse(body, COMPLETIONS)
        assert caught.value.status == 400

    refuse()  # makes the decoder, once
    assert peak_bytes(refuse) < len(body) + (4 << 20), "no object for each"
