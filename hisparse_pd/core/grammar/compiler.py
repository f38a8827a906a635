"""Grammars for an engine: compiled in threads beside its turns, and kept for the next request.

What an engine is sent has been checked (``checker.py``), so it takes about as long as it took there. Only
what somebody waits for is compiled: who asks keeps the future, and lets go of it at its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Final
from weakref import WeakValueDictionary

from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import Grammar, TokenTrie
from hisparse_pd.core.grammar.turns import Turns

MAX_KEPT: Final = 32
"""Grammars that no request needs to be live for."""
MAX_WAIT_SECS: Final = 60.0
"""Of a request for its grammar; the engine that asked for it ends the request."""
_NUM_THREADS = 2


class Compiler:
    """Called by one thread."""

    def __init__(self, load: Callable[[], TokenTrie], on_ready: Callable[[], None]) -> None:
        """``load``: makes the trie, when the first grammar comes. ``on_ready``: called by another thread
        whenever one is compiled, or is not to be had."""
        self._load = load
        self._on_ready = on_ready
        self._trie: Future[TokenTrie] | None = None
        self._lock = Lock()
        self._kept: OrderedDict[str, Future[Grammar]] = OrderedDict()
        """Compiled ones, the latest asked for last."""
        self._asked: WeakValueDictionary[str, Future[Grammar]] = WeakValueDictionary()
        """Those that somebody has."""
        self._turns = Turns(_NUM_THREADS, "grammars")

    def ask(self, text: str, begun: Sequence[int] = ()) -> Future[Grammar]:
        """Its result is the grammar; it raises GrammarError where there cannot be one. It is compiled as long
        as somebody has the future. ``begun``: tokens of an output that goes on behind them; such a grammar is
        nobody else's."""
        if self._trie is None:
            self._trie = self._turns.submit(0, self._load)
        if len(begun):
            resumed = self._turns.submit(len(text), _compile, self._trie, text, begun)
            resumed.add_done_callback(lambda _: self._on_ready())
            return resumed
        with self._lock:
            grammar = self._kept.get(text) or self._asked.get(text)
            if text in self._kept:
                self._kept.move_to_end(text)
        if grammar is None:
            grammar = self._turns.submit(len(text), _compile, self._trie, text)
            self._asked[text] = grammar
            grammar.add_done_callback(partial(self._done, text))
        return grammar

    def close(self) -> None:
        """What is not begun is cancelled. Does not wait."""
        self._turns.close(wait=False)

    def _done(self, text: str, grammar: Future[Grammar]) -> None:
        with self._lock:
            self._kept[text] = grammar
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)  # who waits for it has it
        self._on_ready()


def _compile(trie: Future[TokenTrie], text: str, begun: Sequence[int] = ()) -> Grammar:
    try:
        return trie.result().compile(text, begun)
    except GrammarError:
        raise
    except BaseException as error:  # Rust's panics are no Exception; engines expect a GrammarError alone
        raise GrammarError(f"it cannot be compiled: {type(error).__name__}: {error}") from error
