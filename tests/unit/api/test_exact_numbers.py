"""Numbers of schemas that doubles do not have: literals are enforced as spelled, and bounds refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.serving.api.constraints import AnswerFormat, Constraint, FormatKind
from hisparse_pd.serving.api.grammars import write_grammar
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.http.http_errors import FieldRefused
from tests.structured_checks import TOOLS_TEMPLATE
from tests.unit.api import support
from tests.unit.api.grammar_walks import admits, error_of
from tests.unit.api.markups import chat_format
from tests.unit.api.scripted_engine import stops_after
from tests.unit.api.support import MESSAGES, ROOM, serving
from tests.unit.api.tiny_tokenizer import make_tokenizer


def grammar_of(schema: str) -> str:
    constraint = Constraint(AnswerFormat("response_format", FormatKind.JSON, schema))
    return write_grammar(constraint, chat_format(None))


BIG = "9007199254740993"
ID = '{"type":"object","properties":{"id":{"const":%s}%s},"required":["id"]%s}'

LITERALS: list[tuple[str, list[str], list[str]]] = [
    ('{"const":9007199254740993}', [BIG], ["9007199254740992", "9007199254740994"]),
    ('{"enum":[18446744073709551615,null]}', ["18446744073709551615", "null"], ["9223372036854775807"]),
    ('{"const":1.0}', ["1.0", "1"], ["1.00", "1e0"]),
    ('{"const":1E+2}', ["1E+2", "100"], ["1e2", "100.0"]),
    ('{"const":1e400}', ["1e400"], ["1e401"]),
    ('{"const":0.1234567890123456789}', ["0.1234567890123456789"], ["0.12345678901234568"]),
    ('{"type":"integer","enum":[2.5,3.0,9007199254740993]}', ["3.0", "3", BIG], ["2.5"]),
    ('{"const":[9007199254740993,{"a":[1.50]}]}', [f'[{BIG}, {{"a":[1.50]}}]'], [f'[{BIG},{{"a":[]}}]']),
    (
        ID % (BIG, ',"b":{"type":"integer"}', ',"additionalProperties":false'),
        [f'{{"id":{BIG}}}', f'{{ "id" : {BIG} , "b": 5 }}'],
        ["{}", '{"b":5}', f'{{"id":{BIG},}}', f'{{"id":{BIG},"c":1}}', f'{{"b":5,"id":{BIG}}}'],
    ),
    (
        ID % (BIG, "", ',"additionalProperties":{"type":"integer"}'),
        [f'{{"id":{BIG},"x":1,"y":2}}'],
        [f'{{"id":{BIG},"id":1}}', f'{{"id":{BIG},"\\u0069d":1}}', f'{{"id":{BIG},"x":"y"}}'],
    ),
    (
        '{"type":"object","properties":{"a":{"const":1.0},"b":{"const":2.0}},"additionalProperties":false}',
        ["{}", '{"a":1.0}', '{"b":2.0}', '{"a":1.0,"b":2.0}'],
        ['{"b":2.0,"a":1.0}', "{,}", '{"a":2.0}'],
    ),
    (
        '{"type":"array","items":{"enum":[9007199254740993,1]},"minItems":1,"maxItems":2}',
        [f"[{BIG}]", f"[1, {BIG}]"],
        ["[]", "[2]", "[1,1,1]"],
    ),
    (
        '{"type":"array","prefixItems":[{"const":1.0},{"type":"null"}],"items":{"const":2.0},"minItems":1}',
        ["[1.0]", "[1.0,null]", "[1.0,null,2.0,2.0]"],
        ["[]", "[null]", "[1.0,2.0]"],
    ),
    (
        '{"$ref":"#/$defs/N","$defs":{"N":{"type":["object","null"],"properties":{"v":{"const":1.0},'
        '"next":{"$ref":"#/$defs/N"}},"required":["v"],"additionalProperties":false}}}',
        ["null", '{"v":1.0}', '{"v":1.0,"next":{"v":1.0,"next":null}}'],
        ['{"v":2}', '{"v":1.0,"next":{}}'],
    ),
    (
        '{"oneOf":[{"type":"null"},{"enum":[9007199254740993]},{"const":9007199254740992}]}',
        ["null", BIG, "9007199254740992"],
        ["9007199254740994"],
    ),
    (
        f'{{"oneOf":[{ID % (BIG, "", "")},{ID % ("9007199254740992", "", "")}]}}',
        [f'{{"id":{BIG}}}', '{"id":9007199254740992}'],
        ['{"id":1}'],
    ),
    ('{"properties":{"enum":{"const":1.0},"minimum":{"const":2}}}', ["3", '{"enum":1.0}'], ['{"enum":2}']),
]


@pytest.mark.parametrize(("schema", "taken", "others"), LITERALS)
def test_literals_are_enforced_as_they_are_spelled(schema: str, taken: list[str], others: list[str]) -> None:
    grammar = grammar_of(schema)
    assert [text for text in taken if not admits(grammar, text)] == []
    assert [text for text in others if admits(grammar, text)] == []


EXACT = [
    *('{"type":"integer","maximum":9007199254740992}', '{"type":"integer","maximum":1152921504606846976}'),
    *('{"type":"integer","minimum":-9007199254740992}', '{"type":"number","maximum":1e18}'),
    *('{"type":"number","minimum":0.1}', '{"type":"number","exclusiveMaximum":9007199254740991}'),
    *('{"type":"number","multipleOf":0.01}', '{"type":"integer","multipleOf":1e3}'),
    *('{"type":"array","maxItems":2.0}', '{"type":"string","maxLength":4294967295}'),
    '{"type":"object","properties":{"maximum":{"default":9007199254740993}}}',
]
INEXACT: list[tuple[str, str]] = [
    ('{"type":"integer","maximum":9007199254740993}', "maximum 9007199254740993 at #,"),
    ('{"type":"integer","minimum":-9007199254740993}', "minimum -9007199254740993 at #,"),
    ('{"type":"integer","maximum":60093812226144500}', "maximum 60093812226144500 at #,"),
    ('{"type":"integer","minimum":6.00938122261445e16}', "minimum 6.00938122261445e16 at #,"),
    ('{"type":["integer","null"],"minimum":60093812226144500}', "minimum 60093812226144500 at #,"),
    ('{"type":"integer","maximum":9223372036854775807}', "maximum 9223372036854775807 at #,"),
    ('{"type":"integer","maximum":18446744073709551616}', "maximum 18446744073709551616 at #,"),
    ('{"type":"number","maximum":1152921504606846976}', "maximum 1152921504606846976 at #,"),
    ('{"type":"integer","exclusiveMinimum":9007199254740992}', "exclusiveMinimum 9007199254740992 at #,"),
    ('{"type":"number","minimum":0.1234567890123456789}', "minimum 0.1234567890123456789 at #,"),
    ('{"type":"number","minimum":1e-30}', "minimum 1e-30 at #,"),
    ('{"type":"number","maximum":1e400}', "maximum 1e400 at #,"),
    ('{"type":"number","multipleOf":6e-11}', "multipleOf 6e-11 at #,"),
    ('{"type":"integer","multipleOf":9007199254740993}', "multipleOf 9007199254740993 at #,"),
    ('{"type":"number","multipleOf":0}', "multipleOf 0 at #,"),
    ('{"type":"number","exclusiveMinimum":0,"maximum":0.5}', "bounds at # of which one excludes an integer"),
    (
        '{"type":"number","exclusiveMaximum":-5,"minimum":-5.5}',
        "bounds at # of which one excludes an integer",
    ),
    ('{"type":"string","maxLength":4294967296}', "maxLength 4294967296 at #; .* from 0 to 4294967295"),
    ('{"type":"array","minItems":1e30}', "minItems 1e30 at #; it must be an integer"),
    ('{"type":"array","maxItems":1.5}', "maxItems 1.5 at #; it must be an integer"),
    ('{"anyOf":[{},{"items":{"maximum":1e400}}]}', "maximum 1e400 at #/anyOf/1/items,"),
    ('{"$ref":"#/$defs/a","$defs":{"a":{"maximum":1e400}}}', "maximum 1e400 at #/\\$defs/a,"),
    ('{"$ref":"#b","$defs":{"a":{"$anchor":"b","maximum":1e400}}}', "maximum 1e400 at #/\\$defs/a,"),
    ('{"$ref":"#b","$defs":{"a":{"$anchor":"b","const":9007199254740993}}}', "the reference '#b' beside"),
    ('{"not":{},"const":9007199254740993}', "'not' at # beside or around a const or an enum"),
    (
        '{"patternProperties":{"a":{"const":9007199254740993}}}',
        "'patternProperties' at # beside or around a const or an enum",
    ),
    (
        '{"oneOf":[{"const":9007199254740993},{"enum":[9007199254740993.0]}]}',
        "oneOf at #, of which two may hold at once",
    ),
]


@pytest.mark.parametrize("schema", EXACT)
def test_bounds_that_doubles_have_are_enforced(schema: str) -> None:
    assert error_of(grammar_of(schema)) == ""


@pytest.mark.parametrize(("schema", "said"), INEXACT)
def test_bounds_that_would_be_shifted_are_refused(schema: str, said: str) -> None:
    with pytest.raises(FieldRefused, match=f"response_format: has {said}"):
        grammar_of(schema)


def test_a_literal_that_doubles_have_is_llguidances_where_no_rule_can_be_written() -> None:
    grammar = grammar_of('{"patternProperties":{"^a$":{"const":1.0}},"additionalProperties":false}')
    assert admits(grammar, '{"a":1}')
    assert not admits(grammar, '{"a":2}')


def test_hostile_schemas_are_bounded() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"const": 2**60 + 1}}
    deep = json.dumps({"$ref": "#/$defs/d0", "$defs": chain})
    with pytest.raises(FieldRefused, match="more than 100 schemas within each other"):
        grammar_of(deep)
    loop = '{"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"const":1.0}]}}}'
    assert admits(grammar_of(loop), "1.0")
    unknown = json.dumps({"anyOf": [{"$ref": "x"}] * 8000, "$defs": {str(i): {} for i in range(8000)}})
    with pytest.raises(FieldRefused, match="steps to read"):
        grammar_of(unknown)


# --- on all APIs -----------------------------------------------------------------------------------------

FUNCTION = '{"name":"f","strict":%s,"parameters":%s}'
CLOSED = '{"type":"object","properties":{"a":%s},"required":["a"],"additionalProperties":false}'
FORMAT = '{"type":"json_schema","schema":%s}'
CHAT = f'"messages":{json.dumps(MESSAGES)}'
ASKING: list[tuple[str, str]] = [
    (
        "/v1/chat/completions",
        CHAT + ',"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":%s}}',
    ),
    ("/v1/chat/completions", CHAT + ',"structured_outputs":{"json":%s}'),
    ("/v1/completions", '"prompt":"x","json_schema":%s'),
    ("/v1/completions", '"prompt":"x","structured_outputs":{"json":%s}'),
    ("/generate", '"text":"x","sampling_params":{"json_schema":%s}'),
    ("/v1/responses", f'"input":"x","text":{{"format":{FORMAT[:-1]},"name":"x"}}}}'),
    ("/v1/messages", f'{CHAT},"max_tokens":9,"output_format":{FORMAT}'),
    ("/v1/messages", f'{CHAT},"max_tokens":9,"output_config":{{"format":{FORMAT}}}'),
    *(
        (
            path,
            f'{asked},"tool_choice":{choice},"tools":[{tool % ((strict, CLOSED) if has_strict else CLOSED)}]',
        )
        for strict in ("true", "false")
        for path, asked, choice, tool, has_strict in (
            (
                "/v1/chat/completions",
                CHAT,
                '"required"',
                f'{{"type":"function","function":{FUNCTION}}}',
                True,
            ),
            ("/v1/responses", '"input":"x"', '"required"', '{"type":"function",' + FUNCTION[1:], True),
            (
                "/v1/messages",
                f'{CHAT},"max_tokens":9',
                '{"type":"any"}',
                '{"name":"f","input_schema":%s}',
                False,
            ),
        )
    ),
]


@pytest.fixture
def glm(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    codec = TextCodec(tokenizer, len(tokenizer), "glm_moe_dsa", support.Unchecked())
    monkeypatch.setattr(support, "CODEC", codec)


@pytest.mark.anyio
@pytest.mark.usefixtures("glm")
async def test_all_apis_keep_numbers_as_they_are_spelled(tmp_path: Path) -> None:
    async with serving(stops_after("x"), tmp_path) as node:

        async def post(path: str, asked: str, schema: str) -> Any:
            body = "{" + asked % schema + "," + json.dumps(ROOM)[1:]
            return await node.client.post(path, content=body.encode())

        for path, asked in ASKING:
            for literal in (BIG, "1e400", "0.1234567890123456789", "7.50"):
                node.engine.received.clear()
                answer = await post(path, asked, f'{{"enum":[{literal}]}}')
                assert answer.status_code == 200, (asked, answer.text)
                (generate,) = node.engine.generates
                assert f'"{literal}"' in generate.sampling.grammar, asked
            refused = await post(path, asked, '{"type":"integer","maximum":9007199254740993}')
            assert refused.status_code == 400, asked
            assert "maximum 9007199254740993" in refused.json()["error"]["message"]
            if '"json_schema":%s' in asked or '"json":%s' in asked:  # the schema's text instead
                node.engine.received.clear()
                answer = await post(path, asked, json.dumps(f'{{"const":{BIG}}}'))
                assert answer.status_code == 200, answer.text
                assert f'"{BIG}"' in node.engine.generates[0].sampling.grammar


@pytest.mark.anyio
@pytest.mark.usefixtures("glm")
async def test_responses_repeat_numbers_as_they_are_spelled(tmp_path: Path) -> None:
    async with serving(stops_after("x"), tmp_path) as node:
        schema = f'{{"enum":[1e400,{BIG},7.50]}}'
        tool = '{"type":"function","name":"f","parameters":' + CLOSED % schema + "}"
        text = f'{{"format":{{"type":"json_schema","name":"x","schema":{schema}}}}}'
        body = f'{{"input":"x","text":{text},"tools":[{tool}],{json.dumps(ROOM)[1:]}'
        answer = await node.client.post("/v1/responses", content=body.encode())
        assert answer.status_code == 200, answer.text
        assert answer.text.count(f"[1e400,{BIG},7.50]") == 2
