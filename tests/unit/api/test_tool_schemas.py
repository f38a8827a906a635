"""The tool's schema decides whether a bare argument is a string or JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hisparse_pd.serving.api.tool_schemas import ToolSchemas

STRING, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}


def read(schema: object, text: str, **root: Any) -> object:
    """Read the argument ``a`` of a tool whose parameter has this schema."""
    parameters = {"type": "object", "properties": {"a": schema}, **root}
    tools = ToolSchemas([{"function": {"name": "f", "parameters": parameters}}])
    return json.loads(tools.to_json("f", "a", text))


@pytest.mark.parametrize(
    "schema",
    [
        STRING,
        {"type": ["string", "null"]},
        {"type": ["null", "string"]},
        {"anyOf": [STRING, NULL]},
        {"oneOf": [NULL, {"type": "string", "enum": ["42", "true"]}], "default": None},
        {"anyOf": [{"anyOf": [NULL, STRING]}, INTEGER]},
        {"allOf": [{"description": "an id"}, {"type": ["string", "null"]}]},
        {"$ref": "#/$defs/Id"},
        {"anyOf": [{"$ref": "#/$defs/Id"}, NULL]},
        {"enum": ["42", "true", None]},
        {"type": "string", "nullable": True},
        {"type": ["string", "integer", "boolean"]},
        {"type": "string", "format": "uuid", "description": "x"},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["42", "true"])
def test_a_string_stays_one_where_the_schema_allows_it(schema: object, text: str) -> None:
    assert read(schema, text, **{"$defs": {"Id": STRING}}) == text


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (INTEGER, "42", 42),
        (INTEGER, "4 2", "4 2"),
        ({"type": ["integer", "null"]}, "42", 42),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "boolean"}, NULL]}, "true", True),
        ({"anyOf": [{"type": "number"}, {"type": "integer"}]}, "1.50", 1.5),
        ({"type": "array", "items": STRING}, '["a"]', ["a"]),
        ({"items": STRING}, '["a"]', ["a"]),
        ({"properties": {"b": STRING}}, '{"b": "1"}', {"b": "1"}),
        ({"const": 7}, "7", 7),
        ({"const": "7"}, "7", "7"),
        ({"enum": [1, 2, None]}, "1", 1),
        ({"enum": ["1", 1]}, "1", "1"),
        ({"enum": ["auto", 1]}, "1", 1),
        ({"enum": ["auto", 1]}, "auto", "auto"),
        ({"enum": ["auto", 1], "type": ["string", "integer"]}, "1", 1),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "42", 42),
        (False, "42", 42),
        # Ties between a string and what JSON makes of it.
        (STRING, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"enum": ["null", None]}, "null", None),
        (STRING, '{"b": 1}', '{"b": 1}'),
        (STRING, '["a"]', '["a"]'),
        ({"anyOf": [STRING, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [STRING, {"type": "array"}]}, '["a', '["a'),
        ({"anyOf": [STRING, {"type": "array"}]}, '{"b": 1}', '{"b": 1}'),
        ({"type": ["string", "object"]}, '{"b": 1}', {"b": 1}),
        ({"anyOf": [STRING, {"type": "object"}, NULL]}, '"quoted"', '"quoted"'),
    ],
    ids=str,
)
def test_where_it_allows_no_string_it_is_json(schema: object, text: str, expected: object) -> None:
    assert read(schema, text) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        None,
        [],
        "string",
        {"type": "uuid"},
        {"type": 7},
        {"type": []},
        {"$ref": "#/$defs/Nowhere"},
        {"$ref": "https://example.com/schema"},
        {"$ref": 7},
        {"$ref": "#/properties/a"},
        {"anyOf": [{"$ref": "#/properties/a"}]},
        {"anyOf": 7, "enum": "x"},
        {"anyOf": []},
    ],
    ids=str,
)
def test_what_says_nothing_leaves_json_json(schema: object) -> None:
    assert read(schema, "42") == 42
    assert read(schema, '{"b": [true, null]}') == {"b": [True, None]}
    assert read(schema, "forty two") == "forty two"


def test_parameters_are_found_where_schemas_put_them() -> None:
    def id_of(**parameters: Any) -> object:
        tools = ToolSchemas([{"function": {"name": "f", "parameters": parameters}}])
        return json.loads(tools.to_json("f", "a", "42"))

    properties = {"properties": {"a": STRING}}
    assert id_of(**properties) == "42"
    assert id_of(additionalProperties=STRING) == "42"
    assert id_of(additionalProperties=False) == 42
    assert id_of(allOf=[{"properties": {"b": STRING}}, properties]) == "42"
    assert id_of(**{"$ref": "#/$defs/P", "$defs": {"P": properties}}) == "42"
    assert id_of(properties={"b": STRING}) == 42
    assert id_of(properties=7) == 42


def test_a_tool_that_nobody_described_gets_json() -> None:
    for tools in ([], [{"function": {"name": "f"}}], [{"function": {"name": "f", "parameters": None}}]):
        assert ToolSchemas(tools).to_json("f", "a", " 1.50 ") == "1.50"


@pytest.mark.I8
def test_schemas_that_multiply_or_go_deep_end() -> None:
    """They end after a few thousand steps; without a bound they would take 2**60."""
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    assert read({"$ref": "#/$defs/d0"}, "42", **{"$defs": definitions}) == 42
    deep: dict[str, Any] = STRING
    for _ in range(500):
        deep = {"anyOf": [deep]}
    assert read(deep, "42") == 42
    assert read({"enum": [f"x{i}" for i in range(100_000)]}, "42") == 42
    assert read({"enum": [str(i) for i in range(100_000)]}, "42") == "42"


@pytest.mark.I8
def test_a_schema_that_is_reached_in_many_ways_is_looked_at_once() -> None:
    """The schema at the end of 2**20 ways is found."""
    definitions: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)}
    definitions["d20"] = STRING
    assert read({"$ref": "#/$defs/d0"}, "42", **{"$defs": definitions}) == "42"
