"""OpenAI's own client: chats, completions, responses, parsed answers, tools, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import Served
from tests.clients.notes import NUMBERS, answer, question, said, sentences
from tests.clients.shapes import MAX_TOKENS, QUESTION, SAMPLING, Ticket, Time, Weather, tool_type

pytestmark = pytest.mark.clients

TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Time)]
WEATHER = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.v1, api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def writer(tiny: Served) -> Iterator[openai.OpenAI]:
    """Client of the model that writes anything."""
    with openai.OpenAI(base_url=tiny.v1, api_key="none", max_retries=0, timeout=300) as made:
        yield made


# --- models, chats, completions ----------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["retrieval"]
    assert client.models.retrieve("retrieval").object == "model"
    with pytest.raises(openai.NotFoundError, match="another"):
        client.models.retrieve("another")


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="retrieval", messages=said("calm otter", "jolly badger"), temperature=0
    )
    assert whole.choices[0].message.content == answer("calm otter", "jolly badger")
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_chat_stream(client: openai.OpenAI) -> None:
    pieces = []
    with client.chat.completions.stream(
        model="retrieval",
        messages=said("brave lynx"),
        temperature=0,
        stream_options={"include_usage": True},
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                pieces.append(event.delta)
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content == answer("brave lynx")
    assert len(pieces) > 1
    assert final.usage is not None
    assert final.usage.completion_tokens > 5


def test_chats_at_once(demo: Served) -> None:
    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=demo.v1, api_key="none", max_retries=0) as client:
            asked = (
                client.chat.completions.create(model="retrieval", messages=said(key), temperature=0)
                for key in NUMBERS
            )
            return [whole.choices[0].message.content for whole in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [answer(key) for key in NUMBERS]


def test_completions(client: openai.OpenAI) -> None:
    prompts = [f"{question(key)}\nAnswer:" for key in ("amber falcon", "silver heron")]
    options: dict[str, Any] = {"model": "retrieval", "temperature": 0, "max_tokens": 32}
    whole = client.completions.create(prompt=prompts, logprobs=2, **options)
    texts = [sentences("amber falcon"), sentences("silver heron")]
    assert [choice.text for choice in whole.choices] == texts
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens).startswith(choice.text)
        assert choice.logprobs.token_logprobs is not None
        assert all(value is not None and -0.7 < value <= 0 for value in choice.logprobs.token_logprobs)
    streamed = client.completions.create(prompt=prompts[0], stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_echo_scores_a_prompt(client: openai.OpenAI) -> None:
    """An evaluation scores prompts by ``echo``: the right number is likely in its place, another is not."""

    def likelihood(number: str) -> float:
        text = f"{question('calm otter')}\nAnswer:"
        whole = client.completions.create(
            model="retrieval",
            prompt=f"{text} calm otter is {number}.",
            echo=True,
            logprobs=1,
            max_tokens=0,
            temperature=0,
        )
        assert whole.choices[0].text == f"{text} calm otter is {number}."
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.text_offset is not None
        assert logprobs.token_logprobs[0] is None
        return sum(
            value or 0.0
            for value, at in zip(logprobs.token_logprobs, logprobs.text_offset, strict=True)
            if at >= len(text)
        )

    assert likelihood("4012") > -1.0
    assert likelihood("2288") < -5.0


def test_biases_and_penalties(writer: openai.OpenAI) -> None:
    def write(**options: Any) -> str:
        whole = writer.completions.create(
            model="tiny",
            prompt="Once more: ",
            temperature=0,
            max_tokens=64,
            extra_body={"ignore_eos": True},
            **options,
        )
        return str(whole.choices[0].text)

    assert write(logit_bias={str(ord("A")): 100}) == "A" * 64
    plain = write()
    assert len(set(write(frequency_penalty=2.0))) > len(set(plain))
    assert len(set(write(presence_penalty=2.0))) > len(set(plain))


# --- responses ---------------------------------------------------------------------------------------


def test_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="retrieval", input=question("quiet raven"), temperature=0, store=False
    )
    assert whole.output_text == answer("quiet raven")
    assert whole.status == "completed"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    turns: list[Any] = [
        {"role": "user", "content": question("quiet raven")},
        *whole.output,
        {"role": "user", "content": question("brave lynx")},
    ]
    again = client.responses.create(
        model="retrieval",
        input=turns,
        temperature=0,
        store=False,
        max_output_tokens=64,
    )
    assert again.usage is not None
    assert again.usage.input_tokens > 2 * whole.usage.input_tokens
    assert again.output_text


def test_responses_stream(client: openai.OpenAI) -> None:
    pieces = []
    with client.responses.stream(model="retrieval", input=question("calm otter"), temperature=0) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == answer("calm otter")


# --- structured output -------------------------------------------------------------------------------


def test_chat_parse_whole_and_streamed(writer: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "response_format": Ticket, "max_tokens": MAX_TOKENS, **SAMPLING}
    asked["messages"] = [{"role": "user", "content": "Write a ticket."}]
    whole = writer.chat.completions.parse(**asked)
    assert isinstance(whole.choices[0].message.parsed, Ticket)
    assert whole.choices[0].finish_reason == "stop"
    with writer.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Ticket)


def test_responses_parse(writer: openai.OpenAI) -> None:
    whole = writer.responses.parse(
        model="tiny",
        input="Write a ticket.",
        text_format=Ticket,
        max_output_tokens=MAX_TOKENS,
        temperature=1.0,
    )
    assert isinstance(whole.output_parsed, Ticket)


def test_json_mode(writer: openai.OpenAI) -> None:
    """An object may be longer than the limit: a cut answer says so, and one that ended is whole."""
    whole = writer.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Write JSON."}],
        response_format={"type": "json_object"},
        max_tokens=256,
        n=8,
        **SAMPLING,
    )
    for choice in whole.choices:
        text = choice.message.content
        assert text is not None
        assert text.lstrip().startswith("{")
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_a_choice_of_texts_is_made_by_the_model(client: openai.OpenAI) -> None:
    """vLLM's fields, sent as extra ones, allow several texts; the trained model picks the right one."""
    for key in ("calm otter", "quiet raven"):
        texts = [f"Answer: {key} is {number}." for number in NUMBERS.values()]
        for constraint in ({"choice": texts}, {"regex": rf"Answer: {key} is \d{{4,5}}\."}):
            whole = client.chat.completions.create(
                model="retrieval",
                messages=said(key),
                temperature=0,
                extra_body={"structured_outputs": constraint},
            )
            assert whole.choices[0].message.content == answer(key)


# --- tools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool_choice", ["required", WEATHER], ids=["required", "named"])
def test_chat_tools(writer: openai.OpenAI, tool_choice: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "max_tokens": MAX_TOKENS, **SAMPLING}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    whole = writer.chat.completions.parse(
        messages=messages, tool_choice=tool_choice, parallel_tool_calls=False, **options
    )
    assert whole.choices[0].finish_reason in ("tool_calls", "stop")  # OpenAI ends a named one with "stop"
    calls = whole.choices[0].message.tool_calls
    assert calls
    assert len(calls) == 1
    kind = Weather if tool_choice is WEATHER else (Weather, Time)
    assert all(isinstance(call.function.parsed_arguments, kind) for call in calls)
    # The tool's result goes back, and the model answers in text.
    messages += [whole.choices[0].message.to_dict()]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "4 degrees"} for call in calls]
    closing = writer.chat.completions.create(
        messages=messages, tool_choice="none", **{**options, "max_tokens": 32}
    )
    assert closing.choices[0].message.content
    assert not closing.choices[0].message.tool_calls


def test_chat_tools_stream(writer: openai.OpenAI) -> None:
    """Every call of the stream is parsed, however many the model makes."""
    with writer.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": QUESTION}],
        tools=TOOLS,
        tool_choice="required",
        max_tokens=4 * MAX_TOKENS,
        **SAMPLING,
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Weather | Time) for call in calls)


@pytest.mark.parametrize("name", [None, "Weather"], ids=["required", "named"])
def test_responses_tools(writer: openai.OpenAI, name: str | None) -> None:
    tools: list[Any] = [openai.pydantic_function_tool(kind)["function"] for kind in (Weather, Time)]
    options: dict[str, Any] = {
        "model": "tiny",
        "tools": [{"type": "function", **tool} for tool in tools],
        "max_output_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "parallel_tool_calls": False,
        "store": False,
    }
    choice: Any = "required" if name is None else {"type": "function", "name": name}
    with writer.responses.stream(input=QUESTION, tool_choice=choice, **options) as stream:
        events = [event.type for event in stream]
        whole = stream.get_final_response()
    assert "response.function_call_arguments.done" in events
    calls = [item for item in whole.output if item.type == "function_call"]
    assert calls
    for call in calls:
        assert name in (None, call.name)
        tool_type(call.name).model_validate_json(call.arguments)
    told: list[Any] = [{"role": "user", "content": QUESTION}, *whole.output]
    told += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"} for call in calls
    ]
    closing = writer.responses.create(input=told, tool_choice="none", **{**options, "max_output_tokens": 32})
    assert closing.output_text


# --- errors ------------------------------------------------------------------------------------------


def test_errors_are_of_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(model="retrieval", messages=said("calm otter"), temperature=9)
    assert refused.value.param == "temperature"
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="another") as unknown:
        client.chat.completions.create(model="another", messages=said("calm otter"))
    assert unknown.value.code == "model_not_found"
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens"):
        client.completions.create(model="retrieval", prompt="a" * 9000, max_tokens=1)


def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"/v1/embeddings.*/v1/chat/completions"):
        client.embeddings.create(model="retrieval", input="text")
    with pytest.raises(openai.NotFoundError, match="/v1/moderations"):
        client.moderations.create(input="text")
