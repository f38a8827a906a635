"""Which library holds an answer to a JSON schema: llguidance and, where it is installed, xgrammar, in turns.

    python -m bench.grammars --suite DIR [--tokenizer FILE] [--out FILE]

``--suite``: a checkout of json-schema-org/JSON-Schema-Test-Suite. ``--tokenizer``: a tokenizer.json; without
one a byte-level vocabulary of 129,280 tokens is made up. Of each library:

- the suite's draft 2020-12, its optional parts and schemas of other documents left out: how many schemas it
  takes, and of those how many valid instances it allows and how many invalid ones too. What it refuses costs
  an error; what it allows wrongly breaks a promise.
- instances drawn from the masks, a few of each schema that it takes: how many come to an end, and how many
  of those ``jsonschema`` finds valid
- milliseconds to compile these schemas, and microseconds of a mask along the tokens of their valid instances
- hostile schemas, each in a process of its own: milliseconds to compile, the slowest mask or step of 64
  tokens drawn from the masks, and the memory that came with it.

xgrammar is no dependency: ``pip install --target DIR --no-deps xgrammar apache-tvm-ffi``, PYTHONPATH=DIR.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jsonschema
import numpy as np
import referencing.exceptions
import tokenizers
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.facts import OUT, run_facts
from grammar.matcher import GrammarError, fill_masks
from grammar.token_trie import Grammar, TokenTrie

VOCAB_SIZE = 129_280
EOS = 1
HOSTILE_SECS = 60.0
HOSTILE_TOKENS = 64
WALKS = 3
"""Of a schema."""
WALK_TOKENS = 40


class Matching(Protocol):
    """A grammar and how far its output has come."""

    def mask(self) -> NDArray[np.int32]:
        """[vocab_size / 32]: bits of the tokens that may follow. Raises ValueError where it gives up."""

    def take(self, token_id: int) -> bool: ...


class Library(Protocol):
    name: str

    def compile(self, schema: str) -> Matching:
        """Raises ValueError for a schema that it does not take."""


class _Llguidance:
    """As the service uses it, but for the checks in a process of their own."""

    name = "llguidance"

    def __init__(self, tokenizer: str) -> None:
        self._trie = TokenTrie(tokenizer, VOCAB_SIZE, [EOS])

    def compile(self, schema: str) -> Matching:
        return _LlguidanceMatching(self._trie.compile(f"start: %json {schema}"))


class _LlguidanceMatching:
    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher(ignore_eos=False)
        self._rows = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)

    def mask(self) -> NDArray[np.int32]:
        fill_masks(self._rows, [(self._matcher, 0, ())])
        if error := self._matcher.error:
            raise ValueError(error)
        return self._rows[0]

    def take(self, token_id: int) -> bool:
        try:
            self._matcher.advance(token_id)
        except GrammarError:
            return False
        return True


class _Xgrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: str) -> None:
        import xgrammar

        vocabulary = tokenizers.Tokenizer.from_str(tokenizer).get_vocab()
        info = xgrammar.TokenizerInfo(
            [text for text, _ in sorted(vocabulary.items(), key=lambda item: item[1])],
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=VOCAB_SIZE,
            stop_token_ids=[EOS],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Matching:
        import xgrammar

        try:
            compiled = self._compiler.compile_json_schema(schema, strict_mode=False)
        except (RuntimeError, xgrammar.InvalidJSONError) as error:
            raise ValueError(str(error)) from error
        return _XgrammarMatching(xgrammar.GrammarMatcher(compiled))


class _XgrammarMatching:
    def __init__(self, matcher: Any) -> None:
        import torch

        self._matcher = matcher
        self._rows = torch.zeros((1, VOCAB_SIZE // 32), dtype=torch.int32)
        self._bits: NDArray[np.int32] = self._rows[0].numpy()

    def mask(self) -> NDArray[np.int32]:
        self._rows.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._rows)
        return self._bits

    def take(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


LIBRARIES: tuple[type[_Llguidance] | type[_Xgrammar], ...] = (_Llguidance, _Xgrammar)


def synthetic_tokenizer() -> str:
    """A byte-level tokenizer.json of VOCAB_SIZE tokens: bytes, words of JSON, and made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(0)
    vocabulary = {"<pad>": 0, "<eos>": EOS}
    for byte in pre_tokenizers.ByteLevel.alphabet():
        vocabulary[byte] = len(vocabulary)
    for text in ('{"', '":', '",', '","', '":"', '"}', "},", "],", "[]", "{}", "true", "false", "null"):
        vocabulary.setdefault(text, len(vocabulary))
    while len(vocabulary) < VOCAB_SIZE:
        letters = "etaoinshrdlucmwfgypbvkjxqz" if rng.random() < 0.9 else "0123456789-_.,:;/"
        word = "".join(rng.choices(letters, k=rng.randint(2, 9)))
        vocabulary.setdefault("Ġ" + word if rng.random() < 0.5 else word, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return str(tokenizer.to_str())


@dataclass
class Coverage:
    schemas: int = 0
    taken: int = 0
    valid: int = 0
    valid_allowed: int = 0
    invalid: int = 0
    invalid_allowed: int = 0
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    drawn: int = 0
    drawn_valid: int = 0
    wrong: list[str] = field(default_factory=list)
    """Invalid instances that were allowed or drawn."""


def cover(library: Library, suite: Path, backend: tokenizers.Tokenizer, walks: Walks) -> Coverage:
    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    rng = np.random.default_rng(1)
    coverage = Coverage()
    for file in sorted((suite / "tests" / "draft2020-12").glob("*.json")):
        if file.stem in {"refRemote", "vocabulary"}:
            continue
        for case in json.loads(file.read_text()):
            coverage.schemas += 1
            schema = json.dumps(case["schema"])
            started = time.perf_counter()
            try:
                library.compile(schema)
            except ValueError:
                continue
            coverage.compile_ms.append(1e3 * (time.perf_counter() - started))
            coverage.taken += 1
            for _ in range(WALKS):
                text = walks.walk(library.compile(schema), rng)
                is_valid = None if text is None else is_instance(text, case["schema"])
                if is_valid is not None:
                    coverage.drawn += 1
                    coverage.drawn_valid += is_valid
                    if not is_valid:
                        coverage.wrong.append(f"{file.stem}: {case['description']}: drew {text[:200]}")
            for test in case["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
                mask_us: list[float] = []
                is_allowed = allows(library.compile(schema), encode(text), mask_us)
                if test["valid"]:
                    coverage.valid += 1
                    coverage.valid_allowed += is_allowed
                    coverage.mask_us += mask_us
                else:
                    coverage.invalid += 1
                    coverage.invalid_allowed += is_allowed
                    if is_allowed:
                        coverage.wrong.append(f"{file.stem}: {case['description']}: {test['description']}")
    return coverage


def allows(matching: Matching, token_ids: Sequence[int], mask_us: list[float]) -> bool:
    """Whether the masks allow these tokens and then the end; adds what each mask took."""
    for token_id in (*token_ids, EOS):
        started = time.perf_counter()
        try:
            bits = matching.mask()
        except ValueError:
            return False
        mask_us.append(1e6 * (time.perf_counter() - started))
        if not (int(bits[token_id // 32]) >> token_id % 32) & 1:
            return False
        if token_id != EOS and not matching.take(token_id):
            return False
    return True


class Walks:
    """Texts of tokens drawn from masks."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        texts = [backend.decode([token_id]) for token_id in range(VOCAB_SIZE)]
        self._openness = np.array([_openness(text) for text in texts])

    def walk(self, matching: Matching, rng: np.random.Generator) -> str | None:
        """None where it came to no end. After WALK_TOKENS it takes the end, or what closes most, wherever
        that may come."""
        token_ids: list[int] = []
        for number in range(4 * WALK_TOKENS):
            try:
                bits = matching.mask()
            except ValueError:
                return None
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0]
            others = allowed[allowed != EOS]
            if len(others) < len(allowed) and (not len(others) or number > WALK_TOKENS or rng.random() < 0.3):
                return str(self._backend.decode(token_ids))
            if not len(others):
                return None
            if number > WALK_TOKENS:
                openness = self._openness[others]
                others = others[openness == openness.min()]
            token_ids.append(int(rng.choice(others)))
            if not matching.take(token_ids[-1]):
                return None
        return None


def _openness(text: str) -> int:
    return (not text.strip()) + sum(map(text.count, "{[:,")) - sum(map(text.count, '}]"'))


def is_instance(text: str, schema: Any) -> bool | None:
    """None where jsonschema cannot say: Python's regular expressions have no \\p, and nothing is fetched."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    except (re.error, referencing.exceptions.Unresolvable):
        return None
    return True


def hostile_schemas() -> Iterator[tuple[str, str]]:
    deep: Any = {"type": "integer"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"x": deep}, "required": ["x"], "additionalProperties": False}
    yield "objects nested 40 deep", json.dumps(deep)
    chain = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(3000)}
    yield "chain of 3,000 $ref", json.dumps({"$defs": chain | {"d3000": {}}, "$ref": "#/$defs/d0"})
    yield "enum of 100,000 strings", json.dumps({"enum": [f"value {n}" for n in range(100_000)]})
    yield "2,000 properties, none required", json.dumps({"properties": {f"p{n}": {} for n in range(2000)}})
    both: Any = {"type": "integer"}
    for _ in range(12):
        either = {"anyOf": [both, {"type": "string"}]}, {"anyOf": [{"items": both}, {"minLength": 1}]}
        both = {"allOf": either}
    yield "allOf of anyOf, 12 deep", json.dumps(both)
    yield "pattern .*a.{20}", json.dumps({"type": "string", "pattern": "^.*a.{20}$"})
    yield "pattern (x{0,999}){0,999}", json.dumps({"type": "string", "pattern": "^(x{0,999}){0,999}$"})
    yield "minLength 10,000,000", json.dumps({"type": "string", "minLength": 10_000_000})
    yield "maxLength 1,000,000", json.dumps({"type": "string", "maxLength": 1_000_000})
    yield "maxItems 1,000,000,000", json.dumps({"items": {"type": "integer"}, "maxItems": 10**9})
    yield "minItems 1,000,000", json.dumps({"type": "array", "minItems": 10**6})
    yield "multipleOf 1,000,003", json.dumps({"type": "integer", "multipleOf": 1_000_003})
    yield "$ref to itself", json.dumps({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    yield "recursive $ref", json.dumps({"properties": {"next": {"$ref": "#"}}, "required": ["next"]})


def in_child(work: Callable[[], str]) -> str:
    """What ``work`` says in a process of its own, or how that ended."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_say, args=(work, writer))
    process.start()
    writer.close()
    try:
        if not reader.poll(HOSTILE_SECS):
            return f"over {HOSTILE_SECS:.0f} s"
        return str(reader.recv())
    except EOFError:
        process.join()
        return f"the process died of signal {-(process.exitcode or 0)}"
    finally:
        process.kill()
        process.join()


def _say(work: Callable[[], str], writer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    writer.send(work())


def try_hostile(library: Library, schema: str) -> str:
    before = _max_rss_mb()
    started = time.perf_counter()
    try:
        matching = library.compile(schema)
    except (ValueError, MemoryError) as error:
        line = (str(error).splitlines() or [""])[0][:60]
        return f"{1e3 * (time.perf_counter() - started):,.0f} ms: refused ({line})"
    result = f"{1e3 * (time.perf_counter() - started):,.0f} ms"
    rng = random.Random(0)
    slowest = 0.0
    for _ in range(HOSTILE_TOKENS):
        started = time.perf_counter()
        try:
            bits = matching.mask()
        except ValueError:
            return f"{result}, {slowest:.1f} ms, gives up later, {_max_rss_mb() - before:,} MB"
        slowest = max(slowest, 1e3 * (time.perf_counter() - started))
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0]
        allowed = allowed[allowed != EOS]
        if not len(allowed):
            break
        started = time.perf_counter()
        if not matching.take(int(rng.choice(allowed))):
            break
        slowest = max(slowest, 1e3 * (time.perf_counter() - started))
    return f"{result}, {slowest:.1f} ms, {_max_rss_mb() - before:,} MB"


def _max_rss_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--out", type=Path, default=OUT / "grammars.json")
    arguments = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = arguments.tokenizer.read_text() if arguments.tokenizer else synthetic_tokenizer()
    backend = tokenizers.Tokenizer.from_str(tokenizer)
    console = Console(width=170)
    report: dict[str, Any] = {"facts": run_facts(), "tokenizer": str(arguments.tokenizer or "synthetic")}
    made: list[Library] = []
    for kind in LIBRARIES:
        if util.find_spec(kind.name) is None:
            console.print(f"{kind.name} is not installed")
            continue
        started = time.perf_counter()
        made.append(kind(tokenizer))
        report[kind.name] = {
            "version": metadata.version(kind.name),
            "start_secs": time.perf_counter() - started,
            "hostile": {},
        }
    table = Table("hostile schema", *(library.name for library in made))
    for name, schema in hostile_schemas():
        for library in made:
            report[library.name]["hostile"][name] = in_child(lambda: try_hostile(library, schema))  # noqa: B023
        table.add_row(name, *(report[library.name]["hostile"][name] for library in made))
    walks = Walks(backend)
    summary = Table("", *(library.name for library in made))
    for library in made:
        coverage = cover(library, arguments.suite, backend, walks)
        report[library.name]["suite"] = vars(coverage)
    for title, show in _SUMMARY.items():
        summary.add_row(title, *(show(report[library.name]) for library in made))
    console.print(summary, table)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _spread(values: Sequence[float]) -> str:
    *_, p99 = statistics.quantiles(values, n=100)
    return f"{statistics.median(values):,.2f}, p99 {p99:,.1f}, most {max(values):,.1f}"


_SUMMARY: dict[str, Callable[[dict[str, Any]], str]] = {
    "version": lambda row: str(row["version"]),
    "the vocabulary, s": lambda row: f"{row['start_secs']:.2f}",
    "schemas taken": lambda row: f"{row['suite']['taken']} of {row['suite']['schemas']}",
    "valid instances allowed": lambda row: f"{row['suite']['valid_allowed']} of {row['suite']['valid']}",
    "invalid ones allowed": lambda row: f"{row['suite']['invalid_allowed']} of {row['suite']['invalid']}",
    "instances drawn that are valid": lambda row: (
        f"{row['suite']['drawn_valid']} of {row['suite']['drawn']} that ended"
    ),
    "compile, ms": lambda row: _spread(row["suite"]["compile_ms"]),
    "a mask, us": lambda row: _spread(row["suite"]["mask_us"]),
}

if __name__ == "__main__":
    sys.exit(main())
