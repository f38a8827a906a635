"""Checks a client's grammar by compiling it in a process that can be killed.

A decode node's front starts ``python -m hisparse_pd.core.grammar.checker TOKENIZER_JSON VOCAB_SIZE EOS`` and
asks it before it accepts a request with a grammar. This process has the token trie. Each line of JSON on its
input is a grammar, for which it forks a child. The child compiles with bounded CPU time, memory and stack,
because a grammar may exhaust any of them and Rust aborts a process whose stack overflows. The answer is a
line of JSON, too: a ``Verdict``.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Final, NamedTuple

from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import MAX_GRAMMAR_BYTES, TokenTrie

MAX_CORE_SECS: Final = 1.0
"""CPU time for compiling one grammar, which does not depend on how busy the machine is."""
MAX_MEMORY_BYTES: Final = 64 << 20
"""Memory for compiling one grammar, beside what the trie takes."""
MAX_STACK_BYTES: Final = 1 << 20
"""Stack for compiling one grammar; every thread of an engine has more."""
MAX_CLOCK_SECS: Final = 20.0
"""Time by the clock for compiling one grammar, because a process that waits uses no CPU time."""

_VERDICT_OF_SIGNAL: dict[int, str] = {
    signal.SIGPROF: f"takes more than {MAX_CORE_SECS:g} s of a core to compile: make it smaller",
    signal.SIGSEGV: f"is nested too deeply: compiling takes more than {MAX_STACK_BYTES >> 10} KiB of stack",
    signal.SIGABRT: f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory to compile: make it smaller",
}
"""The errors of grammars by the signal that ended the child at one of its bounds. Any other signal comes from
the kernel or an operator, and tells nothing about the grammar."""


class Verdict(NamedTuple):
    """The result of a check.

    ``error``: the end of a sentence that begins with "the grammar", or "" for a usable one. ``is_certain``:
    whether another check would have the same result.
    """

    error: str
    is_certain: bool = True


def main(argv: list[str]) -> int:
    """Answer for each grammar on the input, until it ends. ``argv``: TOKENIZER_JSON, VOCAB_SIZE, EOS."""
    tokenizer_json, vocab_size, eos_token_id = argv
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they are for the front
        signal.signal(number, signal.SIG_IGN)
    trie: TokenTrie | None = None
    verdict = Verdict("")
    try:
        trie = TokenTrie(Path(tokenizer_json).read_text("utf-8"), int(vocab_size), [int(eos_token_id)])
    except (OSError, GrammarError) as raised:
        verdict = Verdict(f"cannot be used: {raised}")
    for line in sys.stdin:  # ends when the front is gone
        if trie is not None:  # otherwise each grammar gets the error of the trie
            verdict = check(trie, json.loads(line))
        print(json.dumps(verdict), flush=True)
    return 0


def check(trie: TokenTrie, text: str) -> Verdict:
    """Compile a grammar in a forked child. The calling process must have no other thread."""
    if (num_bytes := len(text.encode())) > MAX_GRAMMAR_BYTES:
        return Verdict(f"has {num_bytes} bytes, {MAX_GRAMMAR_BYTES} are the most")
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return Verdict(f"cannot be tried: {error}", is_certain=False)
    if child == 0:
        os.close(reader)
        _compile_and_exit(trie, text, writer)
    os.close(writer)
    is_late = False
    try:
        is_over, *_ = select.select([reader], [], [], MAX_CLOCK_SECS)
        if not is_over:
            is_late = True
            os.kill(child, signal.SIGKILL)
        output = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    finally:
        os.close(reader)
        _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return Verdict(output.decode(errors="replace"))
    if is_late:
        return Verdict(f"is not compiled after {MAX_CLOCK_SECS:g} s of a busy machine", is_certain=False)
    if not os.WIFSIGNALED(status):
        return Verdict("could not be tried", is_certain=False)
    number = os.WTERMSIG(status)
    if number in _VERDICT_OF_SIGNAL:
        return Verdict(_VERDICT_OF_SIGNAL[number])
    return Verdict(f"was not compiled: signal {number} ended its compiler", is_certain=False)


def _compile_and_exit(trie: TokenTrie, text: str, writer: int) -> None:
    """Compile in the child, within its bounds, write the error to ``writer``, and exit."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust's messages when it aborts would fill a log
        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft_limit = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, MAX_STACK_BYTES))
        resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))
        signal.setitimer(signal.ITIMER_PROF, MAX_CORE_SECS)
        try:
            trie.compile(text)
        except GrammarError as error:
            os.write(writer, f"is not usable: {error}".encode())
        except BaseException as error:  # Rust's panics are no Exception
            os.write(writer, f"cannot be read: {type(error).__name__}".encode())
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
