"""Record what a model's indexer selects while it decodes, as a trace for ``bench/swap_in.py``.

    python bench/record_trace.py [--model-path .cache/tiny-v32] [--prompt-tokens 7900] [--steps 200]
    python bench/record_trace.py --model-path checkpoints/retrieval --task

The model reads a long seeded text and goes on with it, on the CPU, with its own attention over its own top-k:
with what it generates greedily, or (``--feed text``) with how the text itself goes on. ``--task`` makes the
text a held-out document of the retrieval model, and the steps its answers. At every step the
indexer's ranking is cut at each ``--top-k`` and written down, from the same scores that the model itself
uses: a longer list is the model's own ranking, continued. One file for each: trace_MODEL[_text]_TOPK.npz.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, ROOT
from bench.traces import Trace
from kernels.indexer import gather_pages, index_topk
from model.dsa import DsaModel
from model.loader import load_model
from model.paged_kv import PagedKv, PagedRequest
from model.spec import ModelSpec, load_spec
from training.task import ANSWER_WIDTH, Shape, TaskGenerator
from training.vocabulary import text_of

TINY_MODEL = ROOT / ".cache" / "tiny-v32"
PAGE_SIZE = 64
CHUNK = 1024
NUM_PROMPT_TOKENS = 7900
NUM_STEPS = 200
TASK_QUESTIONS = 24
WIDE_TOP_K = 2048
"""Of DeepSeek-V3.2 and GLM-5."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model-path", type=Path, default=TINY_MODEL, help="the tiny one is made when missing"
    )
    parser.add_argument("--prompt-tokens", type=int, help=f"default: {NUM_PROMPT_TOKENS}, or what fits")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument(
        "--feed", choices=("model", "text"), default="model", help="where new tokens come from"
    )
    parser.add_argument("--task", action="store_true", help=f"a document and {TASK_QUESTIONS} questions")
    parser.add_argument("--top-k", type=int, nargs="+", help=f"default: {WIDE_TOP_K} and the model's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="directory")
    arguments = parser.parse_args()
    path: Path = arguments.model_path
    if path == TINY_MODEL and not (path / "config.json").exists():
        from checkpoints.make_tiny import write_checkpoint

        write_checkpoint(path, "v32")
    spec = load_spec(path)
    top_ks = arguments.top_k or sorted({WIDE_TOP_K, spec.index_topk}, reverse=True)
    num_prompt = arguments.prompt_tokens or min(NUM_PROMPT_TOKENS, spec.context_length - arguments.steps)
    if num_prompt + arguments.steps > spec.context_length:
        parser.error(
            f"{num_prompt + arguments.steps} tokens; the model has a context of {spec.context_length}"
        )
    if num_prompt < max(top_ks):
        parser.error(f"a prompt of {num_prompt} tokens leaves the top {max(top_ks)} no choice")
    started = time.monotonic()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    name = path.resolve().name
    if arguments.task:
        name = f"{name}_task"
        prompt, rest = task_tokens(arguments.seed, num_prompt, arguments.steps)
    else:
        # A token of this text is at most about six letters, and one letter for a tokenizer of bytes.
        text = seeded_text(arguments.seed, 8 * (num_prompt + arguments.steps))
        token_ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        prompt, rest = token_ids[:num_prompt], token_ids[num_prompt : num_prompt + arguments.steps]
    fed = None
    if arguments.feed == "text":
        name, fed = f"{name}_text", rest
    traces, generated = record(load_model(path, spec), prompt, len(rest), top_ks, name, fed)
    print(f"prompt: …{tokenizer.decode(prompt[-60:])!r}, greedy tokens: {tokenizer.decode(generated)!r}")
    if arguments.task:
        wanted = [answer for answer in text_of(rest).partition(":")[2].split(".") if answer]
        num_right = sum(f"{answer}." in text_of(generated) for answer in wanted)
        print(f"right answers: {num_right} of {len(wanted)}")
    for trace in traces:
        file = arguments.out / f"trace_{trace.name}.npz"
        trace.save(file)
        print(
            f"{file.name}: {trace.num_steps} steps, {trace.num_layers} index layers, top {trace.top_k} of "
            f"{trace.seq_lens[0]} to {trace.context}, {100 * trace.overlap:.1f}% shared by consecutive steps"
        )
    print(f"{time.monotonic() - started:.0f} s")


# --- the text ---------------------------------------------------------------------------------------------


def task_tokens(seed: int, num_prompt: int, most_steps: int) -> tuple[list[int], list[int]]:
    """A held-out prompt of at most ``num_prompt`` tokens, and the right answer, at most ``most_steps``."""
    answer_tokens = 2 + TASK_QUESTIONS * ANSWER_WIDTH + 1
    shape = Shape(1, num_prompt + answer_tokens, TASK_QUESTIONS, held_out=True)
    batch = TaskGenerator("cpu", seed).batch(shape)
    prompt: list[int] = batch.tokens[0, : int(batch.prompt_tokens[0])].tolist()
    answer: list[int] = batch.targets[0][batch.is_answer[0]].tolist()
    return prompt, answer[:most_steps]


def seeded_text(seed: int, num_characters: int) -> str:
    """Made-up prose with what a context cache lives on: names that come back, and sentences like earlier
    ones.

    A paragraph is about a few names and words; some of them stay for the next one.
    """
    rng = random.Random(seed)
    names, all_nouns, all_verbs = _NAMES.split(), _NOUNS.split(), _VERBS.split()
    paragraphs: list[str] = []
    topic = rng.sample(names, 3)
    length = 0
    while length < num_characters:
        topic = [*rng.sample(topic, 2), rng.choice(names)]
        nouns, verbs = rng.sample(all_nouns, 5), rng.sample(all_verbs, 4)
        sentences = [
            rng.choice(_PATTERNS).format(
                *rng.sample(topic, 2),
                noun=rng.choice(nouns),
                other=rng.choice(nouns),
                verb=rng.choice(verbs),
                place=rng.choice(_PLACES),
                number=rng.randrange(2, 60),
            )
            for _ in range(rng.randrange(4, 9))
        ]
        paragraphs.append(" ".join(sentences))
        length += len(paragraphs[-1]) + 2
    return "\n\n".join(paragraphs)


_NAMES = """
    Ada Boris Chandra Dagny Emeka Farah Goran Hana Ivo Juno Kofi Leila Mateo Nadia Oskar Priya
"""
_NOUNS = """
    letter ledger bridge lantern engine garden harvest map message mirror orchard parcel promise
    record river signal song station stone story ticket tower train violin window workshop
"""
_VERBS = """
    found lost kept repaired sold carried described remembered promised painted counted copied hid
"""
_PLACES = ("in the harbour", "near the old mill", "at the market", "behind the school", "on the north road")
_PATTERNS = (
    "{0} {verb} the {noun} {place}, and {1} wrote down every {other}.",
    "When {0} asked about the {noun}, {1} said that the {other} was still {place}.",
    "The {noun} had been {place} for {number} days before {0} {verb} it.",
    "After {number} years {0} {verb} the {other} that {1} had left {place}.",
    "Nobody {verb} the {noun}; {0} and {1} only spoke of the {other}.",
    "{0} {verb} {number} of them: one {noun}, one {other}, and the rest {place}.",
    "It was {0}, not {1}, who {verb} the {noun} {place}.",
)


# --- the recording ----------------------------------------------------------------------------------------


def record(
    model: DsaModel,
    prompt: Sequence[int],
    num_steps: int,
    top_ks: Sequence[int],
    name: str,
    fed: Sequence[int] | None = None,
) -> tuple[list[Trace], list[int]]:
    """One trace for each of ``top_ks`` of ``num_steps`` steps after ``prompt``, and the greedy tokens.

    The tokens of the steps are the greedy ones, or ``fed``.
    """
    spec = model.spec
    num_pages = -(-(len(prompt) + num_steps) // PAGE_SIZE)
    pages = torch.arange(num_pages)
    device_pool, index_pool = (
        torch.zeros((num_layers, num_pages * PAGE_SIZE, num_bytes), dtype=torch.uint8)
        for num_layers, num_bytes in (
            (spec.num_layers, spec.item_bytes),
            (spec.num_index_layers, spec.index_item_bytes),
        )
    )

    def extend(prefix_len: int, tokens: Sequence[int], recorded_top_ks: Sequence[int]) -> RecordingKv:
        request = PagedRequest(pages, prefix_len, len(tokens))
        kv = RecordingKv(spec, device_pool, index_pool, request, recorded_top_ks)
        logits = model.forward(torch.tensor(tokens), kv.positions, kv, kv.last_rows)
        kv.next_token = int(logits[0].argmax())
        return kv

    for start in range(0, len(prompt), CHUNK):
        kv = extend(start, prompt[start : start + CHUNK], ())
    generated: list[int] = []
    selected = {top_k: np.empty((num_steps, spec.num_index_layers, top_k), np.int32) for top_k in top_ks}
    for step in range(num_steps):
        generated.append(kv.next_token)
        token_id = generated[-1] if fed is None else fed[step]
        kv = extend(len(prompt) + step, [token_id], top_ks)
        for top_k in top_ks:
            for group in range(spec.num_index_layers):
                selected[top_k][step, group] = kv.recorded[top_k, group]
    seq_lens = np.arange(len(prompt) + 1, len(prompt) + num_steps + 1, dtype=np.int32)
    return [Trace(f"{name}_{top_k}", selected[top_k], seq_lens) for top_k in top_ks], generated


class RecordingKv(PagedKv):
    """The KV access of one request that also cuts the last token's ranking at other lengths."""

    next_token: int

    def __init__(
        self,
        spec: ModelSpec,
        device_pool: Tensor,
        index_pool: Tensor,
        request: PagedRequest,
        top_ks: Sequence[int],
    ) -> None:
        super().__init__(spec, device_pool, index_pool, PAGE_SIZE, [request])
        self._request = request
        self._top_ks = top_ks
        self.recorded: dict[tuple[int, int], np.ndarray] = {}
        """int32 [top_k] of (top_k, index group)."""

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        if self._top_ks:
            keys_of_layer = self._kernels.index_format.load(self._index_pool[group])
            keys = gather_pages(keys_of_layer, self._request.page_ids, PAGE_SIZE, self._request.seq_len)
            for top_k in self._top_ks:
                last = index_topk(q_index[-1:], weights[-1:], keys, self.positions[-1:], top_k)
                self.recorded[top_k, group] = last[0].numpy()
        return super().select(group, q_index, weights)


if __name__ == "__main__":
    main()
