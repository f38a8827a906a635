"""Counts the answers that ``tools.bench.accuracy`` got, by system, length and depth, and prints tables.

``accuracy`` makes a ``Response`` of each answer, writes what ``summary`` returns as the report's "systems",
and gives the report to ``print_report``. A system is one way to compute answers, such as transformers or a
mode of a pair.
"""

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
    """One system's response to one prompt of about ``length`` tokens. ``right``: whether each of the prompt's
    right answers is in it; ``depths``: where their facts stand in the prompt, 0 to 1; ``tokens``: its ids,
    empty if not known; ``secs``: the time of the whole request; ``error``: why there is none, or empty."""

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

    ``lengths``, ``depths``: see ``_by_length``, ``_by_depth``. ``tokens_per_step``: over all decode steps,
    with and without drafts; None without steps. ``num_identical``: how many of ``num_compared`` answers are
    the first system's to the same prompt, token for token. The first system is transformers, unless it was
    left out. Prompts to which it has no tokens, as when its request failed, are not compared. A request that
    failed at one of the others counts as an answer that differs. ``mean_prompt_tokens``: over the requests
    whose usage is known, which that of a failed one is not; 0 without any.
    """
    found: dict[str, dict[str, Any]] = {}
    first = responses[0].system if responses else ""
    expected = [response.tokens for response in responses if response.system == first]
    by_system: dict[str, list[Response]] = {}
    for response in responses:
        by_system.setdefault(response.system, []).append(response)
    for system, answers in by_system.items():
        # Systems with responses to all prompts have them in the same order; no others can be compared.
        is_compared = len(answers) == len(expected) and system != first
        pairs = [pair for pair in zip(answers, expected, strict=True) if pair[1]] if is_compared else []
        known = [answer.num_prompt_tokens for answer in answers if answer.num_prompt_tokens]
        found[system] = {
            "lengths": _by_length(answers),
            "depths": _by_depth(answers),
            "num_compared": len(pairs),
            "num_identical": sum(answer.tokens == tokens for answer, tokens in pairs),
            "modes": dict(Counter(answer.mode for answer in answers if answer.mode)),
            "hits": sum(answer.hits for answer in answers),
            "misses": sum(answer.misses for answer in answers),
            **_drafts(answers),
            "num_failed": sum(bool(answer.error) for answer in answers),
            "mean_prompt_tokens": round(sum(known) / len(known)) if known else 0,
        }
    return found


def _by_length(answers: Sequence[Response]) -> dict[str, list[int]]:
    """Return for each prompt length [right answers, answers, prompts with all answers right, prompts]."""
    found: dict[str, list[int]] = {}
    for length in dict.fromkeys(answer.length for answer in answers):
        rights = [answer.right for answer in answers if answer.length == length]
        num_answers = sum(map(len, rights))
        found[str(length)] = [sum(map(sum, rights)), num_answers, sum(map(all, rights)), len(rights)]
    return found


def _by_depth(answers: Sequence[Response]) -> list[list[int]]:
    """Return for each fifth of the prompt [right answers, answers]."""
    found = [[0, 0] for _ in range(NUM_DEPTHS)]
    for answer in answers:
        for is_right, depth in zip(answer.right, answer.depths, strict=True):
            counts = found[min(int(depth * NUM_DEPTHS), NUM_DEPTHS - 1)]
            counts[0] += is_right
            counts[1] += 1
    return found


def _drafts(answers: Sequence[Response]) -> dict[str, Any]:
    """Return the sums of output tokens, drafts and accepted drafts, and the tokens of a step."""
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
        all_right = sum(num_all_right for _, _, num_all_right, _ in counts.values())
        prompts = sum(num_prompts for _, _, _, num_prompts in counts.values())
        shares = [_share(counts.get(length)) for length in lengths]
        by_length.append([system, *shares, _share((all_right, prompts))])
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
    title = "Exact match of answers, by prompt length in tokens"
    console.print(table(title, ("", *lengths, "prompts all right"), by_length))
    title = "Exact match of answers, by their depth in the prompt"
    console.print(table(title, ("", *map(_fifth, range(NUM_DEPTHS))), by_depth))
    headings = ("modes", "hit rate", "tokens a step", "drafts accepted", "prompt tokens", "failed")
    console.print(table("Served", ("", f"tokens as {next(iter(systems))}", *headings), serving))


def _fifth(at: int) -> str:
    return f"{100 * at // NUM_DEPTHS}-{100 * (at + 1) // NUM_DEPTHS}%"


def _share(counts: Sequence[int] | None) -> str:
    """Return the share of ``counts[0]`` in ``counts[1]``, with both."""
    if counts is None or not counts[1]:
        return ""
    return f"{counts[0] / counts[1]:.1%} {counts[0]}/{counts[1]}"
