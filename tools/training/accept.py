"""How many drafts of a checkpoint's MTP layer are right while it answers: the served model, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hisparse_pd.model.dsa import DsaModel
from hisparse_pd.model.loader import load_model
from hisparse_pd.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.model.spec import load_spec
from tools.training.evaluate import held_out

PAGE_SIZE = 64
CHUNK = 1024
MOST_DRAFTS = 3
MOST_TOKENS = 64
"""Of an answer, that are looked at."""


def accept_lengths(checkpoint: Path, length: int, num_prompts: int) -> tuple[float, ...]:
    """Tokens a step with 1 to ``MOST_DRAFTS`` drafts, decoding greedily, over held-out prompts of ``length``.

    Raises CheckpointError.
    """
    spec = load_spec(checkpoint, num_draft_layers=1)
    drafter = _Drafter(load_model(checkpoint, spec), length + 2 * MOST_TOKENS)
    batch = held_out(length, num_prompts)
    num_tokens, num_steps = 0, [0] * MOST_DRAFTS
    for tokens, prompt_tokens in zip(batch.tokens, batch.prompt_tokens.tolist(), strict=True):
        num_right = drafter.right_drafts(tokens[:prompt_tokens].tolist())
        num_tokens += len(num_right)
        for number in range(MOST_DRAFTS):
            num_steps[number] += steps(num_right, number + 1)
    return tuple(num_tokens / steps for steps in num_steps)


def steps(num_right: Sequence[int], num_drafts: int) -> int:
    """That decoding takes when behind output token i so many drafts in a row would be right."""
    count = at = 0
    while at < len(num_right):
        at += 1 + min(num_right[at], num_drafts)
        count += 1
    return count


class _Drafter:
    """One sequence at a time, as a decode node runs it."""

    def __init__(self, model: DsaModel, num_tokens: int) -> None:
        self._model = model
        spec, num_pages = model.spec, -(-num_tokens // PAGE_SIZE)
        self._pages = torch.arange(num_pages)
        self._pools = [
            torch.zeros((layers, num_pages * PAGE_SIZE, num_bytes), dtype=torch.uint8)
            for layers, num_bytes in (
                (spec.num_kv_layers, spec.item_bytes),
                (spec.num_index_groups, spec.index_item_bytes),
            )
        ]

    def right_drafts(self, prompt: list[int]) -> list[int]:
        """For each output token but the last: how many drafts behind it are the model's own tokens."""
        states = []
        for start in range(0, len(prompt), CHUNK):
            token, state = self._forward(prompt[start : start + CHUNK], start)
            states.append(state)
        next_tokens = [*prompt[1:], token]
        for number, state in enumerate(states):
            start = number * CHUNK
            self._draft(next_tokens[start : start + CHUNK], state, start)
        output, chains = [token], []
        while token not in self._model.spec.eos_token_ids and len(output) < MOST_TOKENS:
            at = len(prompt) + len(output) - 1
            token, hidden = self._forward([token], at)
            output.append(token)
            guess, state = self._draft([token], hidden, at)
            guesses = [guess]
            for number in range(1, MOST_DRAFTS):
                guess, state = self._draft([guess], state, at + number)
                guesses.append(guess)
            chains.append(guesses)
        return [_num_equal(guesses, output[number + 2 :]) for number, guesses in enumerate(chains)]

    def _forward(self, tokens: list[int], start: int) -> tuple[int, Tensor]:
        kv = self._kv(tokens, start)
        logits, hidden = self._model.forward_with_hidden(torch.tensor(tokens), kv.positions, kv, kv.last_rows)
        return int(logits.argmax()), hidden

    def _draft(self, tokens: list[int], hidden: Tensor, start: int) -> tuple[int, Tensor]:
        kv = self._kv(tokens, start)
        logits, hidden = self._model.draft(torch.tensor(tokens), hidden, kv.positions, kv, kv.last_rows)
        return int(logits.argmax()), hidden

    def _kv(self, tokens: list[int], start: int) -> PagedKv:
        request = PagedRequest(self._pages, start, len(tokens))
        return PagedKv(self._model.spec, self._pools[0], self._pools[1], PAGE_SIZE, [request])


def _num_equal(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the first are right, one after the other."""
    count = 0
    for guess, token in zip(guesses, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count
