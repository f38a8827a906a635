"""Compilations: the oldest and the shortest alternately, and those that nobody wants never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event, Thread
from unittest.mock import Mock

import pytest

from hisparse_pd.base.call_threads import CallThreads
from hisparse_pd.core.grammar.compile_threads import compile_threads
from hisparse_pd.core.grammar.compiler import Compiler
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import Grammar, TokenTrie
from tests.unit.grammar.tries import trie
from tests.waiting import WAIT_SECS

pytestmark = pytest.mark.I8


@contextmanager
def one_thread(may_go_on: Event) -> Iterator[CallThreads[int]]:
    """One thread, whose first call lasts until ``may_go_on``."""
    threads = compile_threads(1, "tried")
    has_begun = Event()

    def hold() -> None:
        has_begun.set()
        assert may_go_on.wait(WAIT_SECS)

    held = threads.submit(0, hold)
    try:
        assert has_begun.wait(WAIT_SECS)
        yield threads
        held.result(WAIT_SECS)
    finally:
        may_go_on.set()
        threads.close(wait=True)


def test_a_short_one_waits_for_one_long_one_and_a_long_one_for_as_many_short_ones() -> None:
    may_go_on, order = Event(), list[int]()
    with one_thread(may_go_on) as threads:
        asked = [threads.submit(size, order.append, size) for size in (900, 800, 700, 3, 2, 1)]
        may_go_on.set()
        for future in asked:
            future.result(WAIT_SECS)
    assert order in ([900, 1, 800, 2, 700, 3], [1, 900, 2, 800, 3, 700])


@pytest.mark.I7
def test_a_call_for_which_no_thread_starts_is_made_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a thread fails in a container that has as many threads as it may."""
    threads = compile_threads(2, "tried")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            first = threads.submit(1, lambda: "first")
        assert threads.submit(2, lambda: "second").result(WAIT_SECS) == "second"
        assert first.result(WAIT_SECS) == "first"
    finally:
        threads.close(wait=True)


def test_grammars_of_requests_that_have_ended_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, compiled = Event(), list[str]()
    compile_text = TokenTrie.compile

    def recorded(self: TokenTrie, text: str, begun: Sequence[int] = ()) -> Grammar:
        compiled.append(text)
        return compile_text(self, text, begun)

    def slow() -> TokenTrie:
        assert may_go_on.wait(WAIT_SECS)
        return trie()

    monkeypatch.setattr(TokenTrie, "compile", recorded)
    compiler = Compiler(slow, lambda: None)
    try:
        ended: list[Future[Grammar]] = [compiler.compile(f'start: "{number}"') for number in range(330)]
        wanted = compiler.compile('start: "wanted"')
        assert compiler.compile('start: "wanted"') is wanted
        ended.clear()
        may_go_on.set()
        assert isinstance(wanted.result(WAIT_SECS), Grammar)
        assert len(compiled) <= 2, "the one that a thread had begun, and the one that is wanted"
        del wanted
        compiler.compile('start: "wanted"').result(WAIT_SECS)
        assert compiled.count('start: "wanted"') == 1, "it is kept"
    finally:
        may_go_on.set()
        compiler.close()


@pytest.mark.I7
def test_tokens_that_cannot_be_read_now_are_read_again_for_the_next_request() -> None:
    """As where the process had no descriptor left for their file."""
    faults = [GrammarError("tokenizer.json: cannot be read"), MemoryError("1 GiB wanted")]

    def load() -> TokenTrie:
        if faults:
            raise faults.pop(0)
        return trie()

    compiler = Compiler(load, lambda: None)
    try:
        for told in ("cannot be read", "1 GiB wanted"):
            with pytest.raises(GrammarError, match=told):
                compiler.compile('start: "a"').result(WAIT_SECS)
        assert isinstance(compiler.compile('start: "a"').result(WAIT_SECS), Grammar)
    finally:
        compiler.close()
