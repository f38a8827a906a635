"""Random logits and tables of a decode step, and the tokens that follow from them by a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse_pd.kernels import step_tokens

NUM_ROWS = 9


class Functions(NamedTuple):
    """The functions of ``kernels.step_tokens``, on some device."""

    newest_tokens: Callable[..., Tensor] = step_tokens.newest_tokens
    likeliest_tokens: Callable[..., Tensor] = step_tokens.likeliest_tokens
    plain_results: Callable[..., Tensor] = step_tokens.plain_results


def drawn_logits(num_rows: int, vocab_size: int) -> Tensor:
    """Return logits of few values, so that most maxima have equals; among them zeros of both signs, a row of
    -inf, and rows with infinity and NaN."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 4, (num_rows, vocab_size), generator=generator) / 2 - 5.0
    logits[0::4, vocab_size // 2] = 0.0
    logits[0::4, vocab_size // 3] = -0.0
    logits[1::8] = -math.inf
    logits[2::8, vocab_size // 5] = math.inf
    logits[3::8, vocab_size - 1] = -math.nan
    return logits


def likeliest_by_loop(logits: Tensor, known: Tensor) -> list[int]:
    tokens = []
    for row, given in zip(logits.tolist(), known.tolist(), strict=True):
        numbers = [math.inf if math.isnan(logit) else logit for logit in row]
        tokens.append(numbers.index(max(numbers)) if given < 0 else given)
    return tokens


def check(functions: Functions, vocab_sizes: list[int], device: str = "cpu") -> None:
    """Compare the functions with plain loops. ``vocab_sizes``: numbers of logits in a row."""
    generator = torch.Generator().manual_seed(4)
    own = torch.randint(0, 1000, (NUM_ROWS + 1,), generator=generator)
    flags = torch.randint(0, 9, (NUM_ROWS,), generator=generator).int()
    counters = torch.randint(0, 1 << 40, (NUM_ROWS, 3), generator=generator)
    for num_reqs, num_real in ((1, 1), (5, 5), (NUM_ROWS, 6), (4, 0)):
        req_rows = torch.randperm(NUM_ROWS, generator=generator)[:num_reqs]
        _check_newest(functions, own, req_rows, device, generator)
        for vocab_size in vocab_sizes:
            logits = drawn_logits(num_reqs, vocab_size)
            known = torch.where(torch.rand(num_reqs, generator=generator) < 0.7, -1, 7)
            tokens = likeliest_by_loop(logits, known)
            found = functions.likeliest_tokens(logits.to(device), known.to(device))
            assert found.dtype == torch.int64
            assert found.tolist() == tokens

            newest = own.to(device, copy=True)
            given = (logits, known, req_rows, torch.tensor([num_real]).int(), flags, counters)
            results = functions.plain_results(*(tensor.to(device) for tensor in given), newest)
            rows = req_rows.tolist()
            assert results[:, step_tokens.TOKEN_COLUMN].tolist() == tokens
            assert results.tolist() == [
                [int(flags[row]), *counters[row].tolist(), token]
                for row, token in zip(rows, tokens, strict=True)
            ]
            expected = own.tolist()[:-1]  # padding writes the last entry alone
            for row, token in zip(rows[:num_real], tokens[:num_real], strict=True):
                expected[row] = token
            assert newest.tolist()[:-1] == expected


def _check_newest(
    functions: Functions, own: Tensor, req_rows: Tensor, device: str, generator: torch.Generator
) -> None:
    given = torch.randint(-1, 2, (len(req_rows), 3), generator=generator).to(device)[:, 1]  # not contiguous
    found = functions.newest_tokens(given, own.to(device), req_rows.to(device))
    pairs = zip(given.tolist(), req_rows.tolist(), strict=True)
    assert found.tolist() == [int(own[row]) if token < 0 else token for token, row in pairs]
