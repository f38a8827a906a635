"""Bodies that cannot be served: the error names field, value and bound, and the OpenAPI document agrees."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from hisparse_pd.protocol.decoding import MAX_NESTING
from hisparse_pd.serving.api.bodies import BODIES, Endpoint
from hisparse_pd.serving.api.openapi import openapi_document
from hisparse_pd.serving.api.schemas import parse_request
from hisparse_pd.serving.http.http_errors import ApiError
from tests.unit.api.support import MINIMAL, parse

Case = tuple[dict[str, Any], str, str]
"""Fields, the one at fault, and a part of its error."""

BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), (0, 2**31 - 1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2)),
    **{"temperature": (0, 2), "top_k": (-1, 2**31 - 1), "min_p": (0, 1), "prompt_logprobs": (0, 20)},
    **{"n": (1, 128), "seed": (-(2**63), 2**63 - 1)},
    **{"bootstrap_room": (0, 2**63 - 1), "bootstrap_port": (1, 65535)},
}
"""Fields of completions and chats with their bounds, both ends included."""
NOT_SUPPORTED: dict[str, Any] = {
    **{"lora_path": "x", "allowed_token_ids": [5], "bad_words": ["x"], "custom_logit_processor": "x"},
    **{"structural_tag": "{}", "logits_processors": ["x"]},
    **{"thinking_token_budget": 5, "truncate_prompt_tokens": -1, "use_beam_search": True},
    **{"return_hidden_states": True, "modalities": ["audio"], "chat_template": "{{ 1 }}", "suffix": "x"},
    **{"documents": [{"text": "x"}], "prompt_embeds": "AAAA", "guided_json": {}, "guided_choice": ["a"]},
}
"""Fields of all endpoints with their bounds."""
TYPED: list[Case] = [
    ({"hisparse": "sometimes"}, "hisparse", '"sometimes" must be true, false or "auto"'),
    ({"hisparse": 1}, "hisparse", 'true, false or "auto"'),
    ({"stream": "yes"}, "stream", '"yes" must be `bool | null`'),
    ({"speculative": "no"}, "speculative", '"no" must be `bool | null`'),
    ({"cache_salt": ""}, "cache_salt", "length >= 1"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "length <= 1024"),
    ({"extra_key": {"a": 1}}, "extra_key", "an object with 1 fields must be `str | array | null`"),
    ({"bootstrap_room": "7"}, "bootstrap_room", "must be `int | array | null`"),
    ({"bootstrap_host": 5}, "bootstrap_host", "must be a host name"),
    ({"model": 5}, "model", "5 must be `str | null`"),
    ({"logit_bias": [1]}, "logit_bias", "a list with 1 entries must be `object | null`"),
    ({"logit_bias": {"5": 1, "x": 1}}, "logit_bias", 'has the key "x", which must be `int`'),
    ({"logit_bias": {"-1": 1}}, "logit_bias", 'has the key "-1", which must be `int` >= 0'),
    ({"logit_bias": {"05": 1}}, "logit_bias", 'has the key "05", which must be `int`'),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "integer value out of range"),
    ({"logit_bias": {"5": 100, "7": 101}}, "logit_bias", 'has 101 for "7", which must be `float` <= 100'),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "of length <= 1024"),
    ({"top_p": 0}, "top_p", "0 must be `float` > 0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0 must be `float` > 0"),
    ({"repetition_penalty": 2.1}, "repetition_penalty", "2.1 must be `float` <= 2"),
    ({"stop": ["x"] * 17}, "stop", "a list with 17 entries must be `array` of length <= 16"),
    ({"stop": ["ok", ""]}, "stop[1]", "length >= 1"),
    ({"stop": ["x" * 1025]}, "stop[0]", "length <= 1024"),
    ({"stop": 5}, "stop", "5 must be `str | array | null`"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "-1 must be `int` >= 0"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5 must be `int | null`"),
    ({"max_tokens": 10**30}, "max_tokens", "must be `int` <= 2147483647"),
    ({"response_format": {"type": "grammar"}}, "response_format.type", '"grammar" must be "json_object", '),
    ({"response_format": "text"}, "response_format", "must be `object | null`"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be `bool | null`"),
]
TYPED_COMPLETIONS: list[Case] = [
    ({"prompt": ""}, "prompt", '"" must not be empty'),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "must not be empty"),
    ({"prompt": [[1], []]}, "prompt[1]", "must not be empty"),
    ({"prompt": {"a": 1}}, "prompt", "an object with 1 fields must be a string"),
    ({"prompt": [1, "a"]}, "prompt[1]", '"a" must be a token id'),
    ({"prompt": ["a", 1]}, "prompt[1]", "1 must be a string"),
    ({"prompt": [[1], "a"]}, "prompt[1]", "must be a list of token ids"),
    ({"prompt": [True]}, "prompt[0]", "true must be a token id"),
    ({"prompt": [1, -2]}, "prompt[1]", "-2 must be a token id, an integer from 0 to 2147483647"),
    ({"prompt": ["a"] * 4097}, "prompt", "at most 4096 entries"),
    ({"add_special_tokens": False}, "add_special_tokens", "not supported"),
    ({"logprobs": 21}, "logprobs", "21 must be `int` <= 20"),
    ({"tools": [{}]}, "tools", "not supported"),
]
TYPED_CHAT: list[Case] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", '"hi" must be a list'),
    *(
        ({"messages": [message]}, f"messages[0]{place}", said)
        for message, place, said in (
            ("hi", "", "must be an object"),
            ({"role": "robot"}, ".role", '"robot" must be "assistant", "developer"'),
            (
                {"role": "user", "content": [{"type": "image_url"}]},
                ".content[0].type",
                '"image_url" must be "text" or "refusal"',
            ),
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                ".tool_calls[0].function.arguments",
                "an object with 0 fields must be `str | null`",
            ),
            ({"role": "system", "content": "a", "response_format": {}}, ".response_format", "not supported"),
            ({"role": "assistant", "function_call": {}}, ".function_call", "not supported"),
        )
    ),
    ({"logprobs": 3}, "logprobs", "3 must be `bool | null`"),
    ({"top_logprobs": 21}, "top_logprobs", "21 must be `int` <= 20"),
    ({"metadata": {"hisparse": "maybe"}}, "metadata.hisparse", '"maybe" must be true'),
    ({"metadata": "x"}, "metadata", "must be `object | null`"),
    ({"add_special_tokens": True}, "add_special_tokens", "not supported"),
    ({"echo": True}, "echo", "true is not supported"),
    ({"tools": {}}, "tools", "must be a list"),
    *(
        ({"tools": [tool]}, f"tools[0]{place}", said)
        for tool, place, said in (
            ("x", "", "must be an object"),
            ({"type": "web_search"}, ".type", 'must be "function"; other tools are'),
            ({"type": "function"}, ".function", "the field is needed"),
            ({"type": "function", "function": {}}, ".function.name", "the field is needed"),
            (
                {"type": "function", "function": {"name": "f", "parameters": []}},
                ".function.parameters",
                "a list with 0 entries must be a JSON schema",
            ),
        )
    ),
]
TYPED_GENERATE: list[Case] = [
    ({"prompt_logprobs": 0}, "prompt_logprobs", "0 is not supported"),
    ({"text": ["a", 1]}, "text[1]", "must be a string"),
    ({"text": [1]}, "text", "must be a string or a list of strings"),
    ({"input_ids": "ab", "text": None}, "input_ids", "must be a list of token ids"),
    ({"sampling_params": 5}, "sampling_params", "must be an object"),
    ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "-1 must be `int` >= 0"),
    ({"sampling_params": [{"temperature": -1}]}, "sampling_params[0].temperature", "-1 must be `float` >= 0"),
    ({"sampling_params": {"regex": 5}}, "sampling_params.regex", "5 must be `str | null`"),
    ({"top_logprobs_num": 21}, "top_logprobs_num", "21 must be `int` <= 20"),
    ({"logprob_start_len": -2}, "logprob_start_len", "-2 must be `int` >= -1"),
    ({"custom_labels": {"hisparse": "maybe"}}, "custom_labels.hisparse", '"maybe" must be true'),
    ({"tools": [{}]}, "tools", "not supported"),
]
OPENAIS = (Endpoint.COMPLETIONS, Endpoint.CHAT)
TYPED_CASES = [
    *(
        (endpoint, {field: value}, field, "not supported")
        for endpoint in Endpoint
        for field, value in NOT_SUPPORTED.items()
    ),
    *(
        (endpoint, {field: beyond}, field, f"{beyond} must be")
        for endpoint in OPENAIS
        for field, (low, high) in BOUNDS.items()
        for beyond in (low - 1, high + 1)
    ),
    *((endpoint, *case) for endpoint in OPENAIS for case in TYPED),
    *((Endpoint.COMPLETIONS, *case) for case in TYPED_COMPLETIONS),
    *((Endpoint.CHAT, *case) for case in TYPED_CHAT),
    *((Endpoint.GENERATE, *case) for case in TYPED_GENERATE),
]
EVERYWHERE: list[Case] = [
    ({"extra_key": ["a", "b"]}, "extra_key", "one string a prompt, 1"),
    ({"bootstrap_room": [1, 2, 3]}, "bootstrap_room", "one entry a prompt"),
    ({"bootstrap_room": None}, "bootstrap_room", "send the request through the router"),
    ({"bootstrap_host": None}, "bootstrap_host", "send the request through the router"),
    ({"bootstrap_host": "127.0.0.1:80/admin?"}, "bootstrap_host", "must be a host name"),
    ({"bootstrap_host": "user@127.0.0.1"}, "bootstrap_host", "must be a host name"),
    ({"bootstrap_host": "a\nb"}, "bootstrap_host", "must be a host name"),
]
OPENAI: list[Case] = [
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens", "1 must be at most max_tokens, which is 0"),
    ({"best_of": 3}, "best_of", "3 must equal n"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options: needs stream: true"),
]
COMPLETIONS: list[Case] = [
    ({"prompt": None}, "prompt", "is needed"),
    ({"prompt": ["a"] * 100, "n": 128}, "prompt", "12800 samples"),
    ({"prompt": ["a", "b"], "bootstrap_room": [1, 1]}, "bootstrap_room", "different room"),
]
USERS_CALL = {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}
CHAT: list[Case] = [
    ({"messages": None}, "messages", "at least one message"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "system"}]}, "messages[0].content", "must be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "messages[0].content[0].type",
        '"refusal" must be "text"',
    ),
    ({"messages": [USERS_CALL]}, "messages[0].tool_calls", "belong to a message of the assistant"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "must not set"),
    ({"continue_final_message": True}, "continue_final_message", "last message of the assistant"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
]
GENERATE: list[Case] = [
    ({"text": None}, "text", "exactly one of text and input_ids"),
    ({"input_ids": [1], "text": "a"}, "text", "exactly one of text and input_ids"),
    ({"sampling_params": [{}, {}]}, "sampling_params", "one entry a prompt, 1"),
    ({"rid": ["a", "b"]}, "rid", "one string a prompt, 1"),
]
CASES = [
    *TYPED_CASES,
    *((endpoint, *case) for endpoint in Endpoint for case in EVERYWHERE),
    *((endpoint, *case) for endpoint in OPENAIS for case in OPENAI),
    *((Endpoint.COMPLETIONS, *case) for case in COMPLETIONS),
    *((Endpoint.CHAT, *case) for case in CHAT),
    *((Endpoint.GENERATE, *case) for case in GENERATE),
]
"""Bodies that break a declaration, or a rule of several fields."""


@pytest.mark.parametrize(("endpoint", "changes", "param", "said"), CASES)
def test_errors_name_field_value_and_bound(
    endpoint: Endpoint, changes: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(endpoint, **changes)
    error = caught.value
    assert error.status == 400
    assert error.param == param
    assert said in error.message
    assert param in error.message or param == "text"
    shape = json.loads(error.body())["error"]
    assert set(shape) == {"message", "type", "param", "code"}
    assert shape["type"] == "invalid_request_error"
    assert len(error.message) < 400


@pytest.mark.parametrize("endpoint", Endpoint)
def test_another_model_is_404_and_none_is_fine(endpoint: Endpoint) -> None:
    with pytest.raises(ApiError, match=r"other.*tiny") as caught:
        parse(endpoint, model="other")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    for model in (None, "tiny", "", "unknown", "default"):
        parse(endpoint, model=model)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object: Expected `object`, got `array`"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b'{"unknown": "\xc3\x28"}', "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"stream": 1e999}', "not valid JSON"),
        (b'{"stop":' + b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * MAX_NESTING + b"]" * MAX_NESTING + b"}", f"{MAX_NESTING} levels .* are the most"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_bodies_that_are_no_json_object(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        parse_request(Endpoint.COMPLETIONS, body, "tiny")
    assert caught.value.status == 400


def test_unknown_and_harmless_fields_are_ignored() -> None:
    extras = {
        "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False, "tools": None,
        "tool_choice": "auto", "log_metrics": True, "user": "me", "echo": False, "logit_bias": {},
        "session_params": {"id": 1}, "something": [{"new": 1}], "repetition_penalty": 1.0, "min_p": 0.0,
        "response_format": {"type": "text"}, "best_of": 1, "bad_words": [], "use_beam_search": False,
        "return_token_ids": False, "spaces_between_special_tokens": True, "priority": 0,
    }  # fmt: skip
    for endpoint in Endpoint:
        parse(endpoint, **extras | ({"tool_choice": None} if endpoint is Endpoint.MESSAGES else {}))


def test_large_fields_are_refused_and_large_unknown_ones_are_not_decoded() -> None:
    """This holds for fields of every declared type."""
    many = json.dumps([1] * (1 << 20))

    def parse_with(field: str) -> None:
        body = json.dumps(MINIMAL[Endpoint.CHAT])[:-1] + f', "{field}": {many}}}'
        parse_request(Endpoint.CHAT, body.encode(), "tiny")

    parse_with("unknown")
    for field in ("stop", "metadata"):
        said = f"^{field}: has 3145728 bytes of JSON; 2097152 are the most for a field"
        with pytest.raises(ApiError, match=said):
            parse_with(field)


def test_fields_beside_large_ones_are_read_and_checked_as_ever() -> None:
    content = "w" * (3 << 20)
    message = {"role": "user", "content": content}
    request = parse(Endpoint.CHAT, messages=[message], temperature=0.5, unknown=content)
    assert request.chat is not None
    assert request.chat.messages == (message,)
    assert request.options[0].sampling.temperature == 0.5
    for changes, said in (
        ({"temperature": 5}, "temperature: 5 must be"),
        ({"audio": {}}, "audio: an object"),
    ):
        with pytest.raises(ApiError, match=said):
            parse(Endpoint.CHAT, unknown=content, **changes)
    parts = [{"type": "text", "text": "a"}, {"type": "image"}]
    with pytest.raises(ApiError, match=r'messages\[0\].content\[1\].type: "image" must be "text"'):
        parse(Endpoint.MESSAGES, messages=[{"role": "assistant", "content": parts, "x": content}])


def test_null_is_the_same_as_absent() -> None:
    """This holds for every declared field, of bodies and of messages."""
    for endpoint in Endpoint:
        body: dict[str, Any] = dict.fromkeys(BODIES[endpoint].__struct_fields__) | MINIMAL[endpoint]
        bare = parse_request(endpoint, json.dumps(MINIMAL[endpoint]).encode(), "tiny")
        assert parse_request(endpoint, json.dumps(body).encode(), "tiny") == bare


# --- the OpenAPI document ---------------------------------------------------------------------------

SCHEMAS = json.loads(openapi_document())["components"]["schemas"]


def errors(schema: str, value: object) -> list[str]:
    root = {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": SCHEMAS}}
    found: list[str] = [e.message for e in jsonschema.Draft202012Validator(root).iter_errors(value)]
    return found


@pytest.mark.parametrize("endpoint", Endpoint)
def test_what_is_served_is_as_the_document_says(endpoint: Endpoint) -> None:
    assert errors(BODIES[endpoint].__name__, MINIMAL[endpoint]) == []


@pytest.mark.parametrize(("endpoint", "changes"), [case[:2] for case in TYPED_CASES])
def test_what_is_refused_for_a_type_or_bound_is_not_as_the_document_says(
    endpoint: Endpoint, changes: dict[str, Any]
) -> None:
    assert errors(BODIES[endpoint].__name__, MINIMAL[endpoint] | changes)
