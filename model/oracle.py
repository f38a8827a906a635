"""Greedy tokens of transformers' own ``generate``, the independent oracle of tests and benchmarks.

Float32, CPU, one prompt at a time, eager attention unless asked otherwise. This project's model code takes no
part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ORACLE_TIMEOUT_SECS = 400
ROOT = Path(__file__).resolve().parent.parent


class Oracle:
    """Greedy tokens of a checkpoint, EOS ignored, computed beside the caller in a process of its own."""

    def __init__(self, checkpoint: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> None:
        request = {"prompts": [list(prompt) for prompt in prompts], "num_new_tokens": num_new_tokens}
        self._files = tempfile.TemporaryDirectory()
        request_path = Path(self._files.name) / "request.json"
        request_path.write_text(json.dumps(request))
        self._answer_path = Path(self._files.name) / "answer.json"
        self._log_path = Path(self._files.name) / "log"
        arguments = (str(checkpoint.resolve()), str(request_path), str(self._answer_path))
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "model.oracle", *arguments], cwd=ROOT, stdout=log, stderr=log
            )

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each prompt; waits for them."""
        if self._process.wait(ORACLE_TIMEOUT_SECS) != 0:
            raise RuntimeError(f"the oracle failed:\n{self._log_path.read_text()[-3000:]}")
        return [list(tokens) for tokens in json.loads(self._answer_path.read_text())]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._files.cleanup()


def greedy_tokens(checkpoint: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
    """The new tokens of each prompt, EOS ignored, computed in this process."""
    return list(generate(load(checkpoint), prompts, num_new_tokens, ignore_eos=True))


def load(checkpoint: Path, attention: str = "eager") -> Any:
    """transformers' model of ``checkpoint``. ``attention``: "sdpa" takes half as long over long prompts."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation=attention
    ).eval()


def generate(
    model: Any, prompts: Sequence[Sequence[int]], num_new_tokens: int, *, ignore_eos: bool = False
) -> Iterator[list[int]]:
    """The new tokens of each prompt, one prompt after the other. With EOS, they end in it."""
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        ending: dict[str, Any] = {"min_new_tokens": num_new_tokens, "eos_token_id": None}
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new_tokens,
                do_sample=False,
                pad_token_id=0,
                **(ending if ignore_eos else {}),
            )
        yield out[0, len(prompt) :].tolist()


def select_at_random(model: Any, seed: int) -> None:
    """Make every indexer of ``model`` select that many positions by lot: the control of a measurement.

    Raises ValueError for a model without indexers that are known here.
    """
    generator = torch.Generator().manual_seed(seed)
    num_indexers = 0
    for module in model.modules():
        if not type(module).__name__.endswith("Indexer"):
            continue
        num_indexers += 1
        top_k: int = module.index_topk

        def forward(
            hidden_states: Tensor,
            q_resid: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            attention_mask: Tensor,
            position_ids: Tensor,
            past_key_values: Any = None,
            top_k: int = top_k,
        ) -> Tensor:
            is_seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
            lots = torch.rand(is_seen.shape, generator=generator).masked_fill(~is_seen, -1.0)
            return lots.topk(min(top_k, lots.shape[-1]), dim=-1).indices.to(torch.int32)

        module.forward = forward
    if not num_indexers:
        raise ValueError(f"{type(model).__name__} has no indexer: there is no selection to draw by lot")


def _main() -> None:
    checkpoint, request_path, answer_path = map(Path, sys.argv[1:])
    request = json.loads(request_path.read_text())
    answers = greedy_tokens(checkpoint, request["prompts"], request["num_new_tokens"])
    answer_path.write_text(json.dumps(answers))


if __name__ == "__main__":
    _main()
