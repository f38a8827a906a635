"""Tries grammars in processes that can be ended.

``python -m hisparse_pd.core.grammar.checker TOKENIZER_JSON VOCAB_SIZE EOS`` is a front's helper. It has the
token trie, and forks itself for each text, a line of JSON, which is compiled there with so much of a core's
time, of memory and of stack: Rust ends a process whose stack overflows. Each is answered with such a line, a
``Verdict``.
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
"""Of one core, for one grammar: however busy the machine is."""
MAX_MEMORY_BYTES: Final = 64 << 20
"""That compiling takes, above what the trie has."""
MAX_STACK_BYTES: Final = 1 << 20
"""Less than any thread of an engine has."""
MAX_CLOCK_SECS: Final = 20.0
"""By the clock: a process that waits for something uses no time of a core."""

_CERTAIN: dict[int, str] = {
    signal.SIGPROF: f"takes more than {MAX_CORE_SECS:g} s of a core to compile: make it smaller",
    signal.SIGSEGV: f"is nested too deeply: compiling takes more than {MAX_STACK_BYTES >> 10} KiB of stack",
    signal.SIGABRT: f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory to compile: make it smaller",
}
"""By the signal that ends a process over one of its own bounds. Another one, of the kernel or of an operator,
says nothing of the grammar."""


class Verdict(NamedTuple):
    """``error``: what is wrong with the grammar, as the end of a sentence that begins with "the grammar"; or
    "". ``is_certain``: it will be so the next time, too."""

    error: str
    is_certain: bool = True


def main(argv: list[str]) -> int:
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
    for line in sys.stdin:  # until the front is gone
        if trie is not None:
            verdict = check(trie, json.loads(line))
        print(json.dumps(verdict), flush=True)
    return 0


def check(trie: TokenTrie, text: str) -> Verdict:
    """Forks: the process has no other thread."""
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
        _try(trie, text, writer)
    os.close(writer)
    is_late = False
    try:
        is_over, *_ = select.select([reader], [], [], MAX_CLOCK_SECS)
        if not is_over:
            is_late = True
            os.kill(child, signal.SIGKILL)
        said = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    finally:
        os.close(reader)
        _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return Verdict(said.decode(errors="replace"))
    if is_late:
        return Verdict(f"is not compiled after {MAX_CLOCK_SECS:g} s of a busy machine", is_certain=False)
    if not os.WIFSIGNALED(status):
        return Verdict("could not be tried", is_certain=False)
    number = os.WTERMSIG(status)
    if number in _CERTAIN:
        return Verdict(_CERTAIN[number])
    return Verdict(f"was not compiled: signal {number} ended its compiler", is_certain=False)


def _try(trie: TokenTrie, text: str, writer: int) -> None:
    """In the process of its own, which ends here."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what Rust says of its end would fill a log
        now = resource.getrlimit(resource.RLIMIT_AS)[1]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK_BYTES, MAX_STACK_BYTES))
        resource.setrlimit(resource.RLIMIT_AS, (most, now))
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
