"""Measures exact match of long-context retrieval, through the pair in all modes and by transformers.

    python -m tools.bench.accuracy                                  # the retrieval model, 400 prompts
    python -m tools.bench.accuracy --dtype bfloat16                 # the pair in bfloat16
    python -m tools.bench.accuracy --speculative-num-steps 0 1 2 3  # a pair for each number of drafts
    python -m tools.bench.accuracy --no-oracle --speculative-num-steps 0 3  # compare tokens with no drafts
    python -m tools.bench.accuracy --device cuda --kv-cache-dtype fp8_e4m3 --oracle-from out/accuracy.json

Held-out prompts of each length go by HTTP to a running pair, in the modes dense, hisparse and auto. There is
a pair for each number of drafts, and for 0 drafts a second one, with the smallest legal hot buffer, which is
asked in the mode hisparse alone. Answers are compared with transformers' own (float32), or without these with
the first system's. The status is 1 when a token differs while the pair computes in float32, and when a
request fails. With drafts, the report's tokens a step are an average over all decode steps, also those in
which the node chose fewer drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from hisparse_pd.base.vocabulary import MAX_DRAFTS
from hisparse_pd.decode_node.drafting import full_buffer
from tools.bench.accuracy_report import Response, print_report, summary
from tools.bench.documents import ANSWER_WIDTH, QUESTIONS, RETRIEVAL_MODEL, tokenizer
from tools.bench.facts import OUT
from tools.bench.pair import PairError, running_pair
from tools.bench.report import make_console, progress, write_report
from tools.bench.retrieval import LENGTHS, Retrieval, judge, retrievals
from tools.bench.served import served

PROMPTS = (100, 100, 100, 60, 40)
"""Number of prompts of each of ``LENGTHS``."""
MAX_NEW_TOKENS = 2 + QUESTIONS * ANSWER_WIDTH + 1
"""Longest answer of the retrieval model: "Answer:", the answers, the end."""
REQUEST_TIMEOUT_SECS = 600.0
ORACLE = "transformers"

PAIR_OPTIONS = (
    "--page-size 64 --chunked-prefill-size 1024 --kv-pool-tokens 65536 --host-pool-tokens 65536 "
    "--device-pool-tokens 24576 --num-threads 1"
)
"""Options of the pair. The device pool fits two or three long dense requests, so that auto has a choice."""
NUM_CLIENTS = 4
BUFFER_FACTOR = 3
"""Entries of the ordinary runs' hot buffers, in multiples of the model's top-k; more where drafts need it."""
Modes = Sequence[tuple[str, bool | str]]
"""Names of systems in the report, each with its requests' field ``hisparse``."""
MODES: Modes = (("dense", False), ("hisparse", True), ("auto", "auto"))


def response_of(system: str, prompt: Retrieval, text: str, **more: Any) -> Response:
    """Return the response of ``system`` to ``prompt``, judged."""
    return Response(
        system=system,
        length=prompt.length,
        right=tuple(judge(text, prompt.answers)),
        depths=tuple(answer.depth for answer in prompt.answers),
        text=text,
        **more,
    )


def make_prompts(arguments: argparse.Namespace) -> list[Retrieval]:
    """Return the prompts. Raises ValueError where the numbers of prompts do not match the lengths."""
    lengths: Sequence[int] = arguments.lengths or LENGTHS
    counts: Sequence[int] = arguments.prompts or (PROMPTS if not arguments.lengths else PROMPTS[:1])
    counts = list(counts) * len(lengths) if len(counts) == 1 else counts
    if len(counts) != len(lengths):
        raise ValueError(
            f"{len(counts)} numbers of prompts for {len(lengths)} lengths; give one, or one each"
        )
    return [
        found for length, count in zip(lengths, counts, strict=True) for found in retrievals(length, count)
    ]


def measure_pair(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return the report's facts and all responses: transformers' first, then those of each pair."""
    prompts = make_prompts(arguments)
    model_path: Path = arguments.model_path.resolve()
    config = json.loads((model_path / "config.json").read_text())
    top_k = int(config["index_topk"])
    responses: list[Response] = []
    with progress(console) as step:
        if arguments.oracle_from is not None:
            responses += recorded_oracle(arguments.oracle_from, prompts)
        elif not arguments.no_oracle:
            responses += ask_oracle(model_path, prompts, step)
        common_options = (
            f"{PAIR_OPTIONS} --dtype {arguments.dtype} --kv-cache-dtype {arguments.kv_cache_dtype} "
            f"--device {arguments.device} --attention-backend {arguments.attention_backend}"
        )
        runs = list(pair_runs(top_k, arguments.speculative_num_steps))
        for num_drafts, buffer, modes in runs:
            options = f"{common_options} --device-buffer-size {buffer} --speculative-num-steps {num_drafts}"
            with running_pair(model_path, options.split(), console) as pair:
                note = f"pair, hot buffers of {buffer}, {num_drafts} drafts"
                advance = step(note, len(prompts))
                found = ask_pair(pair.router_url, prompts, modes, advance, arguments.clients)
            verdicts = [is_right for response in found for is_right in response.right]
            console.print(f"{note}: {sum(verdicts):,} of {len(verdicts):,} answers right", highlight=False)
            responses += found
    return {
        "model": model_path.name,
        "index_topk": top_k,
        "dtype": arguments.dtype,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "device": arguments.device,
        "num_prompts": len(prompts),
        "pair_options": common_options,
        "device_buffer_size": [run.buffer for run in runs],
        "speculative_num_steps": [run.num_drafts for run in runs],
        "responses": responses,
    }


class PairRun(NamedTuple):
    """A pair to start, and the modes in which it is asked."""

    num_drafts: int
    buffer: int
    """Entries of a hot buffer."""
    modes: Modes


def pair_runs(top_k: int, nums_drafts: Sequence[int]) -> Iterator[PairRun]:
    """Yield a run for each number of drafts and, without drafts, one with the smallest legal hot buffer."""
    for num_drafts in nums_drafts:
        # The end of a system's name: nothing, ", 1 draft", ", 2 drafts", and so on.
        drafts = ("", ", 1 draft", f", {num_drafts} drafts")[min(num_drafts, 2)]
        yield PairRun(
            num_drafts,
            max(BUFFER_FACTOR * top_k, full_buffer(num_drafts, top_k)),
            [(f"{name}{drafts}", flag) for name, flag in MODES],
        )
        if num_drafts == 0:
            yield PairRun(0, top_k + 1, [(f"hisparse, buffer {top_k + 1}", True)])


def ask_oracle(
    model_path: Path, prompts: Sequence[Retrieval], step: Callable[[str, int | None], Callable[[], None]]
) -> Iterator[Response]:
    """Yield transformers' answers. ``step`` starts a bar of progress (``report.progress``)."""
    from tools.checkpoints import oracle

    advance = step(ORACLE, len(prompts))
    model = oracle.load(model_path, attention="sdpa")
    answers = oracle.generate(model, [prompt.token_ids for prompt in prompts], MAX_NEW_TOKENS)
    for prompt, tokens in zip(prompts, answers, strict=True):
        yield response_of(ORACLE, prompt, tokenizer().decode(tokens), tokens=tuple(tokens))
        advance()


def recorded_oracle(path: Path, prompts: Sequence[Retrieval]) -> list[Response]:
    """Return transformers' answers to ``prompts`` from the JSON of an earlier run over the same checkpoint.

    Raises ValueError when one is missing.
    """
    # The recording has no prompts: their lengths and the depths of their answers tell them apart.
    found: dict[tuple[int, tuple[float, ...]], Response] = {}
    for entry in json.loads(path.read_text())["responses"]:
        if entry["system"] == ORACLE:
            values: dict[str, Any] = {
                name: tuple(v) if isinstance(v, list) else v for name, v in entry.items()
            }
            response = Response(**values)
            found[response.length, response.depths] = response
    keys = [(prompt.length, tuple(answer.depth for answer in prompt.answers)) for prompt in prompts]
    if missing := [length for length, depths in keys if (length, depths) not in found]:
        raise ValueError(f"{path} has no answer to {len(missing)} prompts, first one of {missing[0]} tokens")
    return [found[key] for key in keys]


def ask_pair(
    router_url: str,
    prompts: Sequence[Retrieval],
    modes: Modes,
    advance: Callable[[], None],
    num_clients: int,
) -> list[Response]:
    """Return the pair's answers. ``num_clients`` prompts run at a time; a prompt's modes follow each other
    and share its prefix."""

    def ask(prompt: Retrieval) -> list[Response]:
        found = [generate(client, router_url, prompt, system, flag) for system, flag in modes]
        advance()
        return found

    with (
        httpx.Client(timeout=REQUEST_TIMEOUT_SECS, trust_env=False) as client,
        ThreadPoolExecutor(num_clients) as threads,
    ):
        return [response for answers in threads.map(ask, prompts) for response in answers]


def generate(
    client: httpx.Client, router_url: str, prompt: Retrieval, system: str, flag: bool | str
) -> Response:
    """Send one request to the native endpoint, whose answer has token ids."""
    body = {
        "input_ids": list(prompt.token_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
        "hisparse": flag,
    }
    started = time.perf_counter()
    try:
        answer = client.post(f"{router_url}/generate", json=body)
        if answer.is_error:
            return response_of(system, prompt, "", error=f"HTTP {answer.status_code}: {answer.text[:300]}")
        found = answer.json()
        text, tokens, usage = found["text"], tuple(found["output_ids"]), found["meta_info"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return response_of(system, prompt, "", error=f"{type(error).__name__}: {error}")
    secs = time.perf_counter() - started
    return response_of(system, prompt, text, tokens=tokens, secs=secs, **vars(served(usage)))


def problems(measured: dict[str, Any]) -> list[str]:
    """Return what makes the run fail: requests without an answer, and tokens that differ in float32."""
    found = [f"{r.system}, {r.length} tokens: {r.error}" for r in measured["responses"] if r.error]
    if measured["dtype"] == "float32" and measured["kv_cache_dtype"] in ("auto", "float32"):
        found += [
            f"{system}: {entry['num_compared'] - entry['num_identical']} of {entry['num_compared']} answers "
            f"differ from those of {next(iter(measured['systems']))} in a token"
            for system, entry in measured["systems"].items()
            if entry["num_identical"] < entry["num_compared"]
        ]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--lengths", type=int, nargs="+", help=f"lengths of prompts in tokens; default {LENGTHS}"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="+",
        help=f"number of prompts, for all lengths or for each; default {PROMPTS}",
    )
    parser.add_argument("--out", type=Path, default=OUT / "accuracy", help="JSON file, without its suffix")
    parser.add_argument("--model-path", type=Path, default=RETRIEVAL_MODEL, help="a retrieval checkpoint")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the pair"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="KV dtype of the pair; default: --dtype")
    parser.add_argument("--device", default="cpu", help="device of the pair")
    parser.add_argument("--attention-backend", default="auto", help="attention backend of the pair")
    parser.add_argument(
        "--speculative-num-steps",
        type=int,
        nargs="+",
        default=[0],
        choices=range(MAX_DRAFTS + 1),
        help="drafts of a decode step; a pair is started for each number",
    )
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="requests at a time")
    oracle = parser.add_mutually_exclusive_group()
    oracle.add_argument("--oracle-from", type=Path, help="JSON of an earlier run with transformers' answers")
    oracle.add_argument(
        "--no-oracle",
        action="store_true",
        help="compare tokens with the first system's instead of transformers'",
    )
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    console = make_console()
    started = time.monotonic()
    try:
        measured = measure_pair(arguments, console)
    except (PairError, OSError, ValueError, httpx.HTTPError) as error:
        console.print(f"[red]{type(error).__name__}: {error}")
        return 1
    measured["systems"] = summary(measured["responses"])
    found = problems(measured)
    report = {
        "secs": round(time.monotonic() - started),
        "problems": found,
        **{key: value for key, value in measured.items() if key != "responses"},
    }
    print_report(report, console)
    answers = [asdict(response) for response in measured["responses"]]
    write_report(arguments.out, {**report, "responses": answers})
    console.print(f"wrote {arguments.out}.json")
    for problem in found:
        console.print(f"[red]{problem}", markup=True, highlight=False)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
