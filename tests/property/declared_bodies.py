"""Bodies made from what the OpenAPI document says of them: values at and beyond each bound, of each type.

A body is a valid one with some of its declared fields set anew. Most values are as their schema says, so that
a body gets past the first checks; some break a bound, and a few are hostile, at any depth.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from hisparse_pd.serving.api.openapi import openapi_document

_DOCUMENT = json.loads(openapi_document())
_SCHEMAS: dict[str, dict[str, Any]] = _DOCUMENT["components"]["schemas"]

_TEXTS = ("a", "é", "😀", "\x00", '"', "\\", "\n", "{}", "<think>", "</think>", "none", "auto", " ", "x" * 40)
_MOST_CHARS = 2100
_MOST_ITEMS = 260
_MOST_DEPTH = 8


def schema_of(path: str) -> dict[str, Any]:
    """Return the schema of the body that ``path`` takes."""
    content = _DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    return _resolved(content["application/json"]["schema"])


def make_declared(
    rng: random.Random, path: str, valid: Sequence[dict[str, Any]], hostile: Sequence[bytes]
) -> bytes:
    """One of the ``valid`` bodies of ``path`` with some fields set anew."""
    properties: dict[str, Any] = schema_of(path)["properties"]
    fields = [(name, json.dumps(value).encode()) for name, value in rng.choice(valid).items()]
    maker = _Maker(rng, hostile)
    anew = rng.sample(list(properties), min(rng.randint(1, 5), len(properties)))
    if rng.randint(0, 9):
        anew = [name for name in anew if not properties[name].get("deprecated")]
    for name in anew:
        if rng.randint(0, 19):  # else it comes twice
            fields = [(given, value) for given, value in fields if given != name]
        fields.append((name, maker.value(properties[name], _MOST_DEPTH)))
    return _object(fields)


class _Maker:
    def __init__(self, rng: random.Random, hostile: Sequence[bytes]) -> None:
        self._rng = rng
        self._hostile = hostile

    def value(self, schema: dict[str, Any], depth: int) -> bytes:
        """JSON."""
        rng = self._rng
        schema = _resolved(schema)
        if depth == 0 or rng.randint(0, 59) == 0:
            return rng.choice(self._hostile)
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return json.dumps(rng.choice(schema["enum"])).encode()
        match schema.get("type"):
            case "boolean":
                return rng.choice((b"true", b"false"))
            case "integer":
                return b"%d" % self._number(schema, step=1)
            case "number":
                return json.dumps(self._number(schema, step=0.5)).encode()
            case "string":
                return self._text(schema)
            case "array":
                return self._list(schema, depth)
            case "object":
                return self._object(schema, depth)
            case "null":
                return b"null"
        return rng.choice((b"{}", b"1", b'"a"', b'{"type": "object"}', b"[]", b"null"))

    def _number(self, schema: dict[str, Any], step: float) -> Any:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
        high = schema.get("maximum", 10)
        inside = [bound for bound in (0, 1, 2, low, high) if low <= bound <= high]
        if self._rng.randint(0, 9) == 0:
            return self._rng.choice((low - step, high + step, low - 10**6, high + 2**70))
        return self._rng.choice(inside)

    def _text(self, schema: dict[str, Any]) -> bytes:
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", 20)
        num_chars = self._rng.randint(shortest, min(longest, 12))
        if self._rng.randint(0, 9) == 0:
            num_chars = self._rng.choice((shortest, max(shortest - 1, 0), longest, longest + 1))
        text = ""
        while len(text) < min(num_chars, _MOST_CHARS):
            text += self._rng.choice(_TEXTS)
        return json.dumps(text[:num_chars], ensure_ascii=bool(self._rng.randint(0, 1))).encode()

    def _list(self, schema: dict[str, Any], depth: int) -> bytes:
        num_items = self._rng.randint(schema.get("minItems", 0), 3)
        if self._rng.randint(0, 29) == 0:
            num_items = min(schema.get("maxItems", 3) + 1, _MOST_ITEMS)
            return b"[" + b",".join([self.value(schema["items"], 2)] * num_items) + b"]"
        return b"[" + b",".join(self.value(schema["items"], depth - 1) for _ in range(num_items)) + b"]"

    def _object(self, schema: dict[str, Any], depth: int) -> bytes:
        rng = self._rng
        required = schema.get("required", ())
        fields = [
            (name, self.value(inner, depth - 1))
            for name, inner in schema.get("properties", {}).items()
            if rng.randint(0, 39) != 0 and (name in required or rng.randint(0, 2) == 0)
        ]
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            keys = rng.sample(("0", "5", "007", "-1", "x", "", "4000000000"), rng.randint(0, 2))
            fields += [(key, self.value(others, depth - 1)) for key in keys]
        return _object(fields)


def _object(fields: Sequence[tuple[str, bytes]]) -> bytes:
    return b"{" + b", ".join(json.dumps(name).encode() + b": " + value for name, value in fields) + b"}"


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return schema if reference is None else _SCHEMAS[reference.rpartition("/")[2]]
