"""The tokens at both ends of a decode step: the newest ones, which its forward reads, and the likeliest ones,
which it finds: in torch, and on a GPU in one or two launches each.

``decode_node/step_halves.py`` calls these functions. None of them synchronises, so a CUDA graph can capture
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKEN_COLUMN = 4
"""The token's column in ``plain_results``."""


def newest_tokens(given: Tensor, own: Tensor, req_rows: Tensor) -> Tensor:
    """Return the newest token of each request, int64 [num_reqs]: the one ``given`` unless it is negative,
    else that of the request's row.

    ``given``: int64 [num_reqs] of any stride; ``own``: int64 [rows of the tables, or more]; ``req_rows``:
    int64 [num_reqs], valid for padding too. None is changed.
    """
    if given.device.type == "cuda":
        from hisparse_pd.kernels import triton_step_tokens

        return triton_step_tokens.newest_tokens(given, own, req_rows)
    return torch.where(given < 0, own[req_rows], given)


def likeliest_tokens(logits: Tensor, known: Tensor) -> Tensor:
    """Return the token behind each row, int64 [num_rows]: the one ``known`` unless it is negative, else the
    likeliest. Of equally likely tokens that is the lowest id; NaN counts as infinity.

    ``logits``: float32 [num_rows, vocab_size], contiguous; ``known``: int64 [num_rows]. None is changed.
    """
    if logits.device.type == "cuda":
        from hisparse_pd.kernels import triton_step_tokens

        return triton_step_tokens.likeliest_tokens(logits, known)
    likeliest = logits.masked_fill(logits.isnan(), float("inf")).argmax(dim=-1)  # the first of equal ones
    return torch.where(known < 0, likeliest, known)


def row_results(error_flags: Tensor, counters: Tensor, req_rows: Tensor) -> Tensor:
    """Return the error flags and the counters of the requests' rows: int64 [num_reqs, 4]. The arguments are
    those of ``plain_results``, and are not changed."""
    return torch.cat((error_flags[req_rows].long()[:, None], counters[req_rows]), dim=1)


def plain_results(
    logits: Tensor,
    known: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    error_flags: Tensor,
    counters: Tensor,
    newest: Tensor,
) -> Tensor:
    """Return what the host reads of a step without drafts: int64 [num_reqs, 5], for each request the error
    flags and the counters of its row, and its token in TOKEN_COLUMN. The token is also written to ``newest``.

    ``logits``, ``known``: as for ``likeliest_tokens``, a row for each request. ``req_rows``: int64
    [num_reqs], valid for padding too; ``num_real_reqs``: int32 [1], requests from this number on are padding.
    ``error_flags``: int32 [rows]; ``counters``: int64 [rows, 3]; ``newest``: int64 [num_entries], by row,
    whose last entry takes what padding writes. All but ``newest`` are not changed.
    """
    if logits.device.type == "cuda":
        from hisparse_pd.kernels import triton_step_tokens

        return triton_step_tokens.plain_results(
            logits, known, req_rows, num_real_reqs, error_flags, counters, newest
        )
    tokens = likeliest_tokens(logits, known)
    is_real = torch.arange(len(tokens)) < num_real_reqs
    newest[torch.where(is_real, req_rows, len(newest) - 1)] = tokens
    return torch.cat((row_results(error_flags, counters, req_rows), tokens[:, None]), dim=1)
