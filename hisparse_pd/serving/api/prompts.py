"""The prompts of a request: text, token ids, or a conversation of a bounded number of values.

The readers of bodies make them (``plain_prompts.py``, ``openai_chat.py``, ``anthropic_messages.py``,
``openai_responses.py``), and ``text_codec.py`` encodes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from hisparse_pd.serving.http.http_errors import ApiError


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool as the client of ``/v1/responses`` names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Whether the tool takes a text instead of arguments."""


class LeftOutTool(NamedTuple):
    """A tool that the model is not shown, since a server of the API's vendor would run it."""

    place: str
    """Path of the tool in the request, for errors."""
    kind: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template. Raises ApiError 400 for more than MAX_VALUES."""

    messages: tuple[dict[str, object], ...]
    """Messages as the template takes them. A system's or developer's may have ``tools`` of its own."""
    template_arguments: dict[str, object]
    continue_final_message: bool
    tools: tuple[dict[str, object], ...]
    """Descriptions of the tools that the model may call; empty if it may call none."""
    separate_reasoning: bool
    """Whether the answer's reasoning is shown beside its content, instead of at the content's beginning."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an answer."""
    called_tools: Mapping[str, CalledTool] = field(default_factory=dict)
    """The client's names of ``tools``, by the functions' names, where the two differ."""
    left_out: tuple[LeftOutTool, ...] = ()
    num_chars: int = field(init=False)
    """The cost of encoding: characters that a template may write, and _CHARS_A_VALUE more for each value."""

    def __post_init__(self) -> None:
        num_chars = _num_chars(self.messages, self.tools, self.template_arguments)
        object.__setattr__(self, "num_chars", num_chars)

    @property
    def all_tools(self) -> list[dict[str, object]]:
        """All tools, those of messages included."""
        found = list(self.tools)
        for message in self.messages:
            tools = message.get("tools")
            found += tools if isinstance(tools, list) else ()
        return found


MAX_VALUES = 1 << 19
"""Most JSON values of a conversation: names, strings, numbers, lists and objects. To free this many takes a
tenth of a second, in which nobody else is served."""

_CHARS_A_VALUE = 16
"""The template's time for one value, as the number of characters that are encoded in that time. The value's
own text is counted beside it."""


T = TypeVar("T")


def limit_values(messages: Iterable[T]) -> Iterator[T]:
    """Yield ``messages`` as they come. Raises ApiError 400 at the first one with which they have more than
    MAX_VALUES, so that no further ones are decoded."""
    num_values = 0
    for message in messages:
        num_values += _num_values_and_chars(message)[0]
        _check_values(num_values)
        yield message


def _num_chars(*values: object) -> int:
    """Return ``ChatPrompt.num_chars``. Raises ApiError 400 for more than MAX_VALUES."""
    num_values, num_chars = _num_values_and_chars(*values)
    _check_values(num_values)
    return num_chars + _CHARS_A_VALUE * num_values


def _num_values_and_chars(*values: object) -> tuple[int, int]:
    """Count all JSON values within ``values``, and the characters of strings; stop above MAX_VALUES."""
    num_chars = num_values = 0
    open_values = list(values)
    while open_values and num_values <= MAX_VALUES:
        value = open_values.pop()
        num_values += 1
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, dict):
            open_values += value.keys()
            open_values += value.values()
        elif isinstance(value, list | tuple):
            open_values += value
        elif isinstance(value, msgspec.Struct):
            open_values += msgspec.structs.astuple(value)
    return num_values, num_chars


def _check_values(num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise ApiError(
            400,
            f"messages, tools: have more than {MAX_VALUES} JSON values with the arguments of calls, the "
            "most for a request: shorten the history",
            param="messages",
        )


Prompt = str | bytes | ChatPrompt
"""Text, packed token ids (``pack_token_ids``), or a conversation."""
