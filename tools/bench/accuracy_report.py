"""Counts the answers that ``tools.bench.accuracy`` got, by system, length and depth, and prints tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tools.bench.report import table
from tools.bench.retrieval import NUM_DEPTHS
from tools.bench.served import Served, tokens_per_step


@dataclass(frozen=True, kw_only=True)
class Response(Served):
    """One system's answer to one prompt. ``right``: whether each of the prompt's answers is in it;
    ``depths``: where their facts stand in the prompt, 0 to 1; ``secs``: the time of the whole request."""

    system: str
    length: int
    right: tuple[bool, ...]
    depths: tuple[float, ...]
    text: str
    tokens: tuple[int, ...] = ()
    secs: float = 0.0
    error: str = ""


def summary(responses: Sequence[Response]) -> dict[str, dict[str, Any]]:
    """Return the counts of each system, JSON-able.

    ``lengths``: for each prompt length [right answers, answers, prompts with all answers right, prompts].
    ``depths``: for each fifth of the prompt [right answers, answers]. ``tokens_per_step``: over all decode
    steps, with and without drafts; None without steps. ``num_identical``: how many of ``num_compared``
    answers are the first system's to the same prompt, token for token. The first system is transformers,
    unless it was left out.
    """
    found: dict[str, dict[str, Any]] = {}
    first = responses[0].system if responses else ""
    expected = [r.tokens for r in responses if r.system == first and r.tokens]
    by_system: dict[str, list[Response]] = {}
    for response in responses:
        by_system.setdefault(response.system, []).append(response)
    for system, answers in by_system.items():
        lengths: dict[str, list[int]] = {}
        depths = [[0, 0] for _ in range(NUM_DEPTHS)]
        for answer in answers:
            counts = lengths.setdefault(str(answer.length), [0, 0, 0, 0])
            for at, value in enumerate((sum(answer.right), len(answer.right), all(answer.right), 1)):
                counts[at] += value
            for is_right, depth in zip(answer.right, answer.depths, strict=True):
                counts = depths[min(int(depth * NUM_DEPTHS), NUM_DEPTHS - 1)]
                counts[0] += is_right
                counts[1] += 1
        # Systems that answer all prompts have them in the same order as the first.
        has_tokens = len(answers) == len(expected) and system != first
        found[system] = {
            "lengths": lengths,
            "depths": depths,
            "num_compared": len(expected) if has_tokens else 0,
            "num_identical": sum(
                answer.tokens == tokens for answer, tokens in zip(answers, expected, strict=True)
            )
            if has_tokens
            else 0,
            "modes": dict(Counter(answer.mode for answer in answers if answer.mode)),
            "hits": sum(answer.hits for answer in answers),
            "misses": sum(answer.misses for answer in answers),
            **_drafts(answers),
            "num_failed": sum(bool(answer.error) for answer in answers),
            "mean_prompt_tokens": round(sum(a.num_prompt_tokens for a in answers) / len(answers)),
        }
    return found


def _drafts(answers: Sequence[Response]) -> dict[str, Any]:
    with_tokens = [answer for answer in answers if answer.num_output_tokens]
    num_tokens = sum(answer.num_output_tokens for answer in with_tokens)
    num_accepted = sum(answer.num_accepted for answer in with_tokens)
    per_step = tokens_per_step(num_tokens, num_accepted)
    return {
        "num_output_tokens": num_tokens,
        "num_drafted": sum(answer.num_drafted for answer in with_tokens),
        "num_accepted": num_accepted,
        "tokens_per_step": None if per_step is None else round(per_step, 3),
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    systems: dict[str, dict[str, Any]] = report["systems"]
    lengths = list(dict.fromkeys(length for entry in systems.values() for length in entry["lengths"]))
    by_length, by_depth, serving = [], [], []
    for system, entry in systems.items():
        counts = entry["lengths"]
        perfect = [sum(c[at] for c in counts.values()) for at in (2, 3)]
        by_length.append([system, *(_share(counts.get(length)) for length in lengths), _share(perfect)])
        by_depth.append([system, *map(_share, entry["depths"])])
        num_selected = entry["hits"] + entry["misses"]
        serving.append(
            [
                system,
                f"{entry['num_identical']} of {entry['num_compared']}" if entry["num_compared"] else "",
                ", ".join(f"{number} {mode}" for mode, number in entry["modes"].items()),
                f"{entry['hits'] / num_selected:.1%}" if num_selected else "",
                f"{entry['tokens_per_step']:.2f}" if entry["tokens_per_step"] else "",
                _share((entry["num_accepted"], entry["num_drafted"])),
                str(entry["mean_prompt_tokens"] or ""),
                str(entry["num_failed"] or ""),
            ]
        )
    match = "Exact match of answers, by"
    console.print(table(f"{match} prompt length in tokens", ("", *lengths, "prompts all right"), by_length))
    console.print(
        table(f"{match} their depth in the prompt", ("", *map(_fifth, range(NUM_DEPTHS))), by_depth)
    )
    headings = ("modes", "hit rate", "tokens a step", "drafts accepted", "prompt tokens", "failed")
    console.print(table("Served", ("", f"tokens as {next(iter(systems))}", *headings), serving))


def _fifth(at: int) -> str:
    return f"{100 * at // NUM_DEPTHS}-{100 * (at + 1) // NUM_DEPTHS}%"


def _share(counts: Sequence[int] | None) -> str:
    if counts is None or not counts[1]:
        return ""
    return f"{counts[0] / counts[1]:.1%} {counts[0]}/{counts[1]}"
