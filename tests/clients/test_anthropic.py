"""Anthropic's client: messages, streams, tools, counted tokens, structured output, errors."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import Served
from tests.clients.notes import answer, said
from tests.clients.shapes import MAX_TOKENS, QUESTION, Mark, Time, Weather, tool_type

pytestmark = pytest.mark.clients

TOOLS: list[Any] = [
    {"name": kind.__name__, "description": kind.__doc__, "input_schema": kind.model_json_schema()}
    for kind in (Weather, Time)
]
GREEDY, DRAWN = {"temperature": 0}, {"temperature": 1.0}
"""Extra fields of the body, for which the client has no parameters."""


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def writer(tiny: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0, timeout=300) as made:
        yield made


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "retrieval", "max_tokens": 64, **fields})


def test_messages(client: anthropic.Anthropic) -> None:
    whole = ask(client, messages=said("jolly badger", "calm otter"), extra_body=GREEDY)
    assert [block.text for block in whole.content] == [answer("jolly badger", "calm otter")]
    assert (whole.role, whole.stop_reason, whole.model) == ("assistant", "end_turn", "retrieval")
    counted = client.messages.count_tokens(model="retrieval", messages=said("jolly badger", "calm otter"))
    used = whole.usage
    assert used.input_tokens + used.cache_read_input_tokens == counted.input_tokens
    stopped = ask(client, messages=said("amber falcon"), extra_body=GREEDY, stop_sequences=[" is "])
    assert stopped.stop_reason in ("stop_sequence", "end_turn")


def test_a_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="retrieval", max_tokens=64, messages=said("silver heron"), extra_body=GREEDY
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == answer("silver heron")
    assert [block.text for block in final.content if block.type == "text"] == [answer("silver heron")]
    assert len(pieces) > 1
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 5


def test_a_conversation(client: anthropic.Anthropic) -> None:
    messages = said("amber falcon")
    whole = ask(client, messages=messages, extra_body=GREEDY)
    messages += [{"role": "assistant", "content": whole.content}, *said("quiet raven")]
    again = ask(client, messages=messages, extra_body=GREEDY)
    assert again.content[0].text
    num_tokens = [told.usage.input_tokens + told.usage.cache_read_input_tokens for told in (whole, again)]
    assert num_tokens[1] > 2 * num_tokens[0]


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.type, model.id, model.display_name) == ("model", "retrieval", "retrieval")
    assert model.created_at <= datetime.datetime.now(datetime.UTC)
    assert client.models.retrieve("retrieval") == model


@pytest.mark.parametrize("name", [None, "Weather"], ids=["any", "named"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_tools(writer: anthropic.Anthropic, name: str | None, streams: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "extra_body": DRAWN}
    choice: Any = (
        {"type": "any", "disable_parallel_tool_use": True} if name is None else {"type": "tool", "name": name}
    )
    forced = {**options, "messages": messages, "max_tokens": MAX_TOKENS, "tool_choice": choice}
    if streams:
        with writer.messages.stream(**forced) as stream:
            whole: Any = stream.get_final_message()
    else:
        whole = writer.messages.create(**forced)
    assert whole.stop_reason == "tool_use"
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert calls
    for call in calls:
        assert name in (None, call.name)
        tool_type(call.name).model_validate(call.input)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "4 degrees"} for call in calls]
    messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    closing = ask(writer, **options, messages=messages, tool_choice={"type": "none"}, max_tokens=32)
    assert [block.type for block in closing.content] == ["text"]


def test_parsed_messages(writer: anthropic.Anthropic) -> None:
    whole = writer.messages.parse(
        model="tiny",
        max_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": "Write a mark."}],
        output_format=Mark,
        extra_body=DRAWN,
    )
    assert isinstance(whole.parsed_output, Mark)


def test_errors_are_of_the_clients_own_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
        ask(client, messages=said("calm otter"), extra_body={"temperature": 9})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="another"):
        ask(client, model="another", messages=said("calm otter"))
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(client, messages=said("calm otter"), max_tokens=100_000)
