"""Ranks as processes: experts that they have in common, and what the absence of one means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hisparse_pd.base.ports import free_port
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.core.model.rank_group import RankGroup, RankGroupError

REPO = Path(__file__).parents[3]
PROGRAM = """
import json
import logging
import os
import signal
import sys
import time
import torch
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.row_math import fix_arithmetic
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model import page_sharing
from hisparse_pd.core.model.rank_group import RankGroup, RankGroupError
from hisparse_pd.base.vocabulary import RankPlace

fix_arithmetic()
logging.basicConfig(level=logging.INFO)
rank, size, path, scenario = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
CPU, NUM, HIDDEN, INNER, TOP_K = torch.device("cpu"), 7, 24, 18, 3
PATIENCE_SECS = {"together": 60.0, "apart": 60.0, "killed": 3600.0}.get(scenario, 5.0)
FORWARD_SECS = PATIENCE_SECS if scenario == "late" else 60.0
if scenario == "late" and rank == 1:
    time.sleep(PATIENCE_SECS + 2)
if scenario == "apart" and rank == 1:
    def elsewhere(*_):
        raise ConnectionRefusedError("rank 0 is elsewhere")
    page_sharing.PageRequest.__init__ = elsewhere
group = RankGroup(RankPlace(rank, size, path), CPU, agree_secs=PATIENCE_SECS, forward_secs=FORWARD_SECS)

def filled(ranks, is_fp8):
    experts = RoutedExperts(NUM, HIDDEN, INNER, FP8 if is_fp8 else torch.float32, CPU, ranks)
    for matrices, seed in ((experts.gate_up, 1), (experts.down, 2)):
        shape = (NUM, *matrices.values.shape[1:])
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        matrices.values.copy_(whole[experts.experts.start : experts.experts.stop])
        if matrices.scales is not None:
            matrices.scales.fill_(0.5)
    return experts

def tokens_of(rank, number):
    drawn = torch.Generator().manual_seed(100 * number + rank)
    count = int(torch.randint(0, 40, (1,), generator=drawn)) * (number % 3 > 0 or rank > 0)
    scores = torch.rand((count, NUM), generator=drawn)
    weights = torch.rand((count, TOP_K), generator=drawn)
    return torch.randn((count, HIDDEN), generator=drawn), scores.topk(TOP_K).indices, weights

if scenario == "late":
    if rank == 0:
        time.sleep(PATIENCE_SECS + 2)
    group.meet("loaded")
    print(json.dumps(group.agree(rank)))
    group.leave()
    sys.exit()
if scenario in ("absent", "killed"):
    if rank == 0:
        try:
            group.agree(1)
            group.agree(2)
        except RankGroupError as error:
            print(json.dumps(str(error)), flush=True)
        os._exit(0)  # as an engine does that lost another rank
    group.agree(1)
    if scenario == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()  # neither an answer nor an end
    os._exit(0)
for agree in (group.agree, group.agree_over_network):
    assert agree(rank, 5) == [(each, 5) for each in range(size)]
    assert agree(*range(9)) == [tuple(range(9))] * size
if scenario == "apart":
    group.leave()
    sys.exit()
assert group.bells.heard() == []
group.agree(0)
if rank == 0:
    group.bells.ring(7)
    group.bells.ring(8)
heard = []
while rank > 0 and len(heard) < 2:
    assert group.bells.socket.poll(PATIENCE_SECS * 1000)
    heard += group.bells.heard()
assert heard == ([] if rank == 0 else [7, 8])
group.agree(0)
assert group.bells.heard() == []
try:
    group.check_same({"page_size": 64, "dtype": f"of {rank}"})
except RankGroupError as error:
    other = 0 if rank else 1
    assert f"dtype is 'of {rank}' on rank {rank} and 'of {other}' on rank {other}" in str(error), str(error)
else:
    raise AssertionError("ranks with other settings")
rehearsing = filled(group, False)
rows = torch.full((2, 3), float(rank))
with group.rehearsal():
    for number in range(rank):  # other forwards on each rank: nobody waits for anybody
        group.step_tokens = 40
        assert rehearsing(*tokens_of(rank, 1)).shape == tokens_of(rank, 1)[0].shape
    assert torch.equal(group.gather(rows), rows.repeat(size, 1))
    assert torch.equal(group.sum_own(group.gather(rows)), rows)
assert torch.equal(group.gather(rows)[::2, 0], torch.arange(float(size)))
num_equal = 0
for is_fp8 in (False, True):
    together, alone = filled(group, is_fp8), filled(None, is_fp8)
    for number in range(12):
        hidden, ids, weights = tokens_of(rank, number)
        group.step_tokens = max(len(tokens_of(each, number)[0]) for each in range(size))
        if len(hidden):
            found = together(hidden, ids, weights)
            assert torch.equal(found, alone(hidden, ids, weights)), (is_fp8, number)
            num_equal += 1
        else:
            together.forward_of_others(hidden, TOP_K)
print(json.dumps([num_equal, [each for each in together.experts]]))
group.leave()
"""


def start(rank: int, size: int, directory: Path, scenario: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(rank), str(size), str(directory / "meeting"), scenario]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.mark.I5
def test_experts_of_three_ranks_do_what_one_rank_does_to_the_last_bit(tmp_path: Path) -> None:
    """Ranks have different numbers of tokens, one none, in float32 and with weights in fp8."""
    ranks = [start(rank, 3, tmp_path, "together") for rank in range(3)]
    shares = []
    for process in ranks:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        num_equal, experts = json.loads(out)
        assert num_equal >= 12
        assert "agree through shared memory" in err
        shares.append(experts)
    assert sorted(expert for share in shares for expert in share) == list(range(7))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_without_common_memory_agree_over_the_network(tmp_path: Path) -> None:
    for process in [start(rank, 2, tmp_path, "apart") for rank in range(2)]:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert "over the network: rank 1 has no shared memory: rank 0 is elsewhere" in err


@pytest.mark.I7
def test_a_rank_that_is_killed_is_noticed_at_once(tmp_path: Path) -> None:
    waiting, killed = start(0, 2, tmp_path, "killed"), start(1, 2, tmp_path, "killed")
    out, err = waiting.communicate(timeout=240)
    assert "rank 0: another rank of this node has died, or stands still: rank 1 has ended" in json.loads(
        out
    ), err
    killed.communicate(timeout=60)


@pytest.mark.I7
@pytest.mark.slow
def test_a_rank_that_stands_still_is_noticed(tmp_path: Path) -> None:
    waiting, still = start(0, 2, tmp_path, "absent"), start(1, 2, tmp_path, "absent")
    out, err = waiting.communicate(timeout=240)
    assert "rank 0: another rank of this node has died, or stands still" in json.loads(out), err
    still.communicate(timeout=60)


@pytest.mark.slow
def test_a_rank_may_take_longer_to_start_and_to_load_than_an_operation_takes(tmp_path: Path) -> None:
    ranks = [start(rank, 2, tmp_path, "late") for rank in range(2)]
    for process in ranks:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert json.loads(out) == [[0], [1]]


def test_a_rank_that_never_starts_is_named(tmp_path: Path) -> None:
    place = RankPlace(1, 2, str(tmp_path / "meeting"))
    with pytest.raises(RankGroupError, match=r"rank 1 has started, and another rank .* has not 0\.1 s later"):
        RankGroup(place, torch.device("cpu"), agree_secs=60.0, forward_secs=60.0, start_secs=0.1)


def test_a_rank_whose_meeting_place_ends_says_so() -> None:
    """The meeting place ends with rank 0, long before the time for a start is up."""
    port = free_port()
    meeting = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    place = RankPlace(1, 2, meeting_host="127.0.0.1", meeting_port=port)
    times = {"agree_secs": 60.0, "forward_secs": 60.0, "start_secs": 600.0}
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(RankGroup, place, torch.device("cpu"), **times)
        meeting.get("started 1")
        del meeting
        with pytest.raises(RankGroupError, match=r"rank 0 .*, where ranks meet, has ended before all have"):
            starting.result(60)
