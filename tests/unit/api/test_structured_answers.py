"""A request's words for structured output, through a front to its engine and back as the answer.

The engine says at random what the grammar that it was given admits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse_pd.api import requests
from hisparse_pd.api.text_codec import TextCodec
from hisparse_pd.engine.messages import FromEngine, Generate
from tests.structured_checks import CHECKS, MESSAGES, TOOLS, TOOLS_TEMPLATE, Served
from tests.unit.api import scripted_engine, support
from tests.unit.api.grammar_walks import Walk
from tests.unit.api.scripted_engine import stops_after
from tests.unit.api.support import ROOM, Node, serving
from tests.unit.api.tiny_tokenizer import make_tokenizer

pytestmark = pytest.mark.anyio

MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@pytest.fixture(autouse=True)
def glm(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    monkeypatch.setattr(
        support, "CODEC", TextCodec(tokenizer, len(tokenizer), "glm_moe_dsa", support.Unchecked())
    )
    for limit in ("CONTEXT_LENGTH", "POOL_HISPARSE", "POOL_DENSE"):
        monkeypatch.setattr(scripted_engine, limit, 1 << 14)


def says_what_it_may(generate: Generate) -> Iterable[FromEngine | float]:
    seed = sum(map(ord, generate.sampling.grammar))
    return stops_after(Walk(generate.sampling.grammar, MARKS).answer(seed))(generate)


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
async def test_clients_get_what_they_asked_for(check: Callable[[Served], None], tmp_path: Path) -> None:
    async with serving(says_what_it_may, tmp_path) as node:
        served = Served(f"http://127.0.0.1:{node.port}", ROOM)
        try:
            await asyncio.to_thread(check, served)
        finally:
            served.close()


def asked(tmp_path: Path, **body: Any) -> tuple[httpx.Response, list[str]]:
    """The answer to a chat, and the grammars that the engine was given."""
    grammars: list[str] = []

    def script(generate: Generate) -> Iterable[FromEngine | float]:
        grammars.append(generate.sampling.grammar)
        return stops_after("x")(generate)

    async def main() -> httpx.Response:
        async with serving(script, tmp_path) as node:
            return await ask(node)

    async def ask(node: Node) -> httpx.Response:
        return await node.post("/v1/chat/completions", **{"messages": MESSAGES, **ROOM, **body})

    return asyncio.run(main()), grammars


def test_a_request_that_asks_for_nothing_has_no_grammar(tmp_path: Path) -> None:
    answer, grammars = asked(tmp_path, tools=[{**TOOLS[0], "function": {"name": "f"}}])
    assert (answer.status_code, grammars) == (200, [""])


def test_reasoning_comes_first_where_the_prompt_begins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        TOOLS_TEMPLATE + "{% if thinking %}<think>{% elif thinking is false %}</think>{% endif %}"
    )
    monkeypatch.setattr(
        support, "CODEC", TextCodec(tokenizer, len(tokenizer), "glm_moe_dsa", support.Unchecked())
    )
    found = []
    for thinking in (True, False, None):
        kwargs = {} if thinking is None else {"thinking": thinking}
        _, (grammar,) = asked(tmp_path, regex="a+", chat_template_kwargs=kwargs)
        found.append(("</think>" in grammar, "<think>" in grammar))
    assert found == [(True, False), (False, False), (True, True)]


@pytest.mark.I8
def test_grammars_of_many_samples_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample is sent its own."""
    monkeypatch.setattr(requests, "MAX_REQUEST_GRAMMAR_CHARS", 1000)
    fits, (grammar, *_) = asked(tmp_path, regex="a", n=2)
    assert fits.status_code == 200
    most = 1000 // len(grammar)
    assert asked(tmp_path, regex="a", n=most)[0].status_code == 200
    refused, _ = asked(tmp_path, regex="a", n=most + 1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "1000 are the most" in refused.json()["error"]["message"]
