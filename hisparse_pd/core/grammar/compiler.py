"""Compiles an engine's grammars in threads beside its loop and keeps them for later requests.

Each grammar has passed ``checker.py``, so compiling takes about as long as it took there. A grammar is
compiled only while somebody waits for it: the caller keeps the future and drops it when the request ends.
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
"""Compiled grammars that are kept although no request uses them."""
MAX_WAIT_SECS: Final = 60.0
"""How long a request waits for its grammar; then the engine ends the request."""
_NUM_THREADS = 2


class Compiler:
    """The grammars of one engine. Its methods are called by one thread."""

    def __init__(self, load: Callable[[], TokenTrie], on_ready: Callable[[], None]) -> None:
        """``load``: makes the trie when the first grammar is asked for. ``on_ready``: called by another
        thread whenever a grammar is compiled or has failed."""
        self._load = load
        self._on_ready = on_ready
        self._trie: Future[TokenTrie] | None = None
        self._lock = Lock()
        self.kept: OrderedDict[str, Future[Grammar]] = OrderedDict()
        """Compiled grammars by their text, the most recently asked for last."""
        self._asked: WeakValueDictionary[str, Future[Grammar]] = WeakValueDictionary()
        """Futures that a caller still has, by the grammar's text."""
        self._turns = Turns(_NUM_THREADS, "grammars")

    def ask(self, text: str, begun: Sequence[int] = ()) -> Future[Grammar]:
        """Return a future of the compiled grammar, or of a GrammarError.

        Compiling is skipped once nobody has the future. ``begun``: tokens that the output has already; such a
        grammar is not shared.
        """
        if self._trie is None:
            self._trie = self._turns.submit(0, self._load)
        if len(begun):
            resumed = self._turns.submit(len(text), _compile, self._trie, text, begun)
            resumed.add_done_callback(lambda _: self._on_ready())
            return resumed
        with self._lock:
            grammar = self.kept.get(text) or self._asked.get(text)
            if text in self.kept:
                self.kept.move_to_end(text)
        if grammar is None:
            grammar = self._turns.submit(len(text), _compile, self._trie, text)
            self._asked[text] = grammar
            grammar.add_done_callback(partial(self._done, text))
        return grammar

    def close(self) -> None:
        """Cancel what has not begun, without waiting for the rest."""
        self._turns.close(wait=False)

    def _done(self, text: str, grammar: Future[Grammar]) -> None:
        with self._lock:
            self.kept[text] = grammar
            if len(self.kept) > MAX_KEPT:
                self.kept.popitem(last=False)  # its waiters have the future
        self._on_ready()


def _compile(trie: Future[TokenTrie], text: str, begun: Sequence[int] = ()) -> Grammar:
    try:
        return trie.result().compile(text, begun)
    except GrammarError:
        raise
    except BaseException as error:  # Rust's panics are no Exception; engines expect a GrammarError alone
        raise GrammarError(f"it cannot be compiled: {type(error).__name__}: {error}") from error
