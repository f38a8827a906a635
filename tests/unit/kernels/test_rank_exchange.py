"""Exchanges of ranks through each other's memory, with the kernels' own code on this machine's CPU."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hisparse_pd.core.model import rank_exchange as exchanges
from hisparse_pd.core.model.rank_exchange import RankExchange, connect, sum_in_order
from hisparse_pd.kernels import rank_exchange
from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.rank_exchange import Pieces, RankMemory
from tests.unit.kernels.cuda_here import EACH_ARCHITECTURE, compile_cuda, layout_checks
from tests.unit.kernels.cuda_on_host import MAX_BLOCKS, MAX_PIECE_BYTES, HostKernels, HostRuntime
from tests.waiting import WAIT_SECS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("host"), rank_exchange.NUM_BANKS)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, host_kernels: HostKernels) -> None:
    runtime = HostRuntime()
    monkeypatch.setattr(
        rank_exchange, "cupy_module", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    )
    monkeypatch.setattr(rank_exchange, "compiled", lambda name: name)
    monkeypatch.setattr(rank_exchange, "launch", host_kernels.launch)
    monkeypatch.setattr(rank_exchange, "MAX_PIECE_BYTES", MAX_PIECE_BYTES)
    monkeypatch.setattr(rank_exchange, "MIN_PIECE_BYTES", 32)
    monkeypatch.setattr(rank_exchange, "NUM_CHANNELS", MAX_BLOCKS)
    monkeypatch.setattr(
        rank_exchange, "memory_bytes", lambda num_ranks: 8192 + 4 * num_ranks * 32 * MAX_PIECE_BYTES
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def as_ranks(num_ranks: int, run: Callable[[int], Any]) -> list[Any]:
    """Run one thread for each rank. Returns their results."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return [found.result(timeout=120) for found in [pool.submit(run, rank) for rank in range(num_ranks)]]


class Meeting:
    """A ``RankGroup.meet`` for threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=120)
        self._words: dict[str, dict[int, str]] = {}

    def of_rank(self, rank: int) -> Callable[[str, str], dict[int, str]]:
        def meet(what: str, word: str) -> dict[int, str]:
            self._words.setdefault(what, {})[rank] = word
            self._barrier.wait()
            return self._words[what]

        return meet


def memories(num_ranks: int) -> list[RankMemory]:
    found = [RankMemory(CPU, rank, num_ranks) for rank in range(num_ranks)]
    for rank, memory in enumerate(found):
        memory.connect({other: each.offer for other, each in enumerate(found) if other != rank})
    return found


def draw(rank: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1000 * call + rank)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=drawn, dtype=dtype)
    return (torch.randn(shape, generator=drawn) * 2.0 ** torch.randint(-9, 9, shape, generator=drawn)).to(
        dtype
    )


CALLS = [
    *(
        (rows, columns, dtype)
        for rows in (1, 2, 7, 33)
        for columns, dtype in ((64, torch.bfloat16), (5, torch.uint8))
    ),
    *(
        (3, 9, torch.bfloat16),
        (4, 4, torch.float32),
        (2, 9, torch.float32),
        (5, 36, torch.uint8),
        (0, 8, torch.float32),
    ),
]


@pytest.mark.parametrize(("num_ranks", "first"), [(2, 0), (3, 2**32 - 9), (4, 2**31 - 3)])
def test_gathers_and_sums_are_exact_in_any_order_of_sizes(on_host: None, num_ranks: int, first: int) -> None:
    """Counts of pieces wrap meanwhile, and ranks are late in turns."""
    of_ranks = memories(num_ranks)
    for memory in of_ranks:
        memory.begin_at(first)

    def run(rank: int) -> None:
        late = random.Random(rank)
        for call in range(2 * len(CALLS)):
            rows, columns, dtype = CALLS[call % len(CALLS)]
            if late.random() < 0.2:
                time.sleep(late.random() / 200)
            x = draw(rank, call, (rows, columns), dtype)
            out = torch.full((num_ranks * rows, columns), 77).to(dtype)
            of_ranks[rank].gather(out, x, WAIT_SECS, only_notes_overdue=True)
            expected = [draw(other, call, (rows, columns), dtype) for other in range(num_ranks)]
            assert torch.equal(out, torch.cat(expected)), (call, rows, columns)
            if dtype == torch.uint8:
                continue
            whole = (num_ranks * rows, columns)
            own = torch.full((rows, columns), 77).to(dtype)
            of_ranks[rank].sum_own(own, draw(rank, call, whole, dtype), WAIT_SECS, only_notes_overdue=True)
            parts = [
                draw(other, call, whole, dtype)[rank * rows : (rank + 1) * rows] for other in range(num_ranks)
            ]
            assert torch.equal(own, sum_in_order(parts)), (call, rows, columns)

    as_ranks(num_ranks, run)
    assert not any(memory.is_overdue() for memory in of_ranks)


@pytest.mark.parametrize("dtype", rank_exchange.SUM_DTYPES)
def test_a_rows_sum_has_the_same_bits_alone_and_among_others(on_host: None, dtype: torch.dtype) -> None:
    of_ranks = memories(3)
    rows = [draw(rank, 5, (40, 16), dtype) for rank in range(3)]

    def sums_of(count: int) -> list[torch.Tensor]:
        def run(rank: int) -> torch.Tensor:
            x = rows[rank][:count].repeat(3, 1)
            out = x.new_empty((count, 16))
            of_ranks[rank].sum_own(out, x, WAIT_SECS, only_notes_overdue=True)
            return out

        return as_ranks(3, run)

    of_all = sums_of(40)
    assert all(torch.equal(of_all[0], of_rank) for of_rank in of_all), "who adds up does not matter"
    if dtype == torch.float32:
        other_order = sum_in_order([rows[2], rows[1], rows[0]])
        assert not torch.equal(of_all[0], other_order), "the rows are to show an order"
    for count in (1, 2, 13):
        assert all(torch.equal(found, of_all[0][:count]) for found in sums_of(count))


def test_a_missing_rank_is_noted(on_host: None) -> None:
    (memory, _) = memories(2)
    x = torch.ones((8, 64), dtype=torch.bfloat16)
    memory.gather(x.new_empty((16, 64)), x, 0.05, only_notes_overdue=True)
    assert memory.is_overdue()


def test_ranks_connect_where_all_of_them_can(
    on_host: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchanges, "TRIAL_ROWS", (1, 5))
    monkeypatch.setattr(exchanges, "TRIAL_COLUMNS", 24)
    meeting = Meeting(2)

    def run(rank: int) -> RankExchange | None:
        return connect(meeting.of_rank(rank), CPU, rank, 2, WAIT_SECS, is_wanted=True)

    with caplog.at_level("INFO"):
        found = as_ranks(2, run)
    assert all(found), caplog.text
    x = torch.ones((1, 8))
    small, large = (x.expand(rows, 8) for rows in (1, 1 << 20))
    assert (found[0].gathers(small), found[0].gathers(large)) == (True, False)
    assert (found[0].sums(large), found[0].sums(large.half())) == (True, False)


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("switched off", "it is switched off"),
        ("unreachable", "rank 1: RuntimeError: far"),
        ("wrong sums", "rank "),
    ],
)
def test_one_rank_that_cannot_makes_all_use_nccl(
    on_host: None, reason: str, word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks log the reason, because with wrong sums on one rank the others would not know it."""
    monkeypatch.setattr(exchanges, "TRIAL_ROWS", (1,))
    monkeypatch.setattr(exchanges, "TRIAL_COLUMNS", 24)
    monkeypatch.setattr(exchanges, "TRIAL_SECS", 0.2)
    connect_memory, sum_own = RankMemory.connect, RankMemory.sum_own

    def refuse(memory: RankMemory, others: Any) -> None:
        if reason == "unreachable" and memory.rank == 1:
            raise RuntimeError("far")
        connect_memory(memory, others)

    def damage(memory: RankMemory, out: torch.Tensor, *rest: Any, **options: Any) -> None:
        sum_own(memory, out, *rest, **options)
        if reason == "wrong sums" and memory.rank == 1:
            out[-1, -1] += 1000

    monkeypatch.setattr(RankMemory, "connect", refuse)
    monkeypatch.setattr(RankMemory, "sum_own", damage)
    meeting = Meeting(2)

    def run(rank: int) -> RankExchange | None:
        is_wanted = reason != "switched off" or rank == 0
        return connect(meeting.of_rank(rank), CPU, rank, 2, WAIT_SECS, is_wanted=is_wanted)

    with caplog.at_level("INFO"):
        assert as_ranks(2, run) == [None, None]
    said = [text for text in caplog.messages if "by NCCL" in text]
    assert len(said) == 2
    assert len(set(said)) == 1
    assert word in said[0]


def test_pieces_cover_a_part_and_fit_their_slots() -> None:
    for part_bytes in (
        1,
        15,
        16,
        17,
        4096,
        4097,
        14336,
        14400,
        131072,
        2 << 20,
        (2 << 20) + 1,
        29 << 20,
        10**9 + 7,
    ):
        pieces = Pieces.of(part_bytes)
        assert 1 <= pieces.num_blocks <= rank_exchange.NUM_CHANNELS
        assert pieces.piece_bytes % rank_exchange.ALIGNMENT == 0
        assert pieces.piece_bytes <= rank_exchange.MAX_PIECE_BYTES
        covered = pieces.num_blocks * pieces.num_rounds * pieces.piece_bytes
        assert part_bytes <= covered < part_bytes + pieces.num_blocks * pieces.num_rounds * 16 + 16
    assert Pieces.of(14336).num_blocks == 4
    assert Pieces.of(64 * 14336).num_rounds == 1


def test_tensors_of_other_sizes_are_refused(on_host: None) -> None:
    memory = memories(2)[0]
    x = torch.ones((4, 8))
    with pytest.raises(KernelArgumentError, match="does not match the x of all ranks"):
        memory.gather(torch.empty((7, 8)), x, 1.0, only_notes_overdue=True)
    with pytest.raises(KernelArgumentError, match="contiguous"):
        memory.sum_own(torch.empty((2, 8)), x.expand(3, 4, 8)[:, :, :1], 1.0, only_notes_overdue=True)
    with pytest.raises(KernelArgumentError, match="bfloat16 or torch"):
        memory.sum_own(torch.empty((2, 8)).half(), x.half(), 1.0, only_notes_overdue=True)


@EACH_ARCHITECTURE
def test_compiles(arch: int, tmp_path: Path) -> None:
    source = rank_exchange.source() + layout_checks({"ExchangeParams": rank_exchange.PARAMS})
    names = ("MAX_RANKS", "NUM_THREADS", "NUM_CHANNELS", "NUM_BANKS", "MAX_PIECE_BYTES", "HEADER_BYTES")
    for name in names:
        source += f"static_assert({name} == {getattr(rank_exchange, name)});\n"
    source += f"static_assert(__builtin_offsetof(Header, is_overdue) == {4 * rank_exchange.IS_OVERDUE});\n"
    log = compile_cuda(source, arch, rank_exchange.compile_options(), tmp_path, set(rank_exchange.kernels()))
    if log is not None:
        assert max(map(int, re.findall(r"Used (\d+) registers", log))) <= 128, (
            "512 threads share 65536 registers"
        )
        assert " 0 bytes spill stores" in log
