"""The tools of ``/v1/responses`` as the functions by which the model knows them.

A function of a namespace is called ``namespace.function``, and a custom tool, which takes a text, has one
argument, ``input``. ``called_tool`` and ``custom_input`` lead back to what the client knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pydantic_core
from msgspec import Raw

from hisparse_pd.api.body_parts import MAX_TOOLS, CustomTool, ItemKind, NamespaceTool, ResponsesTool
from hisparse_pd.api.declared import decode
from hisparse_pd.api.prompts import CalledTool, HostedTool, tool_items, without_hosted
from hisparse_pd.api.raw_json import decode_item
from hisparse_pd.http.http_errors import ApiError, InvalidField

_INPUT = "input"


class ResponseTools:
    """Of one request."""

    def __init__(self) -> None:
        self.described: list[dict[str, Any]] = []
        """As the client wrote them, without those that are left out."""
        self.functions: list[dict[str, object]] = []
        """For the template."""
        self.called: dict[str, CalledTool] = {}
        """What the client calls the functions, by their names."""
        self.left_out: tuple[HostedTool, ...] = ()

    def add(self, field: str, value: Raw | None) -> None:
        """Raises ApiError 400."""
        items, left_out = without_hosted(tool_items(field, value))
        self.left_out += left_out
        for name, item in items:
            kind = decode(ItemKind, item, name).type
            if kind == "namespace":
                self._add_namespace(name, decode(NamespaceTool, item, name))
            else:
                self._add(name, item, kind)
            self.described.append(decode_item(name, item))

    def _add_namespace(self, name: str, space: NamespaceTool) -> None:
        about = f"{space.name}: {space.description}" if space.description else ""
        for inner, item in tool_items(f"{name}.tools", space.tools):
            self._add(inner, item, decode(ItemKind, item, inner).type, space.name, about)
            about = ""  # the first function's description has said it

    def _add(
        self, name: str, item: Raw, kind: str | None, namespace: str | None = None, about: str = ""
    ) -> None:
        match kind:
            case "function":
                decode(ResponsesTool, item, name)
                function = decode_item(name, item)
                del function["type"]
            case "custom":
                function = _function(decode(CustomTool, item, name))
            case _:
                known = '"function" or "custom"' if namespace else '"function", "custom" or "namespace"'
                raise InvalidField(f"{name}.type", kind, f"must be {known}; other tools are not supported")
        called = CalledTool(function["name"], namespace, kind == "custom")
        shown = shown_name(called.name, namespace)
        if about:
            function["description"] = "\n\n".join(filter(None, (about, function.get("description"))))
        if len(self.functions) == MAX_TOOLS:
            message = f"{name}: a request may have {MAX_TOOLS} tools, those of namespaces counted"
            raise ApiError(400, message, param=name)
        self.functions.append({"type": "function", "function": function | {"name": shown}})
        self.called[shown] = called


def shown_name(name: str, namespace: str | None) -> str:
    """What the model knows a tool by."""
    return f"{namespace}.{name}" if namespace else name


def find_tool(called: Mapping[str, CalledTool], name: str, namespace: str | None = None) -> str | None:
    """What the model knows the tool ``name`` by, also in short where no other is called so; None: no tool."""
    if (shown := shown_name(name, namespace)) in called:
        return shown
    found = [shown for shown, tool in called.items() if tool.name == name and namespace is None]
    return found[0] if len(found) == 1 else None


def called_tool(called: Mapping[str, CalledTool], name: str) -> CalledTool:
    """What the client calls the tool that the model called."""
    shown = find_tool(called, name)
    return CalledTool(name) if shown is None else called[shown]


def custom_arguments(text: str) -> dict[str, object]:
    """Those of an earlier call with ``text``."""
    return {_INPUT: text}


def custom_input(arguments: str) -> str:
    """The text of a call, also of one that was cut off; what else the model wrote is the text itself."""
    with suppress(ValueError):
        found = pydantic_core.from_json(arguments or "{}", allow_partial="trailing-strings")
        if isinstance(found, dict) and isinstance(text := found.get(_INPUT, ""), str):
            return text
    return arguments


def _function(tool: CustomTool) -> dict[str, Any]:
    """A format is told, and not enforced."""
    rule: dict[str, str] = {"type": "string"}
    if tool.format is not None and tool.format.definition:
        rule["description"] = f"Follows this {tool.format.syntax or 'grammar'}:\n{tool.format.definition}"
    parameters = {
        "type": "object",
        "properties": {_INPUT: rule},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": parameters}
