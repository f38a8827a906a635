# ruff: noqa: RUF001 -- the marks of the model are written with wide bars
"""DeepSeek-V3.2's chats as text. Its checkpoint has no template; its authors' own encoder is the rule.

- The opening of an answer, ``<think>`` or ``</think>``, follows what asks for it: a user's or a developer's
  message, or the results of an answer's calls.
- Reasoning is shown of answers behind the last of these messages only, and only while thinking is on.
- Results carry no name: they stand in the order of the calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hisparse_pd.api.chat_format import DSML, THINK
from hisparse_pd.api.prompts import ChatPrompt
from hisparse_pd.http.http_errors import ApiError

_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

_TOOLS = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<{DSML}function_calls>
...
</{DSML}function_calls>
<function_results>
...
</function_results>
{THINK.opening}...thinking about results{THINK.closing}
Here are the functions available in JSONSchema format:
<functions>
"""  # noqa: E501 -- word for word what the model was trained on
_END_OF_TOOLS = "\n</functions>\n"

Message = Mapping[str, object]


def encode_chat(prompt: ChatPrompt, bos: str, eos: str) -> str:
    """The prompt's text. Raises ApiError 400 for a conversation that the model has no form for.

    Of ``template_arguments``, ``thinking`` or ``enable_thinking`` let the answer begin with reasoning. Where
    nobody asks for an answer, behind an answer or a system's message, one is begun all the same.
    """
    return _Chat(prompt, bos, eos).encode()


class _Chat:
    def __init__(self, prompt: ChatPrompt, bos: str, eos: str) -> None:
        arguments = prompt.template_arguments
        self._messages = prompt.messages
        self._tools = prompt.tools
        self._is_continued = prompt.continue_final_message
        self._bos, self._eos = bos, eos
        self._thinks = bool(arguments.get("thinking") or arguments.get("enable_thinking"))
        asking = [i for i, message in enumerate(self._messages) if message["role"] in ("user", "developer")]
        self._last_asking = asking[-1] if asking else -1

    def encode(self) -> str:
        roles = [message["role"] for message in self._messages]
        parts = [self._bos]
        if self._tools and roles[0] != "system":
            parts.append(_with_tools("", self._tools))
        index = 0
        while index < len(roles):
            num_taken = 1
            match roles[index]:
                case "system":
                    parts.append(self._system(index))
                case "user" | "developer":
                    parts += (_USER, self._question(index), _ASSISTANT, self._opening(index))
                case "assistant":
                    parts.append(self._answer(index))
                    if calls := _listed(self._messages[index], "tool_calls"):
                        results = _results_behind(self._messages, index)
                        num_taken += len(results)
                        parts += (self._results(index, calls, results), self._opening(index))
                case _:
                    raise _refused(index, "is a tool's result, and no message of the assistant calls a tool")
            index += num_taken
        if roles[-1] == "system" or (roles[-1] == "assistant" and not self._is_continued):
            parts += (_ASSISTANT, self._opening(len(roles)))
        return "".join(parts)

    def _opening(self, index: int) -> str:
        """What an answer to message ``index`` begins with."""
        return THINK.opening if self._thinks and index >= self._last_asking else THINK.closing

    def _system(self, index: int) -> str:
        message = self._messages[index]
        tools = [*_listed(message, "tools"), *(self._tools if index == 0 else ())]
        return _with_tools(str(message["content"]), tools)

    def _question(self, index: int) -> str:
        message = self._messages[index]
        content = str(message["content"])
        if message["role"] == "user":
            return content
        if not content:
            raise _refused(index, "is a developer's and empty")
        return _with_tools("", _listed(message, "tools")) + "\n\n# The user's message is: " + content

    def _answer(self, index: int) -> str:
        message = self._messages[index]
        calls = _listed(message, "tool_calls")
        is_begun = self._is_continued and index == len(self._messages) - 1
        if is_begun and calls:
            raise _refused(index, "cannot be continued: it calls tools")
        parts: list[str] = []
        if self._thinks and index > self._last_asking:
            reasoning = str(message.get("reasoning_content") or "")
            if not (reasoning or calls or is_begun):
                raise _refused(
                    index,
                    "answers the last question, thinking is on, and the message has neither "
                    "reasoning_content nor tool_calls",
                )
            parts += (reasoning, THINK.closing)
        parts.append(str(message["content"]))
        if calls:
            invokes = "\n".join(_invoke(call) for call in calls)
            parts.append(f"\n\n<{DSML}function_calls>\n{invokes}\n</{DSML}function_calls>")
        return "".join(parts) + ("" if is_begun else self._eos)

    def _results(self, index: int, calls: Sequence[Message], results: Sequence[Message]) -> str:
        if len(results) != len(calls):
            raise _refused(
                index,
                f"calls {len(calls)} tools, and {len(results)} results follow it; each call needs its own",
            )
        ids = [call.get("id") for call in calls]
        answered = [result.get("tool_call_id") for result in results]
        if None not in ids and None not in answered and len(set(ids)) == len(ids):
            by_id = dict(zip(answered, results, strict=True))
            if by_id.keys() != set(ids):
                raise _refused(index, "is followed by results whose tool_call_id are not those of its calls")
            results = [by_id[call_id] for call_id in ids]
        shown = "".join(f"\n<result>{result['content']}</result>" for result in results)
        return f"\n\n<function_results>{shown}\n</function_results>\n\n"


def _with_tools(text: str, tools: Sequence[Message]) -> str:
    if not tools:
        return text
    return text + "\n\n" + _TOOLS + "\n".join(_json(tool["function"]) for tool in tools) + _END_OF_TOOLS


def _invoke(call: Message) -> str:
    function = call["function"]
    assert isinstance(function, dict)
    parameters = "\n".join(
        f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _json(value)}</{DSML}parameter>"
        for name, value in function["arguments"].items()
    )
    return f'<{DSML}invoke name="{function["name"]}">\n{parameters}\n</{DSML}invoke>'


def _results_behind(messages: Sequence[Message], index: int) -> Sequence[Message]:
    end = index + 1
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    return messages[index + 1 : end]


def _listed(message: Message, field: str) -> Sequence[Message]:
    found = message.get(field) or ()
    assert isinstance(found, Sequence)
    return found


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refused(index: int, why: str) -> ApiError:
    return ApiError(400, f"messages[{index}]: {why}", param="messages")
