"""Structured output from the request's fields through a front to its engine, and back as the answer.

The engine answers at random with what its grammar admits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse_pd.engine.messages import FromEngine, Generate
from hisparse_pd.serving.api import requests
from hisparse_pd.serving.api.text_codec import TextCodec
from tests.structured_checks import CHECKS, MESSAGES, TOOLS, TOOLS_TEMPLATE, Served
from tests.unit.api import scripted_engine, support
from tests.unit.api.grammar_walks import Walk
from tests.unit.api.scripted_engine import stops_after
from tests.unit.api.support import ROOM, serving
from tests.unit.api.tiny_tokenizer import make_tokenizer

pytestmark = pytest.mark.anyio

MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def use_template(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    codec = TextCodec(tokenizer, len(tokenizer), "glm_moe_dsa", support.Unchecked())
    monkeypatch.setattr(support, "CODEC", codec)


@pytest.fixture(autouse=True)
def glm(monkeypatch: pytest.MonkeyPatch) -> None:
    use_template(monkeypatch, TOOLS_TEMPLATE)
    for limit in ("CONTEXT_LENGTH", "POOL_HISPARSE", "POOL_DENSE"):
        monkeypatch.setattr(scripted_engine, limit, 1 << 14)


def says_what_it_may(generate: Generate) -> Iterable[FromEngine | float]:
    seed = sum(map(ord, generate.sampling.grammar))
    return stops_after(Walk(generate.sampling.grammar, MARKS).answer(seed))(generate)


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
async def test_clients_get_what_they_asked_for(check: Callable[[Served], None], tmp_path: Path) -> None:
    async with serving(says_what_it_may, tmp_path) as node:
        with closing(Served(f"http://127.0.0.1:{node.port}", ROOM)) as served:
            await asyncio.to_thread(check, served)


async def asked(tmp_path: Path, **body: Any) -> tuple[httpx.Response, list[str]]:
    """Return the answer to a chat, and the grammars that the engine was given."""
    async with serving(stops_after("x"), tmp_path) as node:
        answer = await node.post("/v1/chat/completions", **{"messages": MESSAGES, **ROOM, **body})
        return answer, [generate.sampling.grammar for generate in node.engine.generates]


async def test_a_request_that_asks_for_nothing_has_no_grammar(tmp_path: Path) -> None:
    answer, grammars = await asked(tmp_path, tools=[{**TOOLS[0], "function": {"name": "f"}}])
    assert (answer.status_code, grammars) == (200, [""])


async def test_reasoning_comes_first_where_the_prompt_begins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(
        monkeypatch,
        TOOLS_TEMPLATE + "{% if thinking %}<think>{% elif thinking is false %}</think>{% endif %}",
    )
    found = []
    for kwargs in ({"thinking": True}, {"thinking": False}, {}):
        _, (grammar,) = await asked(tmp_path, regex="a+", chat_template_kwargs=kwargs)
        found.append(("</think>" in grammar, "<think>" in grammar))
    assert found == [(True, False), (False, False), (True, True)]


@pytest.mark.I8
async def test_grammars_of_many_samples_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample is sent a grammar of its own."""
    monkeypatch.setattr(requests, "MAX_REQUEST_GRAMMAR_CHARS", 1000)
    fits, (grammar, *_) = await asked(tmp_path, regex="a", n=2)
    assert fits.status_code == 200
    most = 1000 // len(grammar)
    assert (await asked(tmp_path, regex="a", n=most))[0].status_code == 200
    refused, _ = await asked(tmp_path, regex="a", n=most + 1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "1000 are the most" in refused.json()["error"]["message"]
