"""One rank of a node, with experts that the ranks have in common.

usage: python -m tests.unit.model.rank_process RANK SIZE MEETING_PATH SCENARIO

What it has to tell is left in a file ``rank-N.json`` beside the meeting place.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.core.model import page_sharing
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.rank_group import RankGroup, RankGroupError
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.row_math import fix_arithmetic

CPU, NUM, HIDDEN, INNER, TOP_K = torch.device("cpu"), 7, 24, 18, 3


def told_path(directory: Path, rank: int) -> Path:
    """Return the file in which a rank leaves what it has to tell."""
    return directory / f"rank-{rank}.json"


def filled(ranks: RankGroup | None, *, is_fp8: bool) -> RoutedExperts:
    experts = RoutedExperts(NUM, HIDDEN, INNER, FP8 if is_fp8 else torch.float32, CPU, ranks)
    for matrices, seed in ((experts.gate_up, 1), (experts.down, 2)):
        shape = (NUM, *matrices.values.shape[1:])
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        matrices.values.copy_(whole[experts.experts.start : experts.experts.stop])
        if matrices.scales is not None:
            matrices.scales.fill_(0.5)
    return experts


def tokens_of(rank: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, expert ids and weights of a rank's tokens in one forward; there may be none."""
    drawn = torch.Generator().manual_seed(100 * number + rank)
    count = int(torch.randint(0, 40, (1,), generator=drawn)) * (number % 3 > 0 or rank > 0)
    scores = torch.rand((count, NUM), generator=drawn)
    weights = torch.rand((count, TOP_K), generator=drawn)
    return torch.randn((count, HIDDEN), generator=drawn), scores.topk(TOP_K).indices, weights


def check_agreement(group: RankGroup, rank: int, size: int) -> None:
    for agree in (group.agree, group.agree_over_network):
        assert agree(rank, 5) == [(each, 5) for each in range(size)]
        assert agree(*range(9)) == [tuple(range(9))] * size


def check_bells(group: RankGroup, rank: int, patience_secs: float) -> None:
    assert group.bells.heard() == []
    group.agree(0)
    if rank == 0:
        group.bells.ring(7)
        group.bells.ring(8)
    heard: list[int] = []
    while rank > 0 and len(heard) < 2:
        assert group.bells.socket.poll(int(patience_secs * 1000))
        heard += group.bells.heard()
    assert heard == ([] if rank == 0 else [7, 8])
    group.agree(0)
    assert group.bells.heard() == []


def check_settings(group: RankGroup, rank: int) -> None:
    other = 0 if rank else 1
    words = f"dtype is 'of {rank}' on rank {rank} and 'of {other}' on rank {other}"
    with pytest.raises(RankGroupError, match=words):
        group.check_same({"page_size": 64, "dtype": f"of {rank}"})


def check_rehearsal(group: RankGroup, rank: int, size: int) -> None:
    rehearsing = filled(group, is_fp8=False)
    rows = torch.full((2, 3), float(rank))
    with group.rehearsal():
        for _ in range(rank):  # other forwards on each rank: nobody waits for anybody
            group.step_tokens = 40
            assert rehearsing(*tokens_of(rank, 1)).shape == tokens_of(rank, 1)[0].shape
        assert torch.equal(group.gather(rows), rows.repeat(size, 1))
        assert torch.equal(group.sum_own(group.gather(rows)), rows)
    assert torch.equal(group.gather(rows)[::2, 0], torch.arange(float(size)))


def compare_experts(group: RankGroup, rank: int, size: int) -> tuple[int, list[int]]:
    """Return how many forwards had the bits of one rank alone, and the experts of this rank."""
    num_equal = 0
    for is_fp8 in (False, True):
        together, alone = filled(group, is_fp8=is_fp8), filled(None, is_fp8=is_fp8)
        for number in range(12):
            hidden, ids, weights = tokens_of(rank, number)
            group.step_tokens = max(len(tokens_of(each, number)[0]) for each in range(size))
            if len(hidden):
                found = together(hidden, ids, weights)
                assert torch.equal(found, alone(hidden, ids, weights)), (is_fp8, number)
                num_equal += 1
            else:
                together.join_forward(hidden, TOP_K)
    return num_equal, list(together.experts)


def lose_another(group: RankGroup, rank: int, told: Path, *, is_killed: bool) -> NoReturn:
    """Rank 0 waits for one that is killed, or that neither answers nor ends."""
    if rank == 0:
        try:
            group.agree(1)
            group.agree(2)
        except RankGroupError as error:
            told.write_text(json.dumps(str(error)))
        os._exit(0)  # as an engine does that lost another rank
    group.agree(1)
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
    os._exit(0)


def main(rank: int, size: int, path: Path, scenario: str) -> None:
    fix_arithmetic()
    logging.basicConfig(level=logging.INFO)
    patience_secs = {"together": 60.0, "apart": 60.0, "killed": 3600.0}.get(scenario, 5.0)
    forward_secs = patience_secs if scenario == "late" else 60.0
    if scenario == "late" and rank == 1:
        time.sleep(patience_secs + 2)
    if scenario == "apart" and rank == 1:

        def elsewhere(self: page_sharing.PageRequest, word: str, rank: int) -> None:
            raise ConnectionRefusedError("rank 0 is elsewhere")

        page_sharing.PageRequest.__init__ = elsewhere  # type: ignore[method-assign]
    group = RankGroup(
        RankPlace(rank, size, str(path)), CPU, agree_secs=patience_secs, forward_secs=forward_secs
    )
    told = told_path(path.parent, rank)
    match scenario:
        case "late":
            if rank == 0:
                time.sleep(patience_secs + 2)
            group.meet("loaded")
            told.write_text(json.dumps(group.agree(rank)))
        case "absent" | "killed":
            lose_another(group, rank, told, is_killed=scenario == "killed")
        case "apart":
            check_agreement(group, rank, size)
        case _:
            check_agreement(group, rank, size)
            check_bells(group, rank, patience_secs)
            check_settings(group, rank)
            check_rehearsal(group, rank, size)
            told.write_text(json.dumps(compare_experts(group, rank, size)))
    group.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
