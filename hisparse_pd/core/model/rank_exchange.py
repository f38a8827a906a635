"""Gathers and sums among the GPUs of a node over each other's memory, where that is possible.

It is possible if all ranks are on one machine, each GPU reaches the memory of all others, and a trial at the
start succeeds. ``RankGroup`` calls ``connect`` at the start, and then asks the ``RankExchange`` for each
tensor whether it takes it; NCCL does the rest. ``connect`` has the same outcome on every rank, and logs why
it failed.

Sums go this way whatever their size, in one order of additions (``RankExchange.sum_own``): NCCL's order
depends on the size, and a request's tokens would depend on others in the batch. A gather adds nothing, so
large ones may go by NCCL.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse_pd.kernels.rank_exchange import MAX_RANKS, SUM_DTYPES, MemoryOffer, RankMemory

log = logging.getLogger(__name__)

Meet = Callable[[str, str], dict[int, str]]
"""The type of ``RankGroup.meet``, which waits until every rank has done what the first argument says, and
returns each rank's second argument, by rank."""

MAX_GATHER_BYTES = 4 << 20
"""Most bytes of a rank's rows that are gathered here. NCCL gathers larger tensors as fast."""
TRIAL_SECS = 20.0
"""How long ranks wait for each other in a trial: not long, because ``RankMemory.connect`` has compiled the
kernels before."""
TRIAL_ROWS = (1, 5, 64, 199)
"""Rows of the trials' exchanges, which take one block, many blocks, and several rounds."""
TRIAL_COLUMNS = 7168
"""Numbers of a row in the trials, as in DeepSeek-V3.2's hidden states."""
_PRIME = 65521
"""The modulus of the trials' inputs, which lie around 0."""
_NUM_TRIALS = 3
"""Trials of each size. Exchanges take turns with four parts of the memory (``NUM_BANKS`` of
``kernels.rank_exchange``), and with this many trials each part is used several times."""


class RankExchange:
    """Gathers and sums of one rank by the kernels of ``kernels.rank_exchange``, on the current stream."""

    def __init__(self, memory: RankMemory, rank: int, num_ranks: int, patience_secs: float) -> None:
        self.memory = memory
        self.max_gather_bytes = MAX_GATHER_BYTES
        self._rank, self._num_ranks, self._patience_secs = rank, num_ranks, patience_secs
        self._is_trial = False
        """Whether a late rank is only noted, which ``try_out`` reports; otherwise it ends the process."""

    def gathers(self, x: Tensor) -> bool:
        """Whether ``x`` is to be gathered here; the answer is the same on all ranks."""
        return x.nbytes <= self.max_gather_bytes

    def sums(self, x: Tensor) -> bool:
        """Whether ``x`` is to be summed here; only the dtype decides."""
        return x.dtype in SUM_DTYPES

    def gather(self, out: Tensor, x: Tensor) -> None:
        """Write the rows ``x`` [n, …] of all ranks into ``out`` [num_ranks * n, …], in the order of ranks."""
        self.memory.gather(out, x, self._patience_secs, only_notes_overdue=self._is_trial)

    def sum_own(self, out: Tensor, x: Tensor) -> None:
        """Write the sum over all ranks of this rank's part of their ``x`` [num_ranks * n, …] into ``out``
        [n, …]. Parts are in the order of ranks."""
        self.memory.sum_own(out, x, self._patience_secs, only_notes_overdue=self._is_trial)

    @torch.no_grad()
    def try_out(self, device: torch.device) -> str:
        """Try exchanges of ``TRIAL_ROWS`` in each dtype. Returns what was wrong, or an empty string."""
        patience_secs, self._patience_secs, self._is_trial = self._patience_secs, TRIAL_SECS, True
        try:
            for trial in range(_NUM_TRIALS):
                for num_rows in TRIAL_ROWS:
                    fault = self._fault_of_trial(num_rows, trial, device)
                    if self.memory.is_overdue():
                        return f"another rank's part had not come {TRIAL_SECS:g} s later"
                    if fault:
                        return fault
        finally:
            self._patience_secs, self._is_trial = patience_secs, False
        return ""

    def _fault_of_trial(self, num_rows: int, trial: int, device: torch.device) -> str:
        """Sum and gather ``num_rows`` rows of each rank, in each dtype, and compare with the expected
        results."""
        ranks, first = range(self._num_ranks), self._rank * num_rows
        for dtype in SUM_DTYPES:
            given = _values(0, self._num_ranks * num_rows, trial, self._rank, device).to(dtype)
            own = given.new_empty((num_rows, TRIAL_COLUMNS))
            self.sum_own(own, given)
            parts = [_values(first, num_rows, trial, rank, device).to(dtype) for rank in ranks]
            if not torch.equal(own, sum_in_order(parts)):
                return f"sums of {num_rows} rows of {dtype} are wrong"
            gathered = torch.empty_like(given)
            self.gather(gathered, given[:num_rows])
            rows = [_values(0, num_rows, trial, rank, device).to(dtype) for rank in ranks]
            if not torch.equal(gathered, torch.cat(rows)):
                return f"{num_rows} rows of {dtype} arrive wrong"
        return ""


def _values(first_row: int, num_rows: int, trial: int, rank: int, device: torch.device) -> Tensor:
    """Return rows of the input of ``rank`` to a trial; every rank computes those of all ranks.

    They are whole numbers of both signs and very different sizes, so that sums are rounded. Each rank has
    other ones in each trial.
    """
    start, stop = first_row * TRIAL_COLUMNS, (first_row + num_rows) * TRIAL_COLUMNS
    places = torch.arange(start, stop, device=device)
    values = (places * 48271 + (MAX_RANKS * trial + rank + 1) * 16807) % _PRIME - _PRIME // 2
    return values.bfloat16().view(num_rows, TRIAL_COLUMNS)


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Return the sum that ``RankExchange.sum_own`` makes of the ranks' parts, bit for bit."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def connect(
    meet: Meet, device: torch.device, rank: int, num_ranks: int, patience_secs: float, *, is_wanted: bool
) -> RankExchange | None:
    """Connect all ranks of one machine, which make this call together.

    The ranks meet three times: when each has offered its memory, opened that of the others, and tried it.
    Returns None on all ranks if one of them cannot do its part, or does not want to. ``patience_secs``: how
    long an exchange waits for a late rank.
    """
    own: list[RankMemory] = []  # this rank's memory, once ``offer`` has made it

    def offer() -> str:
        if not is_wanted:
            raise RuntimeError("it is switched off")
        own.append(RankMemory(device, rank, num_ranks))
        return json.dumps([own[0].offer.gpu, own[0].offer.handle.hex()])

    def open_others(words: dict[int, str]) -> str:
        pairs = {other: json.loads(word) for other, word in words.items() if other != rank}
        own[0].connect(
            {other: MemoryOffer(gpu, bytes.fromhex(handle)) for other, (gpu, handle) in pairs.items()}
        )
        return ""

    words, refusals = _meet_with_result(meet, "offered memory to other GPUs", offer)
    if not refusals:
        _, refusals = _meet_with_result(meet, "opened the memory of other GPUs", lambda: open_others(words))
    if not refusals:
        exchange = RankExchange(own[0], rank, num_ranks, patience_secs)
        _, refusals = _meet_with_result(
            meet, "tried the memory of other GPUs", lambda: _try_out(exchange, device)
        )
    if refusals:
        first = min(refusals)
        log.log(
            logging.WARNING if is_wanted else logging.INFO,
            "ranks exchange tokens by NCCL, not over GPUs' memory: rank %d: %s", first, refusals[first],
        )  # fmt: skip
        return None
    log.info("ranks exchange tokens over GPUs' memory")
    return exchange


def _try_out(exchange: RankExchange, device: torch.device) -> str:
    """Return an empty string, or raise RuntimeError if the trial fails."""
    fault = exchange.try_out(device)
    torch.cuda.empty_cache()  # the model is loaded next, and needs the trial's memory
    if fault:
        raise RuntimeError(fault)
    return ""


class _Results(NamedTuple):
    """The results of a meeting, by rank."""

    words: dict[int, str]
    """The result of ``do``; an empty string where it failed."""
    refusals: dict[int, str]
    """The errors of the ranks that could not do their part."""


def _meet_with_result(meet: Meet, what: str, do: Callable[[], str]) -> _Results:
    """Run ``do``, which every rank does, and tell all ranks what it returned, or why it failed."""
    try:
        word = {"word": do()}
    except Exception as error:
        # The driver, the compiler, or cupy, which may be missing, failed: NCCL is used instead.
        word = {"refusal": f"{type(error).__name__}: {error}"}
    words = {rank: json.loads(text) for rank, text in meet(what, json.dumps(word)).items()}
    refusals = {rank: found["refusal"] for rank, found in words.items() if "refusal" in found}
    return _Results({rank: found.get("word", "") for rank, found in words.items()}, refusals)
