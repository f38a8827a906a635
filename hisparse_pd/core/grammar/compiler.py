"""Compiles a decode engine's grammars in threads beside its loop, and keeps them for later requests.

``decode_node/step_masks.py`` calls ``compile`` for a request with a grammar, which waits until the future is
done. Each grammar has passed ``checker.py``, so compiling takes about as long as it took there. The caller
keeps the future and drops it when the request ends: a grammar whose future nobody has is not compiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, Final
from weakref import WeakValueDictionary

from hisparse_pd.core.grammar.compile_threads import compile_threads
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import Grammar, TokenTrie

MAX_KEPT: Final = 32
"""Compiled grammars that are kept although no request uses them."""
MAX_WAIT_SECS: Final = 60.0
"""Longest wait of a request for its grammar, after which the engine ends the request."""
_NUM_THREADS = 2


class Compiler:
    """The grammars of one engine. Its methods are called by one thread."""

    def __init__(self, load: Callable[[], TokenTrie], on_ready: Callable[[], None]) -> None:
        """``load``: makes the trie, at the first ``compile``. ``on_ready``: called by any thread, whenever a
        grammar is compiled or has failed."""
        self._load = load
        self._on_ready = on_ready
        self._trie: Future[TokenTrie] | None = None
        self._lock = Lock()
        self.kept: OrderedDict[str, Future[Grammar]] = OrderedDict()
        """Grammars that are compiled or cannot be compiled, by their text, the most recently used last."""
        self._in_use: WeakValueDictionary[str, Future[Grammar]] = WeakValueDictionary()
        """Futures that a caller still has, by the grammar's text."""
        self._threads = compile_threads(_NUM_THREADS, "grammars")

    def compile(self, text: str, output: Sequence[int] = ()) -> Future[Grammar]:
        """Return a future of the compiled grammar, or of a GrammarError.

        Compiling is skipped once nobody has the future. ``output``: tokens that a resumed request's output
        has already; its grammar is not shared.
        """
        if self._trie is None or _has_failed(self._trie):
            # Threads take the first waiting call and the shortest one in turn. Making the trie is both, with
            # size 0, so it begins before any grammar; ``_compile`` waits for it.
            self._trie = self._threads.submit(0, self._load)
        if len(output):
            resumed = self._threads.submit(len(text), _compile, self._trie, text, output)
            resumed.add_done_callback(lambda _: self._on_ready())
            return resumed
        with self._lock:
            grammar = self.kept.get(text) or self._in_use.get(text)
            if grammar is not None and _has_failed(grammar, _NoTokens):  # there may be some by now
                grammar = None
            if text in self.kept:
                self.kept.move_to_end(text)
        if grammar is None:
            grammar = self._threads.submit(len(text), _compile, self._trie, text)
            self._in_use[text] = grammar
            grammar.add_done_callback(partial(self._on_compiled, text))
        return grammar

    def close(self) -> None:
        """Cancel calls that have not begun, without waiting for the others."""
        self._threads.close(wait=False)

    def _on_compiled(self, text: str, grammar: Future[Grammar]) -> None:
        with self._lock:
            self.kept[text] = grammar
            if len(self.kept) > MAX_KEPT:
                self.kept.popitem(last=False)  # requests that use it have the future
        self._on_ready()


class _NoTokens(GrammarError):
    """The trie could not be made, which may be possible later; the grammar may be fine."""


def _has_failed(future: Future[Any], error: type[BaseException] = BaseException) -> bool:
    """Return whether a call has ended with an ``error``."""
    is_over = future.done() and not future.cancelled()
    return is_over and isinstance(future.exception(), error)


def _compile(trie: Future[TokenTrie], text: str, output: Sequence[int] = ()) -> Grammar:
    try:
        tokens = trie.result()
    except GrammarError as error:
        raise _NoTokens(str(error)) from error
    except BaseException as error:
        raise _NoTokens(f"its tokens cannot be read: {type(error).__name__}: {error}") from error
    try:
        return tokens.compile(text, output)
    except GrammarError:
        raise
    except BaseException as error:  # Rust's panics are no Exception; engines expect a GrammarError alone
        raise GrammarError(f"it cannot be compiled: {type(error).__name__}: {error}") from error
