"""Answers of a pair to random schemas of JSON Schema's own test suite: each has to be an instance.

    python -m bench.schema_answers --suite DIR [--schemas 500] [--seed 0] [--draft 2020-12 ...] [--out FILE]

``--suite``: a checkout of json-schema-org/JSON-Schema-Test-Suite. Schemas that are objects are drawn by lot
from the required parts of its drafts, and sent as a chat's ``response_format`` to a pair of the tiny model,
which knows nothing and is drawn from at temperature 1, hisparse and dense by turns. Biases on quotes and
brackets let values come to an end. ``jsonschema`` judges each answer by its draft's rules. Drawn until so
many have been answered to their end; those that are refused with a 400, with why, and answers that ran to
``max_tokens`` are counted. The status is 1 when an answer is no instance, or a request fails otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import jsonschema
import jsonschema.validators
import referencing.exceptions
from rich.console import Console

from bench.facts import OUT, run_facts
from bench.pair import running_pair
from checkpoints.make_tiny import write_checkpoint

DRAFTS = {
    "2020-12": jsonschema.Draft202012Validator,
    "2019-09": jsonschema.Draft201909Validator,
    "7": jsonschema.Draft7Validator,
    "6": jsonschema.Draft6Validator,
}
MAX_TOKENS = 400
BIASES = {str(ord(end)): bias for end, bias in (('"', 4), ("}", 4), ("]", 5), (",", -1))}
"""The tiny model's tokens are bytes."""
NUM_CLIENTS = 8
REQUEST_TIMEOUT_SECS = 300.0
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Case:
    draft: str
    name: str
    schema: dict[str, Any]


def cases(suite: Path, drafts: Sequence[str]) -> Iterator[Case]:
    """Of a draft each text once. Schemas of other documents are left out."""
    for draft in drafts:
        seen: set[str] = set()
        folder = suite / "tests" / f"draft{draft}"
        for file in sorted(folder.glob("*.json")):
            for group in json.loads(file.read_text()):
                schema = group["schema"]
                text = json.dumps({**schema, "$schema": ""}) if isinstance(schema, dict) else ""
                if not text or text in seen or "localhost:1234" in text:
                    continue
                seen.add(text)
                yield Case(draft, f"{file.stem}: {group['description']}", schema)


def judge(case: Case, text: str) -> str:
    """What is wrong with an answer; empty when nothing is."""
    try:
        DRAFTS[case.draft](case.schema).validate(json.loads(text))
    except ValueError as error:
        return f"is not JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"is no instance: {error.message}"
    return ""


def ask(client: httpx.Client, url: str, number: int, case: Case) -> tuple[str, str]:
    """What became of it: answered, refused, too long, not judged, wrong or failed; and why."""
    body = {
        "messages": [{"role": "user", "content": case.name}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "case", "schema": case.schema}},
        "temperature": 1,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "logit_bias": BIASES,
        "hisparse": number % 2 == 0,
    }
    answer = client.post(f"{url}/v1/chat/completions", json=body)
    if answer.status_code == 400:
        return "refused", _NUMBERS.sub("N", answer.json()["error"]["message"])[:120]
    if answer.is_error:
        return "failed", f"HTTP {answer.status_code}: {answer.text[:300]}"
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "length":
        return "too long", ""
    text = choice["message"]["content"]
    try:
        fault = judge(case, text)
    except (OverflowError, referencing.exceptions.Unresolvable) as error:
        return "not judged", f"{type(error).__name__}: {error}"  # by jsonschema
    return ("wrong", f"{fault}: {text[:200]}") if fault else ("answered", "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True, help="checkout of JSON Schema's test suite")
    parser.add_argument("--schemas", type=int, default=500, help="answers to judge")
    parser.add_argument("--draft", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--seed", type=int, default=0, help="of the lots")
    parser.add_argument("--out", type=Path, default=OUT / "schema_answers.json")
    arguments = parser.parse_args(argv)
    console = Console()
    drawn = list(cases(arguments.suite, arguments.draft))
    random.Random(arguments.seed).shuffle(drawn)
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    wrong: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-bench-") as directory:
        model = Path(directory) / "tiny"
        write_checkpoint(model, "v32")
        options = {"--device-pool-tokens": 16384, "--host-pool-tokens": 16384, "--kv-pool-tokens": 16384}
        with (
            running_pair(model, options, console) as pair,
            httpx.Client(timeout=REQUEST_TIMEOUT_SECS, trust_env=False) as client,
            ThreadPoolExecutor(NUM_CLIENTS) as threads,
        ):
            at = 0
            while (missing := arguments.schemas - outcomes["answered"] - outcomes["wrong"]) > 0:
                batch = drawn[at : at + missing]
                if not batch:
                    break
                numbers = range(at, at + len(batch))
                at += len(batch)
                found = threads.map(lambda n, c: ask(client, pair.router_url, n, c), numbers, batch)
                for case, (outcome, why) in zip(batch, found, strict=True):
                    outcomes[outcome] += 1
                    if outcome == "refused":
                        reasons[why] += 1
                    elif outcome in ("wrong", "failed"):
                        wrong.append({"draft": case.draft, "case": case.name, "why": why})
    report = {
        "facts": run_facts(),
        "drafts": arguments.draft,
        "num_schemas": len(drawn),
        "outcomes": dict(outcomes),
        "refused": dict(reasons.most_common()),
        "wrong": wrong,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"{len(drawn)} schemas; " + ", ".join(f"{n} {what}" for what, n in outcomes.items()))
    for entry in wrong:
        console.print(entry, markup=False, highlight=False)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
