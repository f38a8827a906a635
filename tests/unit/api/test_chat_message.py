"""Reasoning, content and tool calls are found in the text of a chat answer, however it is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.serving.api import chat_message
from hisparse_pd.serving.api.answer_blocks import BlockKind, Change
from hisparse_pd.serving.api.chat_format import MARKUPS, THINK_MARKS, Markup, ToolMarkup
from hisparse_pd.serving.api.chat_message import MessageParser
from hisparse_pd.serving.api.tool_schemas import ToolSchemas
from tests.unit.api.joined_parts import Message, joined

BAR = "\N{FULLWIDTH VERTICAL LINE}"
GLM, DSML, V31 = (MARKUPS[kind] for kind in (ToolMarkup.GLM, ToolMarkup.DSML, ToolMarkup.DEEPSEEK_V31))
MISTRAL = MARKUPS[ToolMarkup.MISTRAL]
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
SCHEMAS = ToolSchemas([{"function": {"name": "weather", "parameters": {"properties": PROPERTIES}}}])

GLM_CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>42</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
GLM_LINES = '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern\n"x"</arg_value>\n</tool_call>'
DSML_CALLS = (
    "<|DSML|function_calls>\n"
    '<|DSML|invoke name="weather">\n'
    '<|DSML|parameter name="city" string="true">杭州</|DSML|parameter>\n'
    '<|DSML|parameter name="days" string="false">[1, 2]</|DSML|parameter>\n'
    "</|DSML|invoke>\n"
    '<|DSML|invoke name="now">\n</|DSML|invoke>\n'
    "</|DSML|function_calls>"
).replace("|", BAR)
ODD_CALLS = "<|DSML|function_calls>odd</|DSML|function_calls>".replace("|", BAR)


def glm_call(key: str, value: str) -> str:
    return f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"


def dsml_call(parameters: str) -> str:
    text = f'<|DSML|function_calls><|DSML|invoke name="f">{parameters}</|DSML|invoke>'
    return f"{text}</|DSML|function_calls>".replace("|", BAR)


def parameter(name: str, value: str, is_string: str) -> str:
    return f'<|DSML|parameter name="{name}" string="{is_string}">{value}</|DSML|parameter>\n'


END_OF_INVOKE = f"</{BAR}DSML{BAR}invoke>"
GLM_READ = ("weather", {"city": "42", "days": 3})
PROSE = "what opens a call. " * 40
"""Text that is too long for a name."""
NO_CALL = f"<tool_call>{PROSE}</tool_call>"
END_OF_CALLS = f"</{BAR}DSML{BAR}function_calls>"
MARKED = END_OF_INVOKE + END_OF_CALLS
BEGINNING, _, CALLED = DSML_CALLS.partition("\n")
BEGINNING += "\n"
OF_EACH_KIND = parameter("a", "1.0", "false") + parameter("b", " 1 ", "true") + parameter("c", "x", "false")
DSML_READ = [("weather", {"city": "杭州", "days": [1, 2]}), ("now", {})]
V31_READ = [("weather", {"city": "杭州"}), ("now", {})]
V31_CALLS = (
    '<|tool▁calls▁begin|><|tool▁call▁begin|>weather<|tool▁sep|>{"city": "杭州"}<|tool▁call▁end|>'
    "<|tool▁call▁begin|>now<|tool▁sep|>{}<|tool▁call▁end|><|tool▁calls▁end|>"
).replace("|", BAR)
V31_ODD = (
    "<|tool▁calls▁begin|><|tool▁call▁begin|>weather<|tool▁sep|>[1]<|tool▁call▁end|><|tool▁calls▁end|>"
).replace("|", BAR)
MISTRAL_CALLS = '[TOOL_CALLS]weather[ARGS]{"city": "杭州", "days": [1]}[TOOL_CALLS]now[ARGS]{}'
MISTRAL_READ = [("weather", {"city": "杭州", "days": [1]}), ("now", {})]
BROKEN_GLM = "f" + "<arg_key>" * 30_000
"""Calls that take long if each beginning is searched for its end."""


def make_parser(markup: Markup | None = None, *, in_reasoning: bool = False, **options: Any) -> MessageParser:
    return MessageParser(in_reasoning=in_reasoning, markup=markup, **{"schemas": SCHEMAS, **options})


def parse(
    pieces: list[str],
    markup: Markup | None = None,
    *,
    in_reasoning: bool = False,
    finish: FinishReason = FinishReason.STOP,
    **options: Any,
) -> Message:
    """Return the joined blocks of an answer that comes in ``pieces``."""
    parser = make_parser(markup, in_reasoning=in_reasoning, **options)
    changes = [change for piece in pieces[:-1] for change in parser.feed(piece)]
    changes += parser.feed(pieces[-1], finish)
    calls = [block for block in parser.blocks if block.kind is BlockKind.CALL]
    assert parser.has_calls == bool(calls)
    assert parser.is_in_call == any(call.is_cut for call in calls)
    return joined(changes)


def parse_cut(text: str, markup: Markup | None, num_chars: int, **options: Any) -> Message:
    """Parse ``text`` in pieces of equal length."""
    return parse([text[i : i + num_chars] for i in range(0, len(text), num_chars)], markup, **options)


Case = tuple[str, Markup | None, bool, tuple[str, str, list[tuple[str, object]]]]
"""Texts with the options to parse them, and the reasoning, content and calls expected."""


def thought(
    text: str, markup: Markup | None, reasoning: str, content: str, *calls: Any, in_reasoning: bool = True
) -> Case:
    return text, markup, in_reasoning, (reasoning, content, list(calls))


def said(text: str, markup: Markup | None, content: str, *calls: Any) -> Case:
    return thought(text, markup, "", content, *calls, in_reasoning=False)


def plain(text: str, markup: Markup | None) -> Case:
    return said(text, markup, text)


@pytest.mark.parametrize(
    ("text", "markup", "in_reasoning", "expected"),
    [
        plain("  plain <b> text\n", None),
        thought("<think>\nhm\n</think>\n\nYes.", None, "hm\n", "Yes.", in_reasoning=False),
        thought(" \n<think>hm</think>Yes.", None, "hm", "Yes.", in_reasoning=False),
        thought("\nhm</think>Yes.", None, "hm", "Yes."),
        thought("hm, and no end", None, "hm, and no end", ""),
        plain("He said <think> and </think>.", None),
        plain(GLM_CALL, None),
        said(GLM_CALL, GLM, "", GLM_READ),
        said(f"Look: {GLM_LINES}\n", GLM, "Look: ", ("weather", {"city": 'Bern\n"x"'})),
        said(f"{GLM_CALL}</tool_call>", GLM, "", GLM_READ),
        said("<tool_call>now</tool_call>", GLM, "", ("now", {})),
        said(glm_call("a", "NaN"), GLM, "", ("f", {"a": "NaN"})),
        said(glm_call("a", "1e999"), GLM, "", ("f", {"a": "1e999"})),
        said(glm_call("a", "[" * 100_000), GLM, "", ("f", {"a": "[" * 100_000})),
        said(glm_call("a", '{"b": [true, null]}'), GLM, "", ("f", {"a": {"b": [True, None]}})),
        thought("hm</think><tool_call>now</tool_call>Done.", GLM, "hm", "Done.", ("now", {})),
        thought("hm <tool_call>now</tool_call>", GLM, "hm ", "", ("now", {})),
        thought("hm <tool_call>now</tool_call>\n</think>\nYes.", GLM, "hm ", "Yes.", ("now", {})),
        thought("use <tool_call> for it</think>Yes.", GLM, "use <tool_call> for it", "Yes."),
        thought("use <tool_call> for it", GLM, "use <tool_call> for it", ""),
        thought(f"a <tool_call> b {GLM_CALL}", GLM, "a <tool_call> b ", "", GLM_READ),
        said(f"a <tool_call> b {GLM_CALL}", GLM, "a <tool_call> b ", GLM_READ),
        thought(f"{NO_CALL}a</think>Yes.", GLM, f"{NO_CALL}a", "Yes."),
        said(f"<tool_call>{PROSE}{GLM_CALL}", GLM, f"<tool_call>{PROSE}", GLM_READ),
        plain(dsml_call("").replace('"f"', f'"{PROSE}"'), DSML),
        thought(f"hm{DSML_CALLS}", DSML, f"hm{DSML_CALLS}", ""),
        thought("<think>hm</think>Yes.", None, "hm", "Yes."),
        thought("<think>\n<think>hm</think>Yes.", None, "hm", "Yes.", in_reasoning=False),
        thought("<thin air</think>Yes.", None, "<thin air", "Yes."),
        plain("<tool_call> x", GLM),
        said(glm_call("a", "<arg_key>"), GLM, "", ("f", {"a": "<arg_key>"})),
        plain("<tool_call><arg_key>a</arg_key></tool_call>", GLM),
        plain("a < b", GLM),
        plain("a <tool_", GLM),
        plain("a </tool_call> b", GLM),
        said(f"Two:\n\n{DSML_CALLS}", DSML, "Two:", *DSML_READ),
        said(DSML_CALLS.removesuffix(END_OF_CALLS), DSML, "", *DSML_READ),
        said(dsml_call(OF_EACH_KIND), DSML, "", ("f", {"a": 1.0, "b": " 1 ", "c": "x"})),
        said(dsml_call(parameter("a", MARKED, "true")), DSML, "", ("f", {"a": MARKED})),
        said(dsml_call(parameter("a>b", "x", "true")), DSML, "", ("f", {"a>b": "x"})),
        said(dsml_call('\n{"a": [1],\n "b": "</x>"}\n'), DSML, "", ("f", {"a": [1], "b": "</x>"})),
        said(BEGINNING + "so " + CALLED, DSML, f"{BEGINNING}so \n{END_OF_CALLS}", *DSML_READ),
        said(f"\n\n\n{DSML_CALLS} \n", DSML, "\n", *DSML_READ),
        thought(f"hm</think>\n\n{DSML_CALLS}", DSML, "hm", "", *DSML_READ),
        plain(f"a\n\n<{BAR}DSML", DSML),
        said(f"Two: {V31_CALLS}", V31, "Two: ", *V31_READ),
        said(V31_ODD, V31, "", ("weather", [1])),
        said(V31_CALLS.replace("{}", ""), V31, "", *V31_READ),
        plain(V31_CALLS, DSML),
        said(f"Two:{MISTRAL_CALLS}", MISTRAL, "Two:", *MISTRAL_READ),
        said("[TOOL_CALLS]now[ARGS]", MISTRAL, "", ("now", {})),
        said(f"a [TOOL_CALLS] b {MISTRAL_CALLS[:-2]}", MISTRAL, "a [TOOL_CALLS] b ", *MISTRAL_READ),
        plain("[TOOL_CALLS]now and [ARG", MISTRAL),
        said(ODD_CALLS + " and on", DSML, ODD_CALLS + "and on"),
    ],
)
def test_parts_of_an_answer(
    text: str, markup: Markup | None, in_reasoning: bool, expected: tuple[str, str, list[tuple[str, object]]]
) -> None:
    for num_chars in (len(text), 3):
        found = parse_cut(text, markup, num_chars, in_reasoning=in_reasoning)
        calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
        assert (found.reasoning, found.content, calls) == expected


def dsml_begun(parameters: str) -> str:
    """A call without its end."""
    return dsml_call(parameters).partition(END_OF_INVOKE)[0]


ONE = parameter("a", "1", "false")
FAULTS = [
    ("<tool_call>f<arg_key>a", GLM, "f", "<arg_key>a</tool_call>"),
    ("<tool_call>f and more<arg_key>a</arg_key>", GLM, "f and more", "<arg_key>a</arg_key></tool_call>"),
    ("<tool_call>f<arg_key>a</arg_key> b ", GLM, "f", "<arg_key>a</arg_key> b </tool_call>"),
    (f"<tool_call>{BROKEN_GLM}", GLM, "f", f"{BROKEN_GLM[1:]}</tool_call>"),
    (glm_call("a", "1").replace("</tool_call>", " }"), GLM, "f", '{"a": 1 }</tool_call>'),
    (glm_call("a", 'x"').partition("</arg_value>")[0], GLM, "f", '{"a": "x\\""</tool_call>'),
    (glm_call("a", "12").partition("</arg_value>")[0], GLM, "f", '{"a": 12</tool_call>'),
    (dsml_begun(ONE * 2), DSML, "f", f'{{"a": 1\n{ONE}{END_OF_INVOKE}'.replace("|", BAR)),
    (dsml_begun(parameter("a", "1", "true") + "b"), DSML, "f", f'{{"a": "1"\nb{END_OF_INVOKE}'),
]


@pytest.mark.parametrize(("begun", "markup", "name", "arguments"), FAULTS)
def test_what_cannot_be_read_of_a_call_stays_in_its_arguments_which_are_no_json(
    begun: str, markup: Markup, name: str, arguments: str
) -> None:
    behind = markup.call_end + (markup.closing if markup.closing != markup.call_end else "")
    for num_chars in (1 << 20, 3):
        found = parse_cut(f"Look.{begun}{behind}Done.", markup, num_chars)
        assert (found.content, len(found.calls)) == ("Look.Done.", 1)
        assert (found.calls[0].name, found.calls[0].arguments) == (name, arguments)
        with pytest.raises(json.JSONDecodeError):
            json.loads(found.calls[0].arguments)


@pytest.mark.parametrize(
    ("markup", "calls"), [(GLM, GLM_CALL), (DSML, DSML_CALLS), (V31, V31_CALLS), (MISTRAL, MISTRAL_CALLS)]
)
@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
def test_of_calls_that_are_cut_off_no_markup_is_shown(
    markup: Markup, calls: str, finish: FinishReason
) -> None:
    """The answer may end anywhere. Arguments are a beginning of those of the whole call."""
    whole = parse([f"So: {calls}"], markup)
    for end in range(len(calls)):
        found = parse_cut(f"So: {calls[:end]}", markup, 5, finish=finish)
        for cut, call in zip(found.calls, whole.calls, strict=False):
            assert cut.name == call.name
            assert call.arguments.startswith(cut.arguments) or (markup is MISTRAL and cut.arguments == "{}")
        if finish is FinishReason.LENGTH:
            assert markup.sign not in found.content
            assert found.content.startswith("So: ")
        elif not found.calls:
            assert found.content == f"So: {calls[:end]}"


def cut(text: str, data: st.DataObject) -> list[str]:
    """Cut a text into pieces, some of which may be empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


TOKENS = {
    GLM: [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        *("a", "\n", "<", "tool", "now"),
    ],
    DSML: ["\n\n", *DSML_CALLS.split("\n"), "</think>", "<", f"{BAR}DSML{BAR}", "x"],
    V31: [*re.findall(rf"<{BAR}[^>]*>|[^<]+", V31_CALLS), "</think>", "<", "x"],
    MISTRAL: ["[TOOL_CALLS]", "[ARGS]", "</think>", "[", "{}", '{"a": 1}', "x"],
}
for tokens in TOKENS.values():
    tokens += [" ", PROSE]


@given(st.sampled_from(list(TOKENS)), st.booleans(), st.data())
def test_how_an_answer_is_cut_changes_nothing(
    markup: Markup, in_reasoning: bool, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(TOKENS[markup]), max_size=12)))
    pieces = cut(text, data)
    finish = data.draw(st.sampled_from((FinishReason.STOP, FinishReason.LENGTH)))
    whole = parse([text], markup, in_reasoning=in_reasoning, finish=finish)
    assert parse(pieces, markup, in_reasoning=in_reasoning, finish=finish) == whole


# --- calls as a stream and at once --------------------------------------------------------------------

SCHEMA_OF_VALUES: list[Any] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": ["string", "null"]},
    {"type": ["string", "object"]},
    {"anyOf": [{"type": "string"}, {"type": "array"}]},
    {"enum": ["null", "a", 1, None, [1]]},
    {"anyOf": [{"type": "string"}, {"enum": [[1], None]}]},
    {"type": "string", "nullable": True},
    {"const": "1"},
    {},
]
VALUE_PIECES = [
    *("a", "null", "true", "1", "-", " ", "\n", '"', "\\", "{", "}", "[1]", "é", "😀", "<", "</", "\x01"),
]
values = st.lists(st.sampled_from(VALUE_PIECES), max_size=6).map("".join)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[Markup, str, ToolSchemas, tuple[str, str]]:
    """Return a call in its markup, of a tool with parameters of all types, and the call's meaning."""
    kind = draw(st.sampled_from(ToolMarkup))
    given = draw(st.lists(st.sampled_from(SCHEMA_OF_VALUES), max_size=3))
    properties = {f"p{index}": schema for index, schema in enumerate(given)}
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    schemas = ToolSchemas([tool])
    name = draw(st.sampled_from(["f", "unknown"]))
    space = draw(st.sampled_from(["", "\n"]))
    arguments = {key: draw(values) for key in [*properties, "p9"][: draw(st.integers(0, 4))]}
    match kind:
        case ToolMarkup.GLM:
            written = [
                f"<arg_key>{key}</arg_key>{space}<arg_value>{value}</arg_value>{space}"
                for key, value in arguments.items()
            ]
            text = f"<tool_call>{name}{space}{''.join(written)}</tool_call>"
            read = {key: schemas.to_json(name, key, value) for key, value in arguments.items()}
        case ToolMarkup.DSML:
            is_string = draw(st.sampled_from(["true", "false"]))
            written = [parameter(key, value, is_string) for key, value in arguments.items()]
            text = f'<|DSML|function_calls>{space}<|DSML|invoke name="{name}">{space}{"".join(written)}'
            text += f"</|DSML|invoke>{space}</|DSML|function_calls>"
            read = {
                key: value.strip()
                if is_string == "false" and is_json(value)
                else json.dumps(value, ensure_ascii=False)
                for key, value in arguments.items()
            }
        case ToolMarkup.DEEPSEEK_V31:
            text = f"<|tool▁calls▁begin|><|tool▁call▁begin|>{name}<|tool▁sep|>{space}{json.dumps(arguments)}"
            text += f"{space}<|tool▁call▁end|><|tool▁calls▁end|>"
            read = {key: json.dumps(value) for key, value in arguments.items()}
        case ToolMarkup.HERMES:
            call = f'{{"name": "{name}",{space}"arguments": {json.dumps(arguments)}}}'
            text = f"<tool_call>{space}{call}{space}</tool_call>"
            read = {key: json.dumps(value) for key, value in arguments.items()}
        case ToolMarkup.MISTRAL:
            text = f"[TOOL_CALLS]{name}[ARGS]{space}{json.dumps(arguments)}{space}"
            read = {key: json.dumps(value) for key, value in arguments.items()}
    shown = "{" + ", ".join(f'"{key}": {value}' for key, value in read.items()) + "}"
    return MARKUPS[kind], text.replace("|", BAR), schemas, (name, shown)


@given(written_calls(), st.data())
def test_the_arguments_of_a_call_are_those_that_were_written(
    case: tuple[Markup, str, ToolSchemas, tuple[str, str]], data: st.DataObject
) -> None:
    """They are the same to the byte, in whatever pieces the text comes."""
    markup, text, schemas, expected = case
    found = parse(cut(text, data), markup, schemas=schemas)
    assert (found.content, [(call.name, call.arguments) for call in found.calls]) == ("", [expected])


@pytest.mark.parametrize(
    ("arguments", "is_whole"), [('{"city": "Bern', False), ("", False), ('{"city": "Bern"}', True)]
)
def test_a_stop_string_may_end_an_answer_within_a_call(arguments: str, is_whole: bool) -> None:
    """The end of the answer ends a call in Mistral's markup, unless a stop string has cut it off."""
    parser = make_parser(MISTRAL)
    parser.feed("[TOOL_CALLS]weather[ARGS]")
    parser.feed(arguments, FinishReason.STOP, at_stop_string=True)
    (call,) = parser.blocks
    assert (call.text, call.is_cut, parser.is_in_call) == (arguments, not is_whole, not is_whole)


def test_other_marks_of_reasoning() -> None:
    for text, in_reasoning in (("[THINK]hm[/THINK]Yes <think>.", False), ("hm[/THINK]Yes <think>.", True)):
        found = parse_cut(text, None, 1, in_reasoning=in_reasoning, think=THINK_MARKS[1])
        assert found == Message("hm", "Yes <think>.")


def test_reasoning_that_speaks_of_calls_goes_on() -> None:
    """The text is withheld for the length of a name at most, and none of it is lost."""
    parser = make_parser(GLM, in_reasoning=True)
    thoughts = f"So <tool_call>{PROSE}"
    assert joined(parser.feed(thoughts[:100])).reasoning == "So "
    assert joined(parser.feed(thoughts[100:])).reasoning == thoughts[3:]
    assert joined(parser.feed("on", FinishReason.LENGTH)) == Message(reasoning="on")


def shown(parser: MessageParser, *pieces: str) -> list[str]:
    """Return what each piece adds to the arguments."""
    return ["".join(text for _, _, text in parser.feed(piece)) for piece in pieces]


def begun(parser: MessageParser, piece: str) -> str:
    """Return the name of the call that begins in the piece, in which nothing else happens."""
    ((change, block, _),) = parser.feed(piece)
    assert (change, block.kind) == (Change.OPENED, BlockKind.CALL)
    return block.name


def test_names_and_strings_are_shown_as_they_come() -> None:
    """A value that may not be a string is withheld until its end."""
    parser = make_parser(GLM)
    assert parser.feed("<tool_call>weather<arg_") == []
    assert begun(parser, "key>") == "weather"
    pieces = ["city</arg_key><arg_value>", "42\n", 'is "so', "</arg_value", ">"]
    assert shown(parser, *pieces) == ['{"city": "', "42\\n", 'is \\"so', "", '"']
    pieces = ["<arg_key>days</arg_key><arg_value>", "4", "2", "</arg_value></tool_call>"]
    assert shown(parser, *pieces) == [', "days": ', "", "", "42}"]
    parser = make_parser(DSML)
    invoke, is_string, no_string = (
        piece.replace("|", BAR)
        for piece in (
            '<|DSML|function_calls>\n<|DSML|invoke name="f">\n',
            '<|DSML|parameter name="a" string="true">',
            '</|DSML|parameter>\n<|DSML|parameter name="b" string="false">',
        )
    )
    assert begun(parser, invoke) == "f"
    assert shown(parser, is_string, "1", "</", no_string, "1") == ['{"a": "', "1", "", '</", "b": ', ""]
    parser = make_parser(V31)
    name, rest = V31_CALLS[: V31_CALLS.index("{")], V31_CALLS[V31_CALLS.index("{") :]
    assert begun(parser, name) == "weather"
    assert shown(parser, rest[:3], "\n", rest[3:8]) == [rest[:3], "", "\n" + rest[3:8]]


def test_reasoning_stays_content_for_who_asks_for_that() -> None:
    text = "<think>hm</think>Yes."
    for in_reasoning in (False, True):
        found = parse([text], GLM, in_reasoning=in_reasoning, separates_reasoning=False)
        assert found == Message(content=text)


def test_text_is_shown_as_soon_as_it_can_be_no_markup() -> None:
    parser = make_parser(GLM)
    assert joined(parser.feed("one <to")) == Message(content="one ")
    assert parser.feed("ol_") == []
    assert joined(parser.feed("x")) == Message(content="<tool_x")
    assert parser.feed("<tool_call>now") == []
    assert joined(parser.feed("</tool_call>")).calls[0].name == "now"


# --- work -------------------------------------------------------------------------------------------


def glm_calls(num_calls: int) -> str:
    return "<tool_call>now</tool_call>" * num_calls


@pytest.mark.I8
@pytest.mark.parametrize("piece_chars", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("text", "markup"),
    [
        pytest.param(" \n" * 2_500, GLM, id="white space that reasoning may follow"),
        pytest.param("<think>" * 700, GLM, id="openings of reasoning"),
        pytest.param(glm_call("a", " " * 2_500 + "[" * 2_500), GLM, id="a value that may be JSON"),
        pytest.param(glm_call("a", "1").replace("</t", "x" * 5_000 + "</t"), GLM, id="a fault"),
        pytest.param("a < b </thin " * 500, GLM, id="content"),
        pytest.param(glm_calls(250), GLM, id="many calls"),
        pytest.param(glm_calls(1) + " x" * 2_500, GLM, id="content behind a call"),
        pytest.param("<tool_call>" + "x<" * 2_500, GLM, id="a call without its end"),
        pytest.param(f"<tool_call>{BROKEN_GLM[:1_200]}</tool_call>" * 5, GLM, id="broken calls"),
        pytest.param("</tool_call>" * 500, GLM, id="ends without calls"),
        pytest.param(dsml_call(parameter("a", "\n" * 5_000, "true")), DSML, id="a long value"),
    ],
)
def test_each_character_is_searched_once(
    text: str, markup: Markup, piece_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the characters that are searched for marks, and those that are read as the answer's start."""
    num_searched = 0
    search = chat_message.search

    def counting_search(marks: tuple[str, ...], text: str, at: int) -> re.Match[str] | None:
        nonlocal num_searched
        found = search(marks, text, at)
        num_searched += (len(text) if found is None else found.end()) - at
        return found

    class CountingParser(MessageParser):
        def _read_start(self, text: str) -> str | None:
            nonlocal num_searched
            num_searched += len(text)
            return super()._read_start(text)

    monkeypatch.setattr(chat_message, "search", counting_search)
    parser = CountingParser(in_reasoning=False, markup=markup, schemas=SCHEMAS)
    pieces = [text[at : at + piece_chars] for at in range(0, len(text), piece_chars)]
    for piece in pieces:
        parser.feed(piece)
    parser.feed("", FinishReason.STOP)
    longest = max(map(len, (*markup.openings, markup.call, markup.key, *markup.ends)))
    assert num_searched <= 3 * len(text) + longest * (len(pieces) + 1)
