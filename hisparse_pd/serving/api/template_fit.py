"""Fits a conversation to the checkpoint's chat template, which would silently lose part of it otherwise.

``TextCodec`` has one ``TemplateFit`` for its template, and fits each chat before it is rendered.

- A template without the role ``developer`` drops such messages: they become system messages.
- Most templates want the arguments of earlier calls as an object, DeepSeek-V3.1's as JSON text. Arguments
  that are no JSON object stay text: V3.1's template gets the text itself, others get an object with it.
- A template takes a level of ``reasoning_effort`` that it does not name for its default, which for GLM-5.2
  and later is the highest. Such a level becomes the next higher one that the template names, if there is one.
  A request for no effort also switches thinking off, where there is a switch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from hisparse_pd.serving.api.chat_format import ToolMarkup
from hisparse_pd.serving.api.prompts import ChatPrompt

Message = dict[str, object]

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of all APIs, the least first."""
_NO_EFFORT = ("none", "minimal")
_SWITCHES = ("thinking", "enable_thinking")
"""Template arguments that switch thinking, DeepSeek's and GLM's."""
# An effort as a literal in a template's source.
_NAMED_EFFORT = re.compile(rf"""["']({"|".join(_EFFORTS)})["']""")


class TemplateFit:
    """The needs of one checkpoint's chat template."""

    def __init__(self, template: str | None, markup: ToolMarkup | None) -> None:
        """``template`` is the text of all the checkpoint's templates; ``markup`` is that of its calls."""
        self._takes_developer = template is not None and "developer" in template
        self._takes_arguments_as_text = markup is ToolMarkup.DEEPSEEK_V31
        has_effort = template is not None and "reasoning_effort" in template
        named = set(_NAMED_EFFORT.findall(template or "")) if has_effort else set()
        self._efforts = [effort for effort in _EFFORTS if effort in named]

    def fit(self, prompt: ChatPrompt) -> ChatPrompt:
        """Return the conversation as the template takes it."""
        return replace(
            prompt,
            messages=tuple(map(self._message, prompt.messages)),
            template_arguments=self._arguments(prompt.template_arguments),
        )

    def _message(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._takes_developer:
            message = message | {"role": "system"}
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = message | {"tool_calls": list(map(self._call, calls))}
        return message

    def _call(self, call: Message) -> Message:
        function = call["function"]
        assert isinstance(function, dict)
        arguments = function["arguments"]
        if self._takes_arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not self._takes_arguments_as_text:
            arguments = {"arguments": arguments}
        return call | {"function": function | {"arguments": arguments}}

    def _arguments(self, given: Mapping[str, object]) -> dict[str, object]:
        arguments = dict(given)
        effort = arguments.get("reasoning_effort")
        if effort in _NO_EFFORT:
            for switch in _SWITCHES:
                arguments.setdefault(switch, False)
        if self._efforts and effort in _EFFORTS:
            at_least = _EFFORTS[_EFFORTS.index(str(effort)) :]
            higher = (known for known in self._efforts if known in at_least)
            arguments["reasoning_effort"] = next(higher, effort)
        return arguments
