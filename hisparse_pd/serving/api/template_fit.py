"""What a checkpoint's chat template takes otherwise than clients give it, so that nothing is lost in silence.

- A template without the role ``developer`` drops such messages: they become a system's.
- Most templates want the arguments of earlier calls as an object, DeepSeek-V3.1's as JSON text. Arguments
  that are no JSON object are shown as the text that they are: V3.1's in their place, others' as an argument.
- A level of ``reasoning_effort`` that a template does not name means its default, which for GLM-5.2 and later
  is the highest. So it becomes the next higher level that the template names, if there is one. A request for
  no effort also switches thinking off, where there is a switch.
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
"""From the least on, in the words of all APIs."""
_NO_EFFORT = ("none", "minimal")
_SWITCHES = ("thinking", "enable_thinking")
"""Of DeepSeek's templates and of GLM's."""
_NAMED_EFFORT = re.compile(rf"""["']({"|".join(_EFFORTS)})["']""")


class TemplateFit:
    """``template``: all that the checkpoint's say, if it has any. ``markup``: of its calls."""

    def __init__(self, template: str | None, markup: ToolMarkup | None) -> None:
        self._takes_developer = template is not None and "developer" in template
        self._writes_arguments = markup is ToolMarkup.DEEPSEEK_V31
        has_effort = template is not None and "reasoning_effort" in template
        named = set(_NAMED_EFFORT.findall(template or "")) if has_effort else set()
        self._efforts = [effort for effort in _EFFORTS if effort in named]

    def fitted(self, prompt: ChatPrompt) -> ChatPrompt:
        """The same conversation for the template."""
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
        if self._writes_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not self._writes_arguments:
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
