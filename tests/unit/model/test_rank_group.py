"""Ranks as processes: experts that they have in common, and what the absence of one means."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hisparse_pd.base.ports import free_port
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.core.model.rank_group import RankGroup, RankGroupError
from tests.preloaded import Preloaded
from tests.unit.model import rank_process
from tests.unit.model.rank_process import told_path

END_TIMEOUT_SECS = 240.0


class Ranks:
    """All ranks of one node, each a process."""

    def __init__(self, preloaded: Preloaded, size: int, directory: Path, scenario: str) -> None:
        self._directory = directory
        self.processes = []
        for rank in range(size):
            arguments = [str(rank), str(size), str(directory / "meeting"), scenario]
            with self._log(rank).open("wb") as log:
                self.processes.append(preloaded.start(rank_process.__name__, arguments, os.environ, log))

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.log"

    def log(self, rank: int) -> str:
        return self._log(rank).read_text()

    def told(self, rank: int) -> Any:
        """Wait for the end of a rank; return what it told."""
        assert self.processes[rank].wait(END_TIMEOUT_SECS) == 0, self.log(rank)
        return json.loads(told_path(self._directory, rank).read_text())


@pytest.mark.I5
def test_experts_of_three_ranks_do_what_one_rank_does_to_the_last_bit(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    """Ranks have different numbers of tokens, one none, in float32 and with weights in fp8."""
    ranks = Ranks(preloaded, 3, tmp_path, "together")
    shares = []
    for rank in range(3):
        num_equal, experts = ranks.told(rank)
        assert num_equal >= 12
        assert "agree through shared memory" in ranks.log(rank)
        shares.append(experts)
    assert sorted(expert for share in shares for expert in share) == list(range(7))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_without_common_memory_agree_over_the_network(preloaded: Preloaded, tmp_path: Path) -> None:
    ranks = Ranks(preloaded, 2, tmp_path, "apart")
    for rank, process in enumerate(ranks.processes):
        assert process.wait(END_TIMEOUT_SECS) == 0, ranks.log(rank)
        assert "over the network: rank 1 has no shared memory: rank 0 is elsewhere" in ranks.log(rank)


@pytest.mark.I7
def test_a_rank_that_is_killed_is_noticed_at_once(preloaded: Preloaded, tmp_path: Path) -> None:
    ranks = Ranks(preloaded, 2, tmp_path, "killed")
    told = ranks.told(0)
    assert "rank 0: another rank of this node has died, or stands still: rank 1 has ended" in told, ranks.log(
        0
    )
    assert ranks.processes[1].wait(END_TIMEOUT_SECS) == -signal.SIGKILL


@pytest.mark.I7
@pytest.mark.slow
def test_a_rank_that_stands_still_is_noticed(preloaded: Preloaded, tmp_path: Path) -> None:
    ranks = Ranks(preloaded, 2, tmp_path, "absent")
    assert "rank 0: another rank of this node has died, or stands still" in ranks.told(0), ranks.log(0)
    ranks.processes[1].kill()
    ranks.processes[1].wait(END_TIMEOUT_SECS)


@pytest.mark.slow
def test_a_rank_may_take_longer_to_start_and_to_load_than_an_operation_takes(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    ranks = Ranks(preloaded, 2, tmp_path, "late")
    assert [ranks.told(rank) for rank in range(2)] == [[[0], [1]]] * 2


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    place = RankPlace(1, 2, str(tmp_path / "meeting"))
    with pytest.raises(RankGroupError, match=r"rank 1 has started, and another rank .* has not 0\.1 s later"):
        RankGroup(place, torch.device("cpu"), agree_secs=60.0, forward_secs=60.0, start_secs=0.1)


def test_a_rank_whose_meeting_place_ends_says_so() -> None:
    """The meeting place ends with rank 0, long before the time for a start is up."""
    port = free_port()
    meeting = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    place = RankPlace(1, 2, meeting_host="127.0.0.1", meeting_port=port)
    start = partial(RankGroup, agree_secs=60.0, forward_secs=60.0, start_secs=600.0)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(start, place, torch.device("cpu"))
        meeting.get("started 1")
        del meeting
        with pytest.raises(RankGroupError, match=r"rank 0 .*, where ranks meet, has ended before all have"):
            starting.result(60)
