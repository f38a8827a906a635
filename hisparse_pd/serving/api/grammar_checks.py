"""Grammars of requests, checked before an engine sees them: in a process beside the front, in turn.

A check costs a core for a second at most, and its front nothing but the wait. What came out is remembered,
unless it may come out differently the next time.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from hisparse_pd.core import grammar
from hisparse_pd.core.grammar.checker import MAX_CLOCK_SECS, MAX_CORE_SECS, Verdict
from hisparse_pd.core.grammar.token_trie import MAX_GRAMMAR_BYTES
from hisparse_pd.core.grammar.turns import Turns
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused

MAX_WAITING = 64
"""Checks of a front that are asked for and not over."""
_MAX_REMEMBERED = 4096
_ANSWER_SECS = 3 * MAX_CLOCK_SECS
"""Of the helper, which may have to read the tokenizer first."""


class GrammarChecks:
    """Of one front and its checkpoint. The process is started by the first grammar."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_id: int) -> None:
        self._arguments = [str(tokenizer_json), str(vocab_size), str(eos_token_id)]
        self._process: subprocess.Popen[bytes] | None = None
        self._turns = Turns(1, "grammar-checks")
        self._num_waiting = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """By a text's hash, what is wrong with it, or "". The latest asked for last."""

    async def check(self, text: str, field: str) -> None:
        """Raises ApiError 400, which names ``field`` and the bound that the grammar is over, and 503 when too
        many are waiting, or nothing certain came out."""
        encoded = text.encode(errors="replace")
        if len(encoded) > MAX_GRAMMAR_BYTES:
            raise _refusal(field, f"has {len(encoded)} bytes, {MAX_GRAMMAR_BYTES} are the most")
        key = blake2b(encoded).digest()
        error = self._known.get(key)
        if error is None:
            verdict = await self._ask(encoded)
            if not verdict.is_certain:
                raise ApiError(503, f"{field}: the grammar {verdict.error}; try again", param=field)
            error = self._known[key] = verdict.error
            if len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if error:
            raise _refusal(field, error)

    async def _ask(self, encoded: bytes) -> Verdict:
        if self._num_waiting >= MAX_WAITING:
            raise ApiError(
                503,
                f"{MAX_WAITING} grammars wait to be compiled here, {MAX_CORE_SECS:g} s each at most; "
                "try again",
            )
        self._num_waiting += 1
        asked = self._turns.submit(len(encoded), self._answer, encoded)
        try:
            return await asyncio.wrap_future(asked)
        finally:
            self._num_waiting -= 1

    def _answer(self, encoded: bytes) -> Verdict:
        """In the thread. A helper that has ended, or says nothing, is replaced, once."""
        for _ in range(2):
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(encoded.decode()).encode() + b"\n")
                process.stdin.flush()
                is_said, *_ = select.select([process.stdout], [], [], _ANSWER_SECS)
                if is_said and (answer := process.stdout.readline()):
                    return Verdict(*json.loads(answer))
            except BrokenPipeError:
                pass
            self._stop()
        return Verdict(
            "could not be tried: the process that compiles grammars ends at once", is_certain=False
        )

    def _start(self) -> subprocess.Popen[bytes]:
        """It ends with this process, which closes its input."""
        home = str(Path(grammar.__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hisparse_pd.core.grammar.checker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])},
        )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """Waits for the check that is under way."""
        self._turns.close(wait=True)
        self._stop()


def _refusal(field: str, error: str) -> ApiError:
    return FieldRefused(field, f"the grammar {error}", code="invalid_grammar")
