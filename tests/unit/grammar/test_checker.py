"""Grammars that a compiler does not survive, or that take too long: what a check says before it goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from hisparse_pd.core.grammar.compiler import MAX_KEPT, Compiler
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import MAX_GRAMMAR_BYTES, Grammar, TokenTrie
from tests.unit.grammar.tries import EOS, VOCAB_SIZE, schema, tokenizer_json, trie
from tests.waiting import NEVER_SECS, WAIT_SECS

pytestmark = pytest.mark.I8

ROOT = Path(__file__).resolve().parents[3]


PATIENT = f"""
import sys
from hisparse_pd.core.grammar import checker

checker.MAX_CLOCK_SECS = {NEVER_SECS}
sys.exit(checker.main(sys.argv[1:]))
"""
"""A helper of a front to which a second of a core comes in time, however many others want the core."""


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A function that returns what a front's helper says of a grammar."""
    file = tmp_path_factory.mktemp("checker") / "tokenizer.json"
    file.write_text(tokenizer_json())
    command = [sys.executable, "-c", PATIENT, str(file), str(VOCAB_SIZE), str(EOS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def ask(text: str) -> str:
            stdin.write(json.dumps(text).encode() + b"\n")
            stdin.flush()
            error, is_certain = json.loads(stdout.readline())
            assert is_certain
            return str(error)

        yield ask
        stdin.close()
        assert process.wait(WAIT_SECS) == 0, "it ends with its front"


def chain(length: int) -> dict[str, Any]:
    links = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}
    return {"$defs": links | {f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (schema({"type": "object"}), ""),
        (schema(chain(20)), ""),
        (schema({"minLength": 10_000_000, "type": "string"}), ""),
        (schema({"items": {"type": "integer"}, "maxItems": 10**9}), ""),
        ("start: /(.*a.{20}){3}/", ""),
        (schema(chain(3000)), "nested too deeply"),
        (schema({"type": "integer", "multipleOf": 1_000_003}), "make it smaller"),
        ("start: " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply nested"),
        ("start: " + "[" * 40_000, "too deeply nested"),
        ('start: "' + "a" * MAX_GRAMMAR_BYTES + '"', str(MAX_GRAMMAR_BYTES)),
        (schema({"type": "strnig"}), "is not usable"),
    ],
    ids=lambda value: value[:40] or "fine",
)
def test_what_a_check_says(check: Callable[[str], str], text: str, said: str) -> None:
    error = check(text)
    assert said in error
    assert bool(error) == bool(said)
    assert check('start: "a"') == ""


INTERRUPTED = """
import os, signal, sys, time
from hisparse_pd.core.grammar import checker

class Trie:
    def compile(self, text):
        {what}

checker.MAX_CLOCK_SECS = {clock_secs}
print(*checker.check(Trie(), "start: /a/"), sep="|")
"""


@pytest.mark.parametrize(
    ("what", "verdict"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was not compiled: signal 9 ended its compiler|False"),
        ("time.sleep(600)", "is not compiled after 0.2 s of a busy machine|False"),
        (
            "os.kill(os.getpid(), signal.SIGPROF)",
            "takes more than 1 s of a core to compile: make it smaller|True",
        ),
        ("raise BaseException('panic')", "cannot be read: BaseException|True"),
    ],
)
def test_only_what_the_grammar_did_is_certain(what: str, verdict: str) -> None:
    """The check runs in a process without other threads, because it forks."""
    script = INTERRUPTED.format(what=what, clock_secs=0.2 if "sleep" in what else NEVER_SECS)
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True, text=True)
    assert ran.stdout.strip() == verdict


def test_a_grammar_is_compiled_once_and_kept_while_it_is_asked_for() -> None:
    with closing(Compiler(trie, lambda: None)) as compiler:
        first = compiler.compile('start: "a"')
        assert isinstance(first.result(WAIT_SECS), Grammar)
        for number in range(MAX_KEPT - 1):  # one by one, because two that compile at once end in either order
            assert isinstance(compiler.compile(f'start: "{number}"').result(WAIT_SECS), Grammar)
        assert compiler.compile('start: "a"') is first
        compiler.compile('start: "one more"').result(WAIT_SECS)
        assert compiler.compile('start: "a"') is first
        assert compiler.kept.keys().isdisjoint(['start: "0"'])
        assert len(compiler.kept) == MAX_KEPT


def test_who_asks_does_not_wait_and_is_told() -> None:
    may_go_on, is_told = Event(), Event()

    def slow() -> TokenTrie:
        assert may_go_on.wait(WAIT_SECS)
        return trie()

    compiler = Compiler(slow, is_told.set)
    try:
        future: Future[Grammar] = compiler.compile("start: (((")
        assert not future.done()
        may_go_on.set()
        assert is_told.wait(WAIT_SECS)
        with pytest.raises(GrammarError, match="Expected token"):
            future.result()
    finally:
        may_go_on.set()
        compiler.close()


class _Panic(BaseException):
    """A panic of Rust, as Python gets it: no subclass of Exception."""


def panics() -> TokenTrie:
    raise _Panic("index out of bounds")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda: TokenTrie.load(Path("nowhere"), 300, [1]), r"tokenizer\.json: cannot be read"),
        (panics, "_Panic: index out of bounds"),
    ],
    ids=["no tokenizer", "a panic"],
)
def test_whatever_ends_a_compilation_is_an_error_of_its_grammar(
    load: Callable[[], TokenTrie], reason: str
) -> None:
    """An engine's loop reads the result, and expects no other error."""
    with closing(Compiler(load, lambda: None)) as compiler, pytest.raises(GrammarError, match=reason):
        compiler.compile('start: "a"').result(WAIT_SECS)
