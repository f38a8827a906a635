# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.step_tokens`` on a GPU, whose functions of the same names call these and describe the arguments.

The likeliest token is found in two launches, because a single program would read a row of logits of a large
vocabulary for longer than the rest of a small step takes. Programs of the first find the best of CHUNK
logits; a program of the second takes the best of a row's chunks, and writes all that depends on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.checks import check_tensor
from hisparse_pd.kernels.triton_launch import begin, launch_options

CHUNK = 4096
"""Logits of one program."""
BLOCK = 128
"""Requests of one program of ``newest_tokens``."""


def newest_tokens(given: Tensor, own: Tensor, req_rows: Tensor) -> Tensor:
    num_reqs = len(given)
    out = torch.empty_like(req_rows)
    if num_reqs:
        # It has no ``launch_options``: only the kernels of layers overlap, and this one runs before them.
        with torch.cuda.device_of(out):
            newest_kernel[(triton.cdiv(num_reqs, BLOCK),)](
                given, own, req_rows, out, num_reqs, given.stride(0), BLOCK=BLOCK
            )
    return out


@triton.jit(do_not_specialize=["num_reqs", "given_stride"])
def newest_kernel(given, own, req_rows, out, num_reqs, given_stride, BLOCK: tl.constexpr):
    """Choose the newest tokens of BLOCK requests."""
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_req = req < num_reqs
    token = tl.load(given + req * given_stride, mask=is_req, other=0)
    row = tl.load(req_rows + req, mask=is_req, other=0)
    tl.store(out + req, tl.where(token < 0, tl.load(own + row, mask=is_req, other=0), token), mask=is_req)


def likeliest_tokens(logits: Tensor, known: Tensor) -> Tensor:
    tokens = torch.empty_like(known)
    _choose(logits, known, tokens)
    return tokens


def plain_results(
    logits: Tensor,
    known: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    error_flags: Tensor,
    counters: Tensor,
    newest: Tensor,
) -> Tensor:
    results = known.new_empty((len(known), 2 + counters.shape[1]))
    _choose(logits, known, results, (req_rows, num_real_reqs, error_flags, counters, newest))
    return results


def _choose(logits: Tensor, known: Tensor, out: Tensor, tables: tuple[Tensor, ...] = ()) -> None:
    """Write the tokens of all rows to ``out``, or with ``tables`` the rows of ``plain_results``."""
    check_tensor("logits", logits, dtypes=(torch.float32,), shape=(len(known), None))
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    best = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    # A kernel takes no None: ``out`` stands for absent tables, which are then not read.
    req_rows, num_real, flags, counters, newest = tables or (out,) * 5
    with torch.cuda.device_of(logits):
        best_of_chunk_kernel[(num_chunks, num_rows)](
            logits, best, best_tokens, vocab_size, CHUNK=CHUNK, **launch_options(logits.device)
        )
        choose_kernel[(num_rows,)](
            best,
            best_tokens,
            known,
            out,
            req_rows,
            num_real,
            flags,
            counters,
            newest,
            num_chunks,
            len(newest) - 1,
            NUM_COUNTERS=counters.shape[1] if tables else 0,
            HAS_TABLES=bool(tables),
            BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=1,
            **launch_options(logits.device),
        )


@triton.jit
def best_of_chunk_kernel(logits, best, best_tokens, vocab_size, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Find the largest of CHUNK logits of a row, of equal ones the first."""
    begin(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
    logit = tl.where(logit != logit, float("inf"), logit)
    # The places behind the vocabulary are the last ones, so they are chosen before no logit.
    largest, place = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + at, largest)
    tl.store(best_tokens + at, tl.program_id(0) * CHUNK + place)


@triton.jit(do_not_specialize=["num_chunks", "last_entry"])
def choose_kernel(
    best,
    best_tokens,
    known,
    out,
    req_rows,
    num_real,
    error_flags,
    counters,
    newest,
    num_chunks,
    last_entry,
    NUM_COUNTERS: tl.constexpr,
    HAS_TABLES: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Take the best token of a row's chunks, of equally likely ones the first, unless one is ``known``."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    of_chunks = tl.load(best + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    _, where = tl.max(of_chunks, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_tokens + row * num_chunks + where).to(tl.int64)
    given = tl.load(known + row)
    token = tl.where(given < 0, token, given)
    if HAS_TABLES:
        req_row = tl.load(req_rows + row)
        tl.store(newest + tl.where(row < tl.load(num_real), req_row, last_entry), token)
        columns = out + row * (NUM_COUNTERS + 2)
        tl.store(columns, tl.load(error_flags + req_row).to(tl.int64))
        for counter in tl.static_range(NUM_COUNTERS):
            tl.store(columns + 1 + counter, tl.load(counters + req_row * NUM_COUNTERS + counter))
        tl.store(columns + 1 + NUM_COUNTERS, token)
    else:
        tl.store(out + row, token)
