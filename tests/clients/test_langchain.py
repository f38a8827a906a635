"""LangChain's client of OpenAI's APIs: answers, streams, batches, structured output both ways, tools."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import Field

from tests.clients.conftest import Served
from tests.clients.notes import NUMBERS, answer, question
from tests.clients.shapes import MAX_TOKENS, QUESTION, Ticket

pytestmark = pytest.mark.clients

APIS = pytest.mark.parametrize("use_responses_api", [False, True], ids=["chat", "responses"])


def chat_model(served: Served, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=served.model, base_url=served.v1, api_key="none", max_retries=0, timeout=300, **options
    )


def writer(tiny: Served, use_responses_api: bool) -> ChatOpenAI:
    options: dict[str, Any] = {} if use_responses_api else {"seed": 7}
    return chat_model(
        tiny, temperature=1.0, max_tokens=MAX_TOKENS, use_responses_api=use_responses_api, **options
    )


@APIS
def test_an_answer(demo: Served, use_responses_api: bool) -> None:
    model = chat_model(demo, temperature=0, use_responses_api=use_responses_api)
    said = model.invoke(question("jolly badger"))
    assert said.text == answer("jolly badger")
    assert said.usage_metadata is not None
    assert said.usage_metadata["input_tokens"] > 50
    assert said.response_metadata["model_name"] == "retrieval"


@APIS
def test_a_stream(demo: Served, use_responses_api: bool) -> None:
    model = chat_model(demo, temperature=0, use_responses_api=use_responses_api, stream_usage=True)
    whole, pieces = None, []
    for chunk in model.stream(question("amber falcon")):
        whole = chunk if whole is None else whole + chunk
        pieces += [chunk.text] if chunk.text else []
    assert whole is not None
    assert "".join(pieces) == whole.text == answer("amber falcon")
    assert len(pieces) > 1
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 5


def test_a_batch(demo: Served) -> None:
    said = asyncio.run(chat_model(demo, temperature=0).abatch([question(key) for key in NUMBERS]))
    assert [message.text for message in said] == [answer(key) for key in NUMBERS]


@APIS
def test_structured_output_by_a_schema(tiny: Served, use_responses_api: bool) -> None:
    model = writer(tiny, use_responses_api).with_structured_output(Ticket, method="json_schema")
    assert isinstance(model.invoke("Write a ticket."), Ticket)


@APIS
def test_structured_output_by_a_call(tiny: Served, use_responses_api: bool) -> None:
    model = writer(tiny, use_responses_api).with_structured_output(
        Ticket, method="function_calling", include_raw=True
    )
    done: Any = model.invoke("Write a ticket.")
    assert isinstance(done["parsed"], Ticket), done
    assert [call["name"] for call in done["raw"].tool_calls] == ["Ticket"]


@APIS
def test_structured_output_streams(tiny: Served, use_responses_api: bool) -> None:
    model = writer(tiny, use_responses_api).with_structured_output(Ticket, method="json_schema")
    *_, last = model.stream("Write a ticket.")
    assert isinstance(last, Ticket)


@APIS
def test_a_tool_is_called(tiny: Served, use_responses_api: bool) -> None:
    called: list[int] = []

    @tool  # type: ignore[untyped-decorator]
    def double(number: Annotated[int, Field(ge=0, le=99)]) -> int:
        """Double a number."""
        called.append(number)
        return 2 * number

    model = writer(tiny, use_responses_api)
    brief = model.model_copy(update={"max_tokens": 32})
    messages: list[Any] = [HumanMessage(QUESTION)]
    said = model.bind_tools([double], tool_choice="any", parallel_tool_calls=False).invoke(messages)
    assert said.tool_calls
    assert not said.invalid_tool_calls
    results = [double.invoke(call) for call in said.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    assert [result.content for result in results] == [str(2 * number) for number in called]
    closing = brief.bind_tools([double], tool_choice="none").invoke([*messages, said, *results])
    assert closing.text
