"""Checks of structured output as clients get it, from a served model that writes anything its grammar allows.

The schemas are small and bounded, so that an untrained model ends, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import httpx
import openai
from openai import pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

TOOLS_TEMPLATE = (
    "{% if tools %}[tools]{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}"
    "<tool_call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>"
    "{% endfor %}{% endfor %}[assistant]"
)
"""A chat template that takes tools and writes calls as GLM does."""

MAX_TOKENS = 1500
"""Enough even if a model writes as much white space as it may: 64 characters at each place."""


class Closed(BaseModel):
    """A schema without further properties, of which a model could write any number, of any length."""

    model_config = ConfigDict(extra="forbid")


class Report(Closed):
    kind: Literal["dry", "wet"]
    days: Annotated[int, Field(ge=0, le=9)]
    place: Annotated[str, Field(max_length=4)]


class Weather(Closed):
    """Looks it up."""

    city: Annotated[str, Field(max_length=3)]
    report: Report
    exact: bool


class Stop(Closed):
    """Ends it."""


SCHEMA = Report.model_json_schema()
TOOLS: list[Any] = [pydantic_function_tool(Weather), pydantic_function_tool(Stop)]
MODELS: dict[str, type[BaseModel]] = {"Weather": Weather, "Stop": Stop}
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


class Served:
    """Clients of a served model. ``extra``: further fields of every body."""

    def __init__(self, url: str, extra: Mapping[str, Any]) -> None:
        self._extra = dict(extra)
        self.http = httpx.Client(base_url=url, timeout=120, trust_env=False)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=120)

    def close(self) -> None:
        self.http.close()
        self.openai.close()

    def chat_options(self, **extra: Any) -> dict[str, Any]:
        body = {**self._extra, **extra}
        return {"model": "tiny", "messages": MESSAGES, "max_tokens": MAX_TOKENS, "extra_body": body}

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json={**self._extra, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        text = self.http.post(path, json={**self._extra, **body, "stream": True}).text
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
        return [json.loads(line) for line in lines]


def check_chats(served: Served) -> None:
    """Check ``response_format``, and the fields that vLLM and SGLang have for the same."""
    chat = served.openai.chat.completions
    parsed = chat.parse(**served.chat_options(), response_format=Report).choices[0]
    assert isinstance(parsed.message.parsed, Report)
    assert parsed.finish_reason == "stop"
    with chat.stream(**served.chat_options(), response_format=Report) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Report)
    for extra in ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}):
        content = chat.create(**served.chat_options(**extra)).choices[0].message.content
        Report.model_validate_json(content)
    options = served.chat_options(structured_outputs={"choice": ["one", "two"]})
    assert chat.create(**options).choices[0].message.content in ("one", "two")
    options = served.chat_options() | {"max_tokens": 8}
    content = chat.create(**options, response_format={"type": "json_object"}).choices[0].message.content
    assert content.startswith("{")


def check_completions(served: Served) -> None:
    shared: dict[str, Any] = {"prompt": "Weather?", "max_tokens": MAX_TOKENS}
    schema = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
    Report.model_validate_json(
        served.post("/v1/completions", **shared, response_format=schema)["choices"][0]["text"]
    )
    answer = served.post("/v1/completions", **shared, structured_outputs={"regex": "[ab]{3}/[0-9]"}, n=2)
    for choice in answer["choices"]:
        text = choice["text"]
        assert len(text) == 5
        assert set(text[:3]) <= {"a", "b"}
        assert text[3:].startswith("/")


def check_generate(served: Served) -> None:
    def text_of(**params: Any) -> str:
        sampling = {"max_new_tokens": MAX_TOKENS, **params}
        return str(served.post("/generate", text="Weather?", sampling_params=sampling)["text"])

    Report.model_validate_json(text_of(json_schema=json.dumps(SCHEMA)))
    assert text_of(regex="yes|no") in ("yes", "no")
    assert text_of(ebnf='root ::= "<" digit ">"\ndigit ::= [0-9]')[0] == "<"


def check_required_tool(served: Served) -> None:
    options = served.chat_options() | {"tools": TOOLS, "parallel_tool_calls": False}
    required = served.openai.chat.completions.create(**options, tool_choice="required").choices[0]
    assert required.finish_reason == "tool_calls"
    assert not required.message.content
    (call,) = required.message.tool_calls
    MODELS[call.function.name].model_validate_json(call.function.arguments)


NAMED_TOOL: Any = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "Weather"}}}


def check_named_tool(served: Served) -> None:
    named = served.openai.chat.completions.parse(**served.chat_options(), **NAMED_TOOL).choices[0]
    (call,) = named.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert named.finish_reason == "tool_calls"


def check_streamed_tool(served: Served) -> None:
    with served.openai.chat.completions.stream(**served.chat_options(), **NAMED_TOOL) as stream:
        streamed = stream.get_final_completion().choices[0]
    (call,) = streamed.message.tool_calls or []
    Weather.model_validate_json(call.function.arguments)
    assert streamed.finish_reason == "tool_calls"


def check_responses(served: Served) -> None:
    options: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": MAX_TOKENS}
    options["extra_body"] = served.chat_options()["extra_body"]
    parsed = served.openai.responses.parse(**options, text_format=Report)
    assert isinstance(parsed.output_parsed, Report)
    with served.openai.responses.stream(**options, text_format=Report) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Report)
    tools: Any = [{"type": "function", "strict": True, **_described(TOOLS[0])}]
    choices: list[Any] = ["required", {"type": "function", "name": "Weather"}]
    for choice in choices:
        response = served.openai.responses.create(
            **options, tools=tools, tool_choice=choice, parallel_tool_calls=False
        )
        (item,) = response.output
        assert item.type == "function_call"
        Weather.model_validate_json(item.arguments)
        assert response.parallel_tool_calls is False


def check_messages(served: Served) -> None:
    shared: dict[str, Any] = {"messages": MESSAGES, "max_tokens": MAX_TOKENS}
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for field in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        (block,) = served.post("/v1/messages", **shared, **field)["content"]
        Report.model_validate_json(block["text"])
    described = [_described(tool) for tool in TOOLS]
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in described]
    for choice, names in (({"type": "any"}, set(MODELS)), ({"type": "tool", "name": "Weather"}, {"Weather"})):
        forced = {**shared, "tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        answer = served.post("/v1/messages", **forced)
        (block,) = answer["content"]
        assert (block["type"], answer["stop_reason"]) == ("tool_use", "tool_use")
        assert block["name"] in names
        MODELS[block["name"]].model_validate(block["input"])
        events = served.events("/v1/messages", **forced)
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        pieces = [event["delta"].get("partial_json", "") for event in events if "partial_json" in str(event)]
        started = next(event for event in events if event["type"] == "content_block_start")
        MODELS[started["content_block"]["name"]].model_validate_json("".join(pieces))


def _described(tool: Any) -> dict[str, Any]:
    function: dict[str, Any] = dict(tool["function"])
    return {field: function[field] for field in ("name", "parameters")}


CHECKS: tuple[Callable[[Served], None], ...] = (
    *(check_chats, check_required_tool, check_named_tool, check_streamed_tool),
    *(check_completions, check_generate, check_responses, check_messages),
)
