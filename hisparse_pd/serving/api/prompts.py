"""The prompts of a request: text, token ids, or a conversation of a bounded number of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from hisparse_pd.serving.http.http_errors import ApiError


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool as the client of ``/v1/responses`` calls it. ``is_custom``: it takes a text, no arguments."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class LeftOutTool(NamedTuple):
    """A tool that a server of the API's vendor runs. ``place``: as errors call it."""

    place: str
    kind: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template.

    ``tools``: those that the model may call, as the client describes them; () also where it may call none.
    A system's or developer's message may bring tools of its own: ``tools`` of the message.
    ``separate_reasoning``: show the answer's reasoning beside its content, and not as the beginning of it.
    ``add_generation_prompt``: end with what begins an answer, unless the last message is continued.
    ``called_tools``: what clients call ``tools``, by the functions' names, where that is something else.
    ``left_out``: tools of which the model is not told, as the request has them.

    Raises ApiError 400 for more than MAX_VALUES.
    """

    messages: tuple[dict[str, object], ...]
    template_arguments: dict[str, object]
    continue_final_message: bool
    tools: tuple[dict[str, object], ...]
    separate_reasoning: bool
    add_generation_prompt: bool = True
    called_tools: Mapping[str, CalledTool] = field(default_factory=dict)
    left_out: tuple[LeftOutTool, ...] = ()
    num_chars: int = field(init=False)
    """Of all that a template may write of it, and some more for what each value costs it."""

    def __post_init__(self) -> None:
        num_chars = _num_chars(self.messages, self.tools, self.template_arguments)
        object.__setattr__(self, "num_chars", num_chars)

    @property
    def all_tools(self) -> list[dict[str, object]]:
        """Those of messages too."""
        found = list(self.tools)
        for message in self.messages:
            tools = message.get("tools")
            found += tools if isinstance(tools, list) else ()
        return found


MAX_VALUES = 1 << 19
"""JSON values of a conversation, each name, string, number, list and object: the garbage of more than these
is let go in a tenth of a second, in which nobody else is served."""

_CHARS_A_VALUE = 16
"""That could be encoded in the time in which a template writes a value without its text."""


T = TypeVar("T")


def within_values(messages: Iterable[T]) -> Iterator[T]:
    """``messages`` as they come. Raises ApiError 400 at the first one with which they have too many values,
    so that the others are not even read."""
    num_values = 0
    for message in messages:
        num_values += _num_values_and_chars(message)[0]
        _check_values(num_values)
        yield message


def _num_chars(*values: object) -> int:
    """Raises ApiError 400 for more than MAX_VALUES."""
    num_values, num_chars = _num_values_and_chars(*values)
    _check_values(num_values)
    return num_chars + _CHARS_A_VALUE * num_values


def _num_values_and_chars(*values: object) -> tuple[int, int]:
    """Of more than MAX_VALUES, no more are counted."""
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
"""Text, token ids as of ``pack_token_ids``, or a conversation."""
