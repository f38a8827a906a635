"""Checks the grammars of requests before an engine sees them, one at a time in a process beside the front.

``TextCodec.check_grammar`` calls ``GrammarChecks.check`` for each grammar of a request. A check takes a core
for a second at most, in a helper process (``core/grammar/checker.py``) that a thread of the front asks. A
result is remembered if it is certain, that is, if a repetition would give the same.
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
from hisparse_pd.core.grammar.compile_threads import compile_threads
from hisparse_pd.core.grammar.token_trie import MAX_GRAMMAR_BYTES
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused

MAX_WAITING = 64
"""Most checks of a front that wait or run."""
_MAX_REMEMBERED = 4096
_ANSWER_SECS = 3 * MAX_CLOCK_SECS
"""Longest wait for the helper process, which may have to read the tokenizer first."""


class GrammarChecks:
    """The checks of one front. The first grammar starts the helper process."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_id: int) -> None:
        self._arguments = [str(tokenizer_json), str(vocab_size), str(eos_token_id)]
        self.process: subprocess.Popen[bytes] | None = None
        self._threads = compile_threads(1, "grammar-checks")
        self._num_waiting = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """Error of each known grammar, "" if it is fine, by its text's hash; the latest one used is last."""

    async def check(self, text: str, field: str) -> None:
        """Raises ApiError 400, which names ``field`` and the bound that the grammar exceeds, and 503 where
        too many checks wait or the result is not certain."""
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
        # The size lets short grammars overtake long ones (``compile_threads``).
        asked = self._threads.submit(len(encoded), self.answer, encoded)
        try:
            return await asyncio.wrap_future(asked)
        finally:
            self._num_waiting -= 1

    def answer(self, encoded: bytes) -> Verdict:
        """Ask the helper process and wait for its answer. A helper that has ended or does not answer is
        replaced once. ``_threads`` has one thread, so that calls come one at a time and need no lock."""
        for _ in range(2):
            process = self.process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(encoded.decode()).encode() + b"\n")
                process.stdin.flush()
                readable, *_ = select.select([process.stdout], [], [], _ANSWER_SECS)
                if readable and (answer := process.stdout.readline()):
                    return Verdict(*json.loads(answer))
            except BrokenPipeError:
                pass
            self._stop()
        return Verdict(
            "could not be tried: the process that compiles grammars ends at once", is_certain=False
        )

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the helper. It ends when its input is closed, so it ends with this process."""
        home = str(Path(grammar.__file__).parents[3])  # the folder with the package
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hisparse_pd.core.grammar.checker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")])),
            },
        )
        return self.process

    def _stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """Wait for the check that runs, and end the helper."""
        self._threads.close(wait=True)
        self._stop()


def _refusal(field: str, error: str) -> ApiError:
    return FieldRefused(field, f"the grammar {error}", code="invalid_grammar")
