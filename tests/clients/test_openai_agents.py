"""OpenAI's Agents SDK: agents that answer, call a function, return a typed result, by both of its APIs."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from tests.clients.conftest import Served
from tests.clients.notes import answer, question
from tests.clients.shapes import MAX_TOKENS, QUESTION, Ticket, Weather

pytestmark = pytest.mark.clients

MODELS = pytest.mark.parametrize(
    "model_of", [OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"]
)
CALLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "parallel_tool_calls": False}
"""One call at a time, because an untrained model makes any number of calls, of any length."""
ModelOf = Callable[[str, AsyncOpenAI], Model]


def model(model_of: ModelOf, served: Served) -> Model:
    return model_of(served.model, AsyncOpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=300))


def num_tokens(served: Served, text: str) -> int:
    """Return the number of tokens of a chat with this one message."""
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    with urllib.request.urlopen(f"{served.url}/tokenize", body, timeout=60) as answer:
        return int(json.load(answer)["count"])


def run(agent: Agent[None], asked: Any, *, streams: bool = False, max_turns: int = 1) -> tuple[Any, str]:
    """Run an agent; return the result and the text that was streamed."""

    async def to_its_end() -> tuple[Any, str]:
        if not streams:
            return await Runner.run(agent, asked, max_turns=max_turns), ""
        running = Runner.run_streamed(agent, asked, max_turns=max_turns)
        pieces = [
            event.data.delta
            async for event in running.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return running, "".join(pieces)

    return asyncio.run(to_its_end())


@MODELS
def test_an_agent_answers(demo: Served, model_of: ModelOf) -> None:
    settings = ModelSettings(temperature=0)
    done, _ = run(
        Agent("clerk", model=model(model_of, demo), model_settings=settings), question("silver heron")
    )
    assert done.final_output == answer("silver heron")
    told = [*done.to_input_list(), {"role": "user", "content": question("calm otter")}]
    again, _ = run(Agent("clerk", model=model(model_of, demo), model_settings=settings), told)
    (first,), (second,) = done.raw_responses, again.raw_responses
    assert again.final_output
    assert second.usage.input_tokens > 2 * first.usage.input_tokens


@MODELS
def test_an_agent_streams(demo: Served, model_of: ModelOf) -> None:
    agent = Agent("clerk", model=model(model_of, demo), model_settings=ModelSettings(temperature=0))
    done, text = run(agent, question("brave lynx"), streams=True)
    assert text == done.final_output == answer("brave lynx")


@MODELS
@pytest.mark.parametrize("tool_choice", ["required", "weather"], ids=["required", "named"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_agent_calls_a_function(tiny: Served, model_of: ModelOf, tool_choice: str, streams: bool) -> None:
    """The call is forced; the untrained model fills in what the function's schema leaves open."""
    called: list[Weather] = []

    @function_tool  # type: ignore[untyped-decorator]
    def weather(asked: Weather) -> str:
        """Look up the weather of a city."""
        called.append(asked)
        return f"4 degrees in {asked.city}"

    agent = Agent(
        "clerk",
        instructions="Look up what you are asked for.",
        model=model(model_of, tiny),
        model_settings=ModelSettings(tool_choice=tool_choice, **CALLING),
        tools=[weather],
        tool_use_behavior="stop_on_first_tool",
    )
    done, _ = run(agent, QUESTION, streams=streams)
    assert called
    assert done.final_output == f"4 degrees in {called[0].city}"


@pytest.mark.parametrize(
    ("model_of", "result"),
    [(OpenAIChatCompletionsModel, str), (OpenAIChatCompletionsModel, Ticket), (OpenAIResponsesModel, Ticket)],
    ids=["chat-text", "chat-typed", "responses-typed"],
)
def test_an_agent_answers_after_its_call(tiny: Served, model_of: ModelOf, result: type) -> None:
    """The second request has the call and its result, but no tool, which the model would call at random.

    As free text, the model's answer goes on up to the limit, so only chats are asked for one.
    """
    called: list[str] = []

    @function_tool(is_enabled=lambda context, agent: not called)  # type: ignore[untyped-decorator]
    def clock() -> str:
        """Tell the time."""
        called.append("clock")
        return "It is noon."

    agent = Agent(
        "clerk",
        model=model(model_of, tiny),
        model_settings=ModelSettings(tool_choice="required", **CALLING),
        tools=[clock],
        output_type=result,
    )
    done, _ = run(agent, "What time is it?", max_turns=2)
    assert called == ["clock"]
    _, second = done.raw_responses
    assert second.usage.input_tokens > num_tokens(tiny, "What time is it?") + len("It is noon.")
    assert isinstance(done.final_output, result)


@MODELS
def test_an_agent_returns_a_typed_result(tiny: Served, model_of: ModelOf) -> None:
    agent = Agent(
        "clerk",
        model=model(model_of, tiny),
        model_settings=ModelSettings(temperature=1.0, max_tokens=MAX_TOKENS),
        output_type=Ticket,
    )
    done, _ = run(agent, "Write a ticket.")
    assert isinstance(done.final_output, Ticket)
