"""``/openapi.json``, the document of the declared bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from hisparse_pd.serving.api.bodies import BODIES, Endpoint, TokenPath
from hisparse_pd.serving.api.openapi import openapi_document
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import serving

pytestmark = pytest.mark.anyio

DOCUMENT = json.loads(openapi_document())
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value: object) -> Iterator[str]:
    match value:
        case dict():
            if isinstance(reference := value.get("$ref"), str):
                yield reference
            for inner in value.values():
                yield from references(inner)
        case list():
            for inner in value:
                yield from references(inner)


def test_the_document_is_whole() -> None:
    """It has every path that takes a body; each reference leads somewhere, and schemas are valid."""
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert set(DOCUMENT["paths"]) == {*Endpoint, *TokenPath} == set(BODIES)
    known = {f"#/components/schemas/{name}" for name in SCHEMAS}
    assert set(references(DOCUMENT)) <= known
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    operations = [path["post"] for path in DOCUMENT["paths"].values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_what_is_not_supported_is_marked() -> None:
    properties = SCHEMAS["ChatBody"]["properties"]
    assert properties["modalities"]["deprecated"]
    assert properties["modalities"]["enum"] == [None, ["text"]]
    assert "deprecated" not in properties["temperature"]
    assert properties["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}


async def test_a_node_serves_it(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        answer = await node.client.get("/openapi.json")
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == DOCUMENT
