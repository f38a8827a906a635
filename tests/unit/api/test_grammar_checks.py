"""Grammars of requests are checked in a process beside the front, which may die; bad ones get a 400."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.core.grammar import checker
from hisparse_pd.core.grammar.checker import Verdict
from hisparse_pd.core.grammar.token_trie import MAX_GRAMMAR_BYTES
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.grammar_checks import MAX_WAITING, GrammarChecks
from hisparse_pd.serving.api.requests import RequestLimits, plan_samples
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.http.http_errors import ApiError
from tests.unit.api.support import parse
from tools.checkpoints.make_tiny import write_checkpoint

pytestmark = pytest.mark.I8

CHAIN = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(3000)}
DEEP = "start: %json " + json.dumps({"$defs": CHAIN | {"d3000": {}}, "$ref": "#/$defs/d0"})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammars") / "v32"
    write_checkpoint(path, "v32")
    return path


@pytest.fixture(scope="module")
def checks(model_path: Path) -> Iterator[GrammarChecks]:
    checks = GrammarChecks(model_path / "tokenizer.json", 262, 258)
    yield checks
    checks.close()


def refusal(checks: GrammarChecks, text: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asyncio.run(checks.check(text, "response_format.json_schema"))
    return caught.value


def test_a_refusal_names_the_field_and_why(checks: GrammarChecks) -> None:
    asyncio.run(checks.check('start: "a"', "regex"))
    for text, why in [
        ("start: ((", "Expected token"),
        (DEEP, "nested too deeply: compiling takes more than 1024 KiB of stack"),
        ('start: "' + "a" * MAX_GRAMMAR_BYTES + '"', f"{MAX_GRAMMAR_BYTES} are the most"),
    ]:
        error = refusal(checks, text)
        assert error.status == 400
        assert error.param == "response_format.json_schema"
        assert error.message.startswith("response_format.json_schema: the grammar ")
        assert why in error.message


def test_what_was_checked_is_not_checked_again(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = refusal(checks, "start: [[").message
    asyncio.run(checks.check('start: "b"', "regex"))
    monkeypatch.setattr(checks, "answer", None)
    asyncio.run(checks.check('start: "b"', "regex"))
    assert refusal(checks, "start: [[").message == before


def test_what_is_not_certain_is_asked_again(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [Verdict("was not compiled: signal 9 ended its compiler", is_certain=False), Verdict("")]
    monkeypatch.setattr(checks, "answer", lambda encoded: verdicts.pop(0))
    error = refusal(checks, 'start: "unlucky"')
    assert (error.status, error.headers.get("retry-after") is not None) == (503, True)
    assert "signal 9" in error.message
    asyncio.run(checks.check('start: "unlucky"', "regex"))
    assert not verdicts


def test_a_check_whose_request_has_left_is_not_made(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, may_go_on, made = checks.answer, threading.Event(), list[bytes]()

    def held(encoded: bytes) -> Verdict:
        made.append(encoded)
        assert may_go_on.wait(60)
        return answer(encoded)

    monkeypatch.setattr(checks, "answer", held)

    async def leave() -> None:
        texts = [f'start: "left {number}"' for number in range(MAX_WAITING)]
        asked = [asyncio.create_task(checks.check(text, "regex")) for text in texts]
        while not made:
            await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        may_go_on.set()
        await checks.check('start: "stays"', "regex")

    asyncio.run(leave())
    assert made == [b'start: "left 0"', b'start: "stays"']


def test_a_helper_finds_the_package_that_started_it(checks: GrammarChecks) -> None:
    asyncio.run(checks.check('start: "b"', "regex"))
    assert checks.process is not None
    environment = Path(f"/proc/{checks.process.pid}/environ").read_text().split("\0")
    (path,) = (value for value in environment if value.startswith("PYTHONPATH="))
    first, *others = path.removeprefix("PYTHONPATH=").split(os.pathsep)
    assert Path(checker.__file__).samefile(Path(first, *checker.__name__.split(".")).with_suffix(".py"))
    assert "" not in others, "which would be the current folder"


def test_a_helper_that_died_is_replaced(checks: GrammarChecks) -> None:
    asyncio.run(checks.check('start: "c"', "regex"))
    assert checks.process is not None
    os.kill(checks.process.pid, signal.SIGKILL)
    checks.process.wait()
    asyncio.run(checks.check('start: "d"', "regex"))


def test_a_checkpoint_without_a_usable_tokenizer_takes_no_grammars(tmp_path: Path) -> None:
    with closing(GrammarChecks(tmp_path / "tokenizer.json", 262, 258)) as checks:
        assert "cannot be used" in refusal(checks, 'start: "a"').message


def test_others_are_served_while_checks_wait_and_only_so_many_wait(checks: GrammarChecks) -> None:
    async def flood() -> tuple[list[Any], int]:
        asked = [
            asyncio.create_task(checks.check(f'start: "flood {number}"', "regex"))
            for number in range(MAX_WAITING + 3)
        ]
        num_turns = 0
        while not all(task.done() for task in asked):
            num_turns += 1
            await asyncio.sleep(0)
        return await asyncio.gather(*asked, return_exceptions=True), num_turns

    results, num_turns = asyncio.run(flood())
    refused = [result for result in results if isinstance(result, ApiError)]
    assert [error.status for error in refused] == [503] * 3
    assert results[:MAX_WAITING] == [None] * MAX_WAITING
    assert num_turns > MAX_WAITING, "the loop stood still"


def test_a_request_is_planned_only_with_grammars_that_can_be_followed(model_path: Path) -> None:
    codec = TextCodec.load(model_path)
    limits = RequestLimits(8192, 8192, 8192)

    def plan(grammar: str) -> Any:
        request = parse(Endpoint.GENERATE, sampling_params={"ebnf": grammar, "max_new_tokens": 5})
        return asyncio.run(plan_samples(request, codec, limits, 64))

    assert codec.grammar_checks is not None
    with closing(codec.grammar_checks):
        (sample,) = plan('start: "a"')
        assert 'start: "a"' in sample.generate.sampling.grammar
        with pytest.raises(ApiError, match=r"ebnf: the grammar is not usable"):
            plan("start: ((")
