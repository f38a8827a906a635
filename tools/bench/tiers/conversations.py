"""Holds conversations, all at once. Each turn's prompt has all turns and answers before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tools.bench.replay.__main__ import summarize
from tools.bench.serve import row_of
from tools.bench.streamed_load import Client, Record, distribution
from tools.bench.tiers.prompts import CONVERSATION, Prompts


@dataclass(frozen=True)
class Plan:
    """The number and the lengths of the conversations. ``hisparse``: a key of ``serve.HISPARSE``."""

    num_conversations: int
    num_turns: int
    first_tokens: int
    """Tokens of a conversation's first prompt."""
    turn_tokens: int
    """New tokens of each later turn, beside the answer before it."""
    answer_tokens: int
    hisparse: str


class Said(NamedTuple):
    """One turn of a conversation."""

    turn: int
    record: Record


async def converse(client: Client, prompts: Prompts, plan: Plan, deadline: float) -> dict[str, Any]:
    """Hold all conversations at once and return their figures, JSON-able. ``deadline``: the time of
    ``time.monotonic`` at which all end, whether they are whole or not.

    A conversation ends early when one of its turns fails. ``is_whole`` says whether all turns were answered.
    """
    said: list[Said] = []

    async def hold(number: int) -> None:
        prompt: list[int] = []
        for turn in range(plan.num_turns):
            num_new = plan.turn_tokens if turn else plan.first_tokens
            prompt += prompts.tokens(num_new, CONVERSATION, number, turn)
            body = prompts.body(prompt, plan.answer_tokens, plan.hisparse, returns_ids=True)
            record = await client.send(body)
            said.append(Said(turn, record))
            if record.error_class:
                return
            prompt += record.token_ids

    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            await asyncio.gather(*map(hold, range(plan.num_conversations)))
    except TimeoutError:
        pass  # what was said by then is reported
    return figures(said, plan)


def figures(said: Sequence[Said], plan: Plan) -> dict[str, Any]:
    """Return the figures of the turns that ended."""
    records = [each.record for each in said]
    if not records:
        return {"is_whole": False, "num_ok": 0, "requests": []}
    found = summarize(records)
    later = [each.record for each in said if each.turn and not each.record.error_class]
    return {
        "is_whole": found["num_ok"] == plan.num_conversations * plan.num_turns,
        **found,
        "prompt_tokens_per_sec": found["prompt_tokens"] / found["wall_secs"],
        "output_tokens_per_sec": found["output_tokens"] / found["wall_secs"],
        "later_ttft_secs": distribution(record.ttft_secs for record in later),
        "requests": [{"turn": each.turn, **row_of(each.record)} for each in said],
    }


def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the table's row of the conversations with one pair."""
    if not found["num_ok"]:
        return {"tiers": name, "answered": 0}
    tiers = found["cached_by_tier"]
    later = found["later_ttft_secs"]
    return {
        "tiers": name,
        "answered": found["num_ok"],
        "secs": found["wall_secs"],
        "tokens/s": found["output_tokens_per_sec"],
        "prompt tokens/s": found["prompt_tokens_per_sec"],
        "prompt": found["prompt_tokens"],
        **{tier: tiers.get(tier, 0) for tier in ("device", "host", "decode")},
        "computed": found["computed_tokens"],
        **{f"TTFT {at}, ms": found["ttft_secs"][at] * 1e3 for at in ("p50", "p99")},
        "of later turns p50, ms": later["p50"] * 1e3 if later else None,
    }
