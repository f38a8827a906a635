"""Grammars for an engine: compiled in threads beside its turns, and kept for the next request.

What an engine is sent has been checked (``checker.py``), so that a compilation takes about as long here as
it took there. llguidance lets the engine's thread run meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from grammar.matcher import GrammarError
from grammar.token_trie import Grammar, TokenTrie

MAX_KEPT: Final = 32
"""Grammars that no request needs to be live for."""
_NUM_THREADS = 2


class Compiler:
    """Called by one thread."""

    def __init__(self, load: Callable[[], TokenTrie], on_ready: Callable[[], None]) -> None:
        """``load``: makes the trie, when the first grammar comes. ``on_ready``: called by another thread
        whenever one is compiled, or is not to be had."""
        self._load = load
        self._on_ready = on_ready
        self._trie: Future[TokenTrie] | None = None
        self._grammars: OrderedDict[str, Future[Grammar]] = OrderedDict()
        """The latest asked for last."""
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammars")

    def ask(self, text: str) -> Future[Grammar]:
        """Its result, when there is one, is the grammar; it raises GrammarError where there cannot be one."""
        if self._trie is None:
            self._trie = self._threads.submit(self._load)
        grammar = self._grammars.pop(text, None)
        if grammar is None:
            grammar = self._threads.submit(_compile, self._trie, text)
            grammar.add_done_callback(lambda _: self._on_ready())
        self._grammars[text] = grammar
        if len(self._grammars) > MAX_KEPT:
            self._grammars.popitem(last=False)  # who waits for it has it
        return grammar

    def close(self) -> None:
        """What is not begun is cancelled. Does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _compile(trie: Future[TokenTrie], text: str) -> Grammar:
    try:
        return trie.result().compile(text)
    except GrammarError:
        raise
    except BaseException as error:  # Rust's panics are no Exception; engines expect a GrammarError alone
        raise GrammarError(f"it cannot be compiled: {type(error).__name__}: {error}") from error
