"""Reasoning, content and tool calls out of the text of a chat answer, however it is cut."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import chat_message
from api.chat_format import ToolMarkup
from api.chat_message import MessageParser, Parts
from api.tool_markup import MARKUPS, Markup
from api.tool_schemas import ToolSchemas

BAR = "\N{FULLWIDTH VERTICAL LINE}"
GLM, DSML, V31 = (MARKUPS[kind] for kind in (ToolMarkup.GLM, ToolMarkup.DSML, ToolMarkup.DEEPSEEK_V31))
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


MARKED = f"</{BAR}DSML{BAR}invoke></{BAR}DSML{BAR}function_calls>"
DSML_READ = [("weather", {"city": "杭州", "days": [1, 2]}), ("now", {})]
V31_CALLS = (
    '<|tool▁calls▁begin|><|tool▁call▁begin|>weather<|tool▁sep|>{"city": "杭州"}<|tool▁call▁end|>'
    "<|tool▁call▁begin|>now<|tool▁sep|>{}<|tool▁call▁end|><|tool▁calls▁end|>"
).replace("|", BAR)
V31_ODD = (
    "<|tool▁calls▁begin|><|tool▁call▁begin|>weather<|tool▁sep|>[1]<|tool▁call▁end|><|tool▁calls▁end|>"
).replace("|", BAR)
BROKEN_GLM = "f" + "<arg_key>" * 30_000
BROKEN_DSML = '<|DSML|parameter name="a">'.replace("|", BAR) * 30_000
"""Calls that hurt whoever searches for the end of each beginning."""


def parse(
    pieces: list[str], markup: Markup | None = None, *, in_reasoning: bool = False
) -> tuple[str, str, list[tuple[str, object]]]:
    """Reasoning, content, and name and arguments of the calls."""
    parser = MessageParser(in_reasoning=in_reasoning, markup=markup, schemas=SCHEMAS)
    total = Parts()
    for parts in [*map(parser.feed, pieces[:-1]), parser.feed(pieces[-1], is_last=True)]:
        total.reasoning += parts.reasoning
        total.content += parts.content
        total.calls += parts.calls
    assert [call.index for call in total.calls] == list(range(len(total.calls)))
    assert parser.has_calls == bool(total.calls)
    calls = [(call.name, json.loads(call.arguments)) for call in total.calls]
    return total.reasoning, total.content, calls


@pytest.mark.parametrize(
    ("text", "markup", "in_reasoning", "expected"),
    [
        ("  plain <b> text\n", None, False, ("", "  plain <b> text\n", [])),
        ("<think>\nhm\n</think>\n\nYes.", None, False, ("hm\n", "Yes.", [])),
        (" \n<think>hm</think>Yes.", None, False, ("hm", "Yes.", [])),
        ("\nhm</think>Yes.", None, True, ("hm", "Yes.", [])),
        ("hm, and no end", None, True, ("hm, and no end", "", [])),
        ("He said <think> and </think>.", None, False, ("", "He said <think> and </think>.", [])),
        (GLM_CALL, None, False, ("", GLM_CALL, [])),
        (GLM_CALL, GLM, False, ("", "", [("weather", {"city": "42", "days": 3})])),
        (f"Look: {GLM_LINES}\n", GLM, False, ("", "Look: ", [("weather", {"city": 'Bern\n"x"'})])),
        (f"{GLM_CALL}</tool_call>", GLM, False, ("", "", [("weather", {"city": "42", "days": 3})])),
        ("<tool_call>now</tool_call>", GLM, False, ("", "", [("now", {})])),
        (glm_call("a", "NaN"), GLM, False, ("", "", [("f", {"a": "NaN"})])),
        (glm_call("a", "1e999"), GLM, False, ("", "", [("f", {"a": "1e999"})])),
        (glm_call("a", "[" * 100_000), GLM, False, ("", "", [("f", {"a": "[" * 100_000})])),
        (glm_call("a", '{"b": [true, null]}'), GLM, False, ("", "", [("f", {"a": {"b": [True, None]}})])),
        ("hm</think><tool_call>now</tool_call>Done.", GLM, True, ("hm", "Done.", [("now", {})])),
        ("hm <tool_call>now</tool_call>", GLM, True, ("hm <tool_call>now</tool_call>", "", [])),
        ("<tool_call>now<arg_key>a", GLM, False, ("", "<tool_call>now<arg_key>a", [])),
        ("<tool_call> x", GLM, False, ("", "<tool_call> x", [])),
        (
            f"<tool_call>{BROKEN_GLM}</tool_call>",
            GLM,
            False,
            ("", f"<tool_call>{BROKEN_GLM}</tool_call>", []),
        ),
        (dsml_call(BROKEN_DSML), DSML, False, ("", dsml_call(BROKEN_DSML), [])),
        (glm_call("a", "<arg_key>"), GLM, False, ("", "", [("f", {"a": "<arg_key>"})])),
        (
            "<tool_call>f and more<arg_key>a</arg_key></tool_call>",
            GLM,
            False,
            ("", "<tool_call>f and more<arg_key>a</arg_key></tool_call>", []),
        ),
        ("a < b", GLM, False, ("", "a < b", [])),
        ("a <tool_", GLM, False, ("", "a <tool_", [])),
        ("a </tool_call> b", GLM, False, ("", "a </tool_call> b", [])),
        (
            f"Two:\n\n{DSML_CALLS}",
            DSML,
            False,
            ("", "Two:", [("weather", {"city": "杭州", "days": [1, 2]}), ("now", {})]),
        ),
        (
            DSML_CALLS.replace(f"</{BAR}DSML{BAR}function_calls>", ""),
            DSML,
            False,
            ("", "", [("weather", {"city": "杭州", "days": [1, 2]}), ("now", {})]),
        ),
        (
            dsml_call(
                parameter("a", "1.0", "false") + parameter("b", " 1 ", "true") + parameter("c", "x", "false")
            ),
            DSML,
            False,
            ("", "", [("f", {"a": 1.0, "b": " 1 ", "c": "x"})]),
        ),
        (dsml_call(parameter("a", MARKED, "true")), DSML, False, ("", "", [("f", {"a": MARKED})])),
        (dsml_call(parameter("a>b", "x", "true")), DSML, False, ("", "", [("f", {"a>b": "x"})])),
        (
            dsml_call(parameter("a", "1", "false") * 2),
            DSML,
            False,
            ("", dsml_call(parameter("a", "1", "false") * 2), []),
        ),
        (f"\n\n\n{DSML_CALLS} \n", DSML, False, ("", "\n", DSML_READ)),
        (f"hm</think>\n\n{DSML_CALLS}", DSML, True, ("hm", "", DSML_READ)),
        (f"a\n\n<{BAR}DSML", DSML, False, ("", f"a\n\n<{BAR}DSML", [])),
        (V31_CALLS, V31, False, ("", "", [("weather", {"city": "杭州"}), ("now", {})])),
        (f"Two: {V31_CALLS}", V31, False, ("", "Two: ", [("weather", {"city": "杭州"}), ("now", {})])),
        (V31_ODD, V31, False, ("", V31_ODD, [])),
        (V31_CALLS, DSML, False, ("", V31_CALLS, [])),
        (
            ODD_CALLS + " and on",
            DSML,
            False,
            ("", ODD_CALLS + "and on", []),
        ),
    ],
)
def test_parts_of_an_answer(
    text: str,
    markup: Markup | None,
    in_reasoning: bool,
    expected: tuple[str, str, list[tuple[str, object]]],
) -> None:
    assert parse([text], markup, in_reasoning=in_reasoning) == expected
    assert (
        parse([text[i : i + 3] for i in range(0, len(text), 3)], markup, in_reasoning=in_reasoning)
        == expected
    )


TOKENS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "a",
    " ",
    "\n",
    "<",
    "tool",
    "now",
]
V31_TOKENS = [*re.findall(rf"<{BAR}[^>]*>|[^<]+", V31_CALLS), "</think>", "<", " ", "x"]
DSML_TOKENS = ["\n\n", *DSML_CALLS.split("\n"), "</think>", "<", f"{BAR}DSML{BAR}", " ", "x"]


@given(
    st.one_of(
        st.tuples(st.just(GLM), st.lists(st.sampled_from(TOKENS), max_size=12)),
        st.tuples(st.just(DSML), st.lists(st.sampled_from(DSML_TOKENS), max_size=12)),
        st.tuples(st.just(V31), st.lists(st.sampled_from(V31_TOKENS), max_size=12)),
    ),
    st.booleans(),
    st.data(),
)
def test_how_an_answer_is_cut_changes_nothing(
    case: tuple[Markup, list[str]], in_reasoning: bool, data: st.DataObject
) -> None:
    markup, tokens = case
    text = "".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], markup, in_reasoning=in_reasoning)
    assert parse(pieces, markup, in_reasoning=in_reasoning) == whole


def test_reasoning_stays_content_for_who_asks_for_that() -> None:
    text = "<think>hm</think>Yes."
    for in_reasoning in (False, True):
        parser = MessageParser(
            in_reasoning=in_reasoning, separates_reasoning=False, markup=GLM, schemas=SCHEMAS
        )
        assert parser.feed(text, is_last=True) == Parts(content=text)


def test_text_is_shown_as_soon_as_it_can_be_no_markup() -> None:
    parser = MessageParser(in_reasoning=False, markup=GLM, schemas=SCHEMAS)
    assert parser.feed("one <to").content == "one "
    assert parser.feed("ol_").content == ""
    assert parser.feed("x").content == "<tool_x"
    assert parser.feed("<tool_call>now").content == ""
    assert [call.name for call in parser.feed("</tool_call>").calls] == ["now"]


# --- work -------------------------------------------------------------------------------------------


def glm_calls(num_calls: int) -> str:
    return "<tool_call>now</tool_call>" * num_calls


@pytest.mark.I8
@pytest.mark.parametrize("piece_chars", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("text", "markup"),
    [
        pytest.param(" \n" * 20_000, GLM, id="white space that reasoning may follow"),
        pytest.param("a < b </thin " * 4_000, GLM, id="content"),
        pytest.param(glm_calls(2_000), GLM, id="many calls"),
        pytest.param(glm_calls(1) + " x" * 20_000, GLM, id="content behind a call"),
        pytest.param("<tool_call>" + "x<" * 20_000, GLM, id="a call without its end"),
        pytest.param(f"<tool_call>{BROKEN_GLM[:9_000]}</tool_call>" * 5, GLM, id="broken calls"),
        pytest.param("</tool_call>" * 4_000, GLM, id="ends without calls"),
        pytest.param(dsml_call(parameter("a", "\n" * 40_000, "true")), DSML, id="a long value"),
    ],
)
def test_each_character_is_searched_once(
    text: str, markup: Markup, piece_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: what searching for markers goes over, what is read as a call, what is looked at as a start."""
    num_searched = 0
    search = chat_message._search

    def counting_search(marks: tuple[str, ...], text: str, at: int) -> re.Match[str] | None:
        nonlocal num_searched
        found = search(marks, text, at)
        num_searched += (len(text) if found is None else found.end()) - at
        return found

    def counting_read(text: str, schemas: ToolSchemas) -> tuple[str, str] | None:
        nonlocal num_searched
        num_searched += len(text)
        return markup.read(text, schemas)

    class CountingParser(MessageParser):
        def _begin(self, text: str) -> int | None:
            nonlocal num_searched
            num_searched += len(text)
            return super()._begin(text)

    monkeypatch.setattr(chat_message, "_search", counting_search)
    counted = replace(markup, read=counting_read)
    parser = CountingParser(in_reasoning=False, markup=counted, schemas=SCHEMAS)
    pieces = [text[at : at + piece_chars] for at in range(0, len(text), piece_chars)]
    for piece in pieces:
        parser.feed(piece)
    parser.feed("", is_last=True)
    longest = max(map(len, (*markup.openings, markup.call_end, markup.closing, *(markup.value or ()))))
    assert num_searched <= 3 * len(text) + longest * (len(pieces) + 1)
