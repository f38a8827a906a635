"""Tokens that transformers generates with penalties and biases, by their definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.checkpoints.oracle import load


class Penalties:
    """A logits processor for transformers, which counts in the ids anew for each token.

    ``settings``: as of SamplingParams, except biases, which are pairs.
    """

    def __init__(self, num_prompt_tokens: int, settings: dict[str, Any]) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._repetition = settings.get("repetition_penalty", 1.0)
        self._frequency = settings.get("frequency_penalty", 0.0)
        self._presence = settings.get("presence_penalty", 0.0)
        self._biases = settings.get("logit_bias", ())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        (text,), (values,) = input_ids.tolist(), scores.tolist()
        output = text[self._num_prompt_tokens :]
        for token_id in set(text):
            values[token_id] *= 1 / self._repetition if values[token_id] > 0 else self._repetition
        for token_id in set(output):
            values[token_id] -= self._presence + self._frequency * output.count(token_id)
        for token_id, bias in self._biases:
            values[token_id] += bias
        return torch.tensor([values])


def penalized_tokens(
    checkpoint: Path,
    prompts: Sequence[tuple[Sequence[int], dict[str, Any]]],
    num_new_tokens: int,
) -> list[list[int]]:
    """Return the likeliest ``num_new_tokens`` tokens of each prompt, with its settings."""
    model = load(checkpoint)
    texts = []
    for prompt, settings in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                logits_processor=[Penalties(len(prompt), settings)],
            )
        texts.append(out[0, len(prompt) :].tolist())
    return texts
