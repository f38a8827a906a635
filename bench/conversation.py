"""What does a conversation put on the wire, turn by turn, with held prefixes and without?

    python -m bench.conversation --model-path DIR [--first 5000] [--more 50] [--answer 10] [--turns 20]
        [--hisparse true false] [--devices cuda:0 cuda:1] [--token-range 300 32000]
        [--pair-option NAME=VALUE ...] [--out DIR]
    python -m bench.conversation --arithmetic

Full size, with a checkpoint of ``checkpoints.make_synthetic --hidden 7168 --experts 16`` on two GPUs:
``--first 75000 --more 650 --answer 100 --devices cuda:0 cuda:1 --token-range 300 32000 --pair-option
kv-cache-dtype=fp8_e4m3``.

Each turn sends the turns before it, their answers and ``--more`` new tokens. Two pairs on loopback, one with
``--disable-held-prefixes``, get the same conversation; bytes are the decode node's own count, aux records
included, and the time to the first token is the client's. The prefill node has the conversation in its
prefix cache in both cases: what differs is what is sent. A short conversation comes before, in which kernels
are compiled. Pools are as large as the conversation needs.

``--arithmetic``: the same as a calculation, for DeepSeek-V3.2 in fp8, 75,000 tokens and then 750 a turn. A
turn's tokens that are not held are its new ones, the last of the answer before it, whose KV was never
computed, and what lies before them in the same page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.facts import OUT, run_facts
from bench.fairness import AUX_BYTES, TOKEN_BYTES
from bench.pair import Pair, add_pair_options, options_of_pair, running_pair

TIMEOUT_SECS = 600.0
WARM_UP_TOKENS = 4096
_HISPARSE: dict[str, object] = {"true": True, "false": False, "auto": "auto"}


@dataclass(frozen=True)
class Shape:
    """Of a conversation, in tokens. ``more``: what a turn's prompt has beyond the last one and its answer."""

    first: int
    more: int
    answer: int
    num_turns: int

    def prompt_lens(self) -> list[int]:
        return [self.first + turn * (self.answer + self.more) for turn in range(self.num_turns)]

    def sent_lens(self, page_size: int) -> list[int]:
        """What is sent in each turn when all whole pages of the turns before are held."""
        prompts = self.prompt_lens()
        held = [0, *((length + self.answer - 1) // page_size * page_size for length in prompts[:-1])]
        return [length - num_held for length, num_held in zip(prompts, held, strict=True)]


@dataclass(frozen=True)
class Turn:
    """What was seen of one turn. ``num_bytes``: that arrived at the decode node."""

    num_prompt_tokens: int
    num_held_tokens: int
    num_bytes: int
    ttft_secs: float


def run_conversation(
    pair: Pair, shape: Shape, hisparse: object, token_range: tuple[int, int], seed: int
) -> list[Turn]:
    """Random tokens; the same for the same seed, as long as the answers are."""
    drawn = np.random.default_rng(seed)
    prompt: list[int] = drawn.integers(*token_range, shape.first).tolist()
    turns = []
    for _ in range(shape.num_turns):
        before = pair.counter(pair.decode_url, "kv_transfer_bytes_total")
        num_prompt_tokens, (output_ids, meta, ttft_secs) = len(prompt), ask(pair, prompt, shape, hisparse)
        num_bytes = counted(pair, before) - before
        turns.append(Turn(num_prompt_tokens, meta["held_tokens"], num_bytes, ttft_secs))
        prompt += [*output_ids, *drawn.integers(*token_range, shape.more).tolist()]
    return turns


def ask(
    pair: Pair, prompt: Sequence[int], shape: Shape, hisparse: object
) -> tuple[list[int], dict[str, Any], float]:
    """Output tokens, meta_info, and seconds to the first token."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": shape.answer, "ignore_eos": True},
        "hisparse": hisparse,
        "stream": True,
    }
    started, ttft_secs, last = time.monotonic(), 0.0, {}
    with httpx.stream(
        "POST", f"{pair.router_url}/generate", json=body, timeout=TIMEOUT_SECS, trust_env=False
    ) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {answer.read().decode(errors='replace')}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ttft_secs = ttft_secs or time.monotonic() - started
                last = json.loads(line.removeprefix("data: "))
    if "output_ids" not in last:
        raise SystemExit(f"the answer ended in {last}")
    return last["output_ids"], last["meta_info"], ttft_secs


def counted(pair: Pair, before: int) -> int:
    """The counter once the engine's next statistics, which follow twice a second, have what just arrived."""
    deadline = time.monotonic() + TIMEOUT_SECS
    while (now := pair.counter(pair.decode_url, "kv_transfer_bytes_total")) == before:
        if time.monotonic() > deadline:
            raise SystemExit("the decode node's kv_transfer_bytes_total does not grow")
        time.sleep(0.05)
    return now


def arithmetic(page_size: int = 64) -> dict[str, Any]:
    """The full size, by what the protocol sends."""
    shape = Shape(75_000, 650, 100, 20)
    prompts, sent = shape.prompt_lens(), shape.sent_lens(page_size)
    return {
        "prompt_tokens": prompts,
        "sent_tokens": sent,
        "sent_bytes": [num * TOKEN_BYTES + AUX_BYTES for num in sent],
        "share_of_a_later_turn": max(
            (num * TOKEN_BYTES + AUX_BYTES) / (length * TOKEN_BYTES + AUX_BYTES)
            for num, length in list(zip(sent, prompts, strict=True))[1:]
        ),
        "share_of_all_turns": sum(sent) / sum(prompts),
    }


def _table(mode: str, all_held: Sequence[Turn], all_sent: Sequence[Turn]) -> Table:
    columns = ("turn", "prompt", "held", "MB sent", "MB without", "share", "TTFT ms", "without")
    table = Table(*columns, title=f"hisparse: {mode}")
    for number, (held, without) in enumerate(zip(all_held, all_sent, strict=True)):
        table.add_row(
            str(number + 1),
            str(held.num_prompt_tokens),
            str(held.num_held_tokens),
            f"{held.num_bytes / 1e6:.3f}",
            f"{without.num_bytes / 1e6:.3f}",
            f"{held.num_bytes / without.num_bytes:.2%}",
            f"{held.ttft_secs * 1e3:.0f}",
            f"{without.ttft_secs * 1e3:.0f}",
        )
    return table


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-path", type=Path)
    for name, default in (("first", 5000), ("more", 50), ("answer", 10), ("turns", 20), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--hisparse", nargs="+", choices=tuple(_HISPARSE), default=["true"], help="a conversation each"
    )
    add_pair_options(parser)
    parser.add_argument("--arithmetic", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(words)
    console = Console()
    full_size = arithmetic()
    console.print(
        f"at full size (V3.2 in fp8, 75,000 tokens, then 750 a turn, 20 turns): a later turn sends at most "
        f"{full_size['share_of_a_later_turn']:.2%} of its prompt, all turns together, the first included, "
        f"{full_size['share_of_all_turns']:.2%}"
    )
    if options.arithmetic:
        return 0
    if options.model_path is None:
        parser.error("--model-path is needed, but for --arithmetic")
    shape = Shape(options.first, options.more, options.answer, options.turns)
    short = Shape(min(shape.first, WARM_UP_TOKENS), shape.more, shape.answer, 2)
    token_range = (options.token_range[0], options.token_range[1])
    longest = shape.prompt_lens()[-1] + shape.answer
    pools = dict.fromkeys(("kv", "host", "device"), 2 * longest + 65_536)
    modes = tuple(dict.fromkeys(options.hisparse))
    results: dict[str, dict[str, list[Turn]]] = {}
    for name, pair_options in (("held", {}), ("sent again", {"--disable-held-prefixes": True})):
        with (
            options_of_pair(options, pools) as of_pair,
            running_pair(options.model_path, {**of_pair, **pair_options}, console) as pair,
        ):
            conversations = [(number, mode, _HISPARSE[mode]) for number, mode in enumerate(modes)]
            for number, _, hisparse in conversations:
                run_conversation(pair, short, hisparse, token_range, options.seed + len(modes) + number)
            results[name] = {
                mode: run_conversation(pair, shape, hisparse, token_range, options.seed + number)
                for number, mode, hisparse in conversations
            }
    for mode in modes:
        console.print(_table(mode, results["held"][mode], results["sent again"][mode]))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "conversation.json"
    turns = {
        name: {mode: [vars(turn) for turn in of_mode] for mode, of_mode in each.items()}
        for name, each in results.items()
    }
    path.write_text(json.dumps({"facts": run_facts(), "turns": turns, "full_size": full_size}, indent=1))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
