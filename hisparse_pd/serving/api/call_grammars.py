# ruff: noqa: RUF001 -- the marks of the models are written with wide bars
"""Grammars of tool calls, one ``CallWriter`` for each markup that models write calls in (``chat_format.py``).

``grammars.py`` asks ``callable_tools`` for the tools of a request and puts a writer's ``behind_opening``
behind the mark that opens calls. Methods return text in Lark's notation (``lark.py``). A call that these
grammars admit is read back by ``call_reader.py`` as the same call, with one exception: they cannot exclude a
mark that is spelled within a string of a JSON value, where no model writes it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from hisparse_pd.serving.api.argument_forms import SchemaReader, bare_texts
from hisparse_pd.serving.api.chat_format import STRING_ATTRIBUTE, Markup, ToolMarkup
from hisparse_pd.serving.api.constraints import schema_text
from hisparse_pd.serving.api.json_grammars import json_value
from hisparse_pd.serving.api.json_schemas import InexactNumber, NotWritable, Steps
from hisparse_pd.serving.api.lark import ANY, NEWLINE, Lark, literal, sequence
from hisparse_pd.serving.api.tool_schemas import ToolSchemas
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused

_NAME: Final = re.compile(r'[^\s<>"｜]([^<>"｜\x00-\x1f\x7f]*[^\s<>"｜])?')
"""Names of tools and parameters in constrained calls, which contain no part of markup."""

_FREE_KEY = "/[A-Za-z0-9_.\\-]{1,64}/"
"""Name of a parameter that no schema names."""

_CHARS_A_STEP = 8
"""Characters of a grammar that cost one step of ``Steps``."""


@dataclass(frozen=True)
class CallableTool:
    """A tool that an answer may call."""

    place: str
    """Path of the tool in the request, for errors."""
    name: str
    parameters: Mapping[str, object]
    is_strict: bool
    """Whether it is an error if the schema cannot be enforced in full; otherwise that part is left out."""


class CallWriter(ABC):
    """Writes calls in one markup. They begin with the mark ``opening``."""

    gap = ""
    """Expression of the text that may stand before ``opening``."""

    def __init__(
        self, markup: Markup, lark: Lark, tools: Sequence[Mapping[str, object]], steps: Steps
    ) -> None:
        """``tools``: all tools of the request. ``steps``: budget for reading their schemas."""
        self.opening = markup.openings[-1]  # the one without line breaks, which ``gap`` allows
        self._markup = markup
        self._lark = lark
        self._steps = steps
        self._schemas = ToolSchemas(tools, steps)

    def behind_opening(self, tools: Sequence[CallableTool], *, at_most_one: bool) -> str:
        """Return what follows ``opening``: calls of ``tools``, and their end. Raises ApiError 400 and
        TooManySteps."""
        for tool in tools:
            if not _NAME.fullmatch(tool.name):
                raise _refused(tool, "has a name that this model's calls cannot have")
        return self._calls("(" + " | ".join(map(self._checked_call, tools)) + ")", at_most_one)

    def _checked_call(self, tool: CallableTool) -> str:
        """Return the rule of one call. Raises ApiError 400."""
        try:
            return self._lark.rule(self._call(tool))
        except NotWritable as error:
            raise _refused(tool, str(error)) from error

    def _calls(self, call: str, at_most_one: bool) -> str:
        """Return what follows the opening; ``call`` is the expression of one call. In most markups each
        further call has an opening of its own."""
        further = f"({NEWLINE}? {self._lark.mark(self.opening)} {call})*"
        return call if at_most_one else f"{call} {further}"

    @abstractmethod
    def _call(self, tool: CallableTool) -> str:
        """Return one call. Raises NotWritable."""

    def _json_arguments(self, tool: CallableTool) -> str:
        """Return all arguments as one JSON object."""
        if tool.parameters.get("type", "object") != "object":
            raise NotWritable("has parameters that are no object")
        parameters = {**tool.parameters, "type": "object"}
        return json_value(self._lark, parameters, self._steps, is_lenient=not tool.is_strict)


def _refused(tool: CallableTool, why: str) -> ApiError:
    return FieldRefused(tool.place, f"{tool.name!r} {why}")


class _WithArguments(CallWriter):
    """A markup in which each argument has marks of its own."""

    def _arguments(self, tool: CallableTool) -> list[str]:
        """Return the rules of a call's arguments, in the order of the schema, optional ones with ``?``. Where
        the schema names parameters, calls have no others; where it names none, they have any number, unless
        it excludes all."""
        reader = SchemaReader(tool.parameters, self._steps, is_lenient=not tool.is_strict)
        properties, required, others = _members(tool, reader)
        if not properties:
            if others is False:
                return []
            key, value = self._lark.terminal(_FREE_KEY), self._value(tool, "", others, reader)
            return [f"({self._argument(key, value)})*"]
        written = []
        self._steps.spend(len(properties))
        for name, schema in properties.items():
            if not _NAME.fullmatch(name):
                raise NotWritable(f"has a parameter {name!r}, a name that this model's calls cannot have")
            # Where the schema cannot be enforced, a tool that is not strict takes any value. An inexact
            # number is refused even then (``InexactNumber``).
            try:
                value = self._value(tool, name, schema, reader)
            except NotWritable as error:
                if tool.is_strict or isinstance(error, InexactNumber):
                    raise NotWritable(f"has a parameter {name!r} that {error}") from error
                value = self._value(tool, name, {}, reader)
            rule = self._lark.rule(self._argument(literal(name), value))
            written.append(rule if name in required else f"{rule}?")
        return written

    @abstractmethod
    def _value(self, tool: CallableTool, name: str, schema: object, reader: SchemaReader) -> str:
        """Return a value of the parameter ``name``, with the mark that ends it. Raises NotWritable."""

    @abstractmethod
    def _argument(self, key: str, value: str) -> str:
        """Return an argument of a key and a value, which includes the mark that ends it."""

    def _texts(self, texts: Sequence[str], strings: Sequence[str]) -> str:
        """Return ``bare_texts`` and spend steps on its length: a schema is written again for each parameter
        that refers to it."""
        written = bare_texts(texts, strings)
        self._steps.spend(len(written) // _CHARS_A_STEP)
        return written

    def _json(self, tool: CallableTool, schema: Mapping[str, object], reader: SchemaReader) -> str:
        return json_value(self._lark, reader.document(schema), self._steps, is_lenient=not tool.is_strict)


_COMBINING = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    "unevaluatedProperties",
)
"""Keywords about all arguments together that a markup with separate arguments cannot enforce."""


class _Members(NamedTuple):
    """The parameters of a tool."""

    properties: Mapping[str, object]
    """Schemas of the named parameters."""
    required: Mapping[str, None]
    """Names of the required ones, in order."""
    others: object
    """Schema of all other parameters; False if there may be none."""


def _members(tool: CallableTool, reader: SchemaReader) -> _Members:
    """Read the parameters that a tool's calls may have. Raises NotWritable."""
    root = reader.target_of(tool.parameters)
    if not isinstance(root, dict):
        raise NotWritable("has parameters that are no object")
    known = {"type", "properties", "required", "additionalProperties"}
    if tool.is_strict and (more := [word for word in _COMBINING if word in root.keys() - known]):
        raise NotWritable(f"has parameters with {more[0]!r}, which cannot be enforced in this model's calls")
    properties, required = root.get("properties") or {}, root.get("required") or []
    others = root.get("additionalProperties", True)
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise NotWritable("has parameters without a schema")
    needed = {str(name): None for name in required}
    undeclared = {name: others for name in needed if name not in properties}
    return _Members({**properties, **undeclared}, needed, others)


class _Glm(_WithArguments):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``, with line breaks."""

    def _call(self, tool: CallableTool) -> str:
        end = self._lark.mark(self._markup.call_end)
        return sequence(literal(tool.name), f"{NEWLINE}?", *self._arguments(tool), end)

    def _argument(self, key: str, value: str) -> str:
        markup, mark = self._markup, self._lark.mark
        keyed = sequence(mark(markup.key), key, mark(markup.end_of_key), f"{NEWLINE}?", mark(markup.value))
        return sequence(keyed, value, f"{NEWLINE}?")

    def _value(self, tool: CallableTool, name: str, schema: object, reader: SchemaReader) -> str:
        """Return the value, bare or as JSON, such that ``ToolSchemas.to_json`` tells them apart."""
        forms = reader.forms(schema)
        end = self._lark.mark(self._markup.end_of_value)
        if forms.is_anything:
            return self._bare(ANY)
        if forms.whole is not None:
            # A reader that took quoted strings for bare ones would keep their quotes.
            if self._schemas.to_json(tool.name, name, '"x"') != '"x"':
                raise NotWritable(
                    "mixes strings with values that this model's calls cannot tell from strings"
                )
            return sequence(self._json(tool, forms.whole, reader), end)
        texts = [text for text in forms.texts if self._is_read_back(tool.name, name, text)]
        strings = reader.regexes(forms)
        if strings:
            # Beside strings, only null, objects and arrays are read as JSON: ``null`` is written like a bare
            # text, and no string may begin like an object or an array if there are any.
            if forms.takes_null:
                texts.append("null")
            forms = forms.structures()
            if forms.schemas:
                strings = [f"({string}) & ~(/[ \\t\\r\\n]*[\\[{{]/ {ANY})" for string in strings]
        bare = self._texts(texts, strings)
        written = [self._bare(bare)] if bare else []
        if (rest := forms.schema) is not None:
            written.append(sequence(self._json(tool, rest, reader), end))
        if not written:
            raise NotWritable("has no value that this model's calls can contain")
        return f"({' | '.join(written)})"

    def _bare(self, text: str) -> str:
        """Return a bare value up to the mark that ends it, without the mark that would end the call."""
        return self._lark.until(self._markup.end_of_value, text, (self._markup.call_end,))

    def _is_read_back(self, tool: str, name: str, text: str) -> bool:
        """Whether ``text``, written bare, is read as this very string."""
        if self._markup.call_end in text or self._markup.end_of_value in text:
            return False
        return bool(msgspec.json.decode(self._schemas.to_json(tool, name, text)) == text)


class _Dsml(_WithArguments):
    """DeepSeek-V3.2's markup, in which each argument says whether it is a bare string:
    ``<invoke name="name"><parameter name="key" string="true">value</parameter></invoke>``, with line breaks
    and the prefix ``DSML`` in each tag."""

    gap = f"({NEWLINE} {NEWLINE})?"

    def _calls(self, call: str, at_most_one: bool) -> str:
        many = "" if at_most_one else "+"
        return f"{NEWLINE} ({call} {NEWLINE}){many} {self._lark.mark(self._markup.closing)}"

    def _call(self, tool: CallableTool) -> str:
        markup, mark = self._markup, self._lark.mark
        name = sequence(mark(markup.call), literal(f"{tool.name}{markup.end_of_name}\n"))
        return sequence(name, *(self._arguments(tool) or [f"{NEWLINE}?"]), mark(markup.call_end))

    def _argument(self, key: str, value: str) -> str:
        return sequence(self._lark.mark(self._markup.key), key, literal(STRING_ATTRIBUTE), value, NEWLINE)

    def _value(self, tool: CallableTool, name: str, schema: object, reader: SchemaReader) -> str:
        end = self._markup.end_of_value
        forms = reader.forms(schema)
        written = []
        if bare := self._texts([text for text in forms.texts if end not in text], reader.regexes(forms)):
            written.append(sequence(literal('true">'), self._lark.until(end, bare)))
        if (rest := forms.schema) is not None:
            written.append(sequence(literal('false">'), self._json(tool, rest, reader), self._lark.mark(end)))
        if not written:
            raise NotWritable("has no value")
        return f"({' | '.join(written)})"


class _DeepSeekV31(CallWriter):
    """DeepSeek-V3.1's markup: ``<begin>name<sep>{...}<end>``, with the marks of ``chat_format.V31``."""

    def _calls(self, call: str, at_most_one: bool) -> str:
        return sequence(call if at_most_one else f"{call}+", self._lark.mark(self._markup.closing))

    def _call(self, tool: CallableTool) -> str:
        markup, mark = self._markup, self._lark.mark
        name = sequence(mark(markup.call), literal(tool.name), mark(markup.end_of_name))
        return sequence(name, self._json_arguments(tool), mark(markup.call_end))


class _Hermes(CallWriter):
    """``<tool_call>{"name": "...", "arguments": {...}}</tool_call>``, with line breaks."""

    def _call(self, tool: CallableTool) -> str:
        name = literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
        end = self._lark.mark(self._markup.call_end)
        return sequence(f"{NEWLINE}?", name, self._json_arguments(tool), literal("}"), f"{NEWLINE}?", end)


class _Mistral(CallWriter):
    """``[TOOL_CALLS]name[ARGS]{...}``, followed by the next call or the answer's end."""

    def _calls(self, call: str, at_most_one: bool) -> str:
        return call if at_most_one else f"{call} ({self._lark.mark(self.opening)} {call})*"

    def _call(self, tool: CallableTool) -> str:
        if "[" in tool.name:
            raise NotWritable("has a name that this model's calls cannot have")
        return sequence(
            literal(tool.name), self._lark.mark(self._markup.end_of_name), self._json_arguments(tool)
        )


CALL_WRITERS: Final[Mapping[ToolMarkup, type[CallWriter]]] = {
    ToolMarkup.GLM: _Glm,
    ToolMarkup.DSML: _Dsml,
    ToolMarkup.DEEPSEEK_V31: _DeepSeekV31,
    ToolMarkup.HERMES: _Hermes,
    ToolMarkup.MISTRAL: _Mistral,
}


def callable_tools(tools: Sequence[Mapping[str, object]], names: Sequence[str]) -> Iterator[CallableTool]:
    """Yield those of ``tools``, as chats describe them, whose names are among ``names``; of several tools of
    one name the last one, as in ``ToolSchemas``. Raises ApiError for a schema that is too large."""
    found: dict[str, CallableTool] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or (name := str(function["name"])) not in names:
            continue
        parameters = function.get("parameters")
        place = f"tools[{index}]"
        schema_text(place, parameters)  # raises if the schema is too large
        no_parameters = {"type": "object", "additionalProperties": False}
        found[name] = CallableTool(
            place,
            name,
            parameters=parameters if isinstance(parameters, dict) else no_parameters,
            is_strict=function.get("strict") is True,
        )
    yield from found.values()
