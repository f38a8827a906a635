"""Ranks with one GPU each, in CUDA graphs, over the GPUs' memory and by NCCL: their routed experts give one
rank's results, exchanges arrive, and sums have one order."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.support import needs_gpu

REPO = Path(__file__).parents[2]
pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
    pytest.mark.xdist_group("all GPUs"),
]
PROGRAM = """
import sys
import torch
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.kernels.int4 import Int4Form

rank, path, way = int(sys.argv[1]), sys.argv[2], sys.argv[4]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
NUM, HIDDEN, INNER, TOP_K = 16, 512, 256, 4
group = RankGroup(
    RankPlace(rank, 2, path), device, agree_secs=60.0, forward_secs=60.0, over_memory=way == "memory"
)
assert (group.exchange is not None) == (way == "memory")
assert group.agree(rank) == [(0,), (1,)]

def filled(ranks, dtype):
    experts = RoutedExperts(NUM, HIDDEN, INNER, dtype, device, ranks)
    own = slice(experts.experts.start, experts.experts.stop)
    for matrices, seed in ((experts.gate_up, 1), (experts.down, 2)):
        drawn = torch.Generator().manual_seed(seed)
        shape = (NUM, *matrices.values.shape[1:])
        if isinstance(dtype, Int4Form):
            matrices.values.copy_(torch.randint(-(2**31), 2**31, shape, generator=drawn)[own])
            of_groups = (NUM, *matrices.scales.shape[1:])
            matrices.scales.copy_((torch.rand(of_groups, generator=drawn) / 96)[own])
            if matrices.zeros is not None:
                matrices.zeros.copy_(torch.randint(4, 12, of_groups, generator=drawn)[own])
            continue
        whole = torch.randn(shape, generator=drawn)
        matrices.values.copy_((whole / 16).to(dtype)[own])
        if matrices.scales is not None:
            matrices.scales.fill_(0.5)
    return experts

def draw(number, count, dtype):
    drawn = torch.Generator().manual_seed(10 * number + rank)
    ids = torch.rand((count, NUM), generator=drawn).topk(TOP_K).indices
    weights = torch.rand((count, TOP_K), generator=drawn)
    return [x.to(device) for x in (torch.randn((count, HIDDEN), generator=drawn).to(dtype), ids, weights)]

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
W4A16, W4A8 = Int4Form(128, has_zeros=True), Int4Form(128, has_zeros=False, rounds_tokens=True)
for dtype, of_weights in (
    (FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FP8), (BFLOAT16, W4A16), (BFLOAT16, W4A8)
):
    together, alone = filled(group, of_weights), filled(None, of_weights)
    graphs = {}
    streams = [torch.cuda.Stream() for _ in range(2)]
    for count in (48, 3):
        inputs = [draw(number, count, dtype) for number in range(2)]
        def run():
            results = []
            for stream, of_stream in zip(streams, inputs):  # side by side, as micro-batches are
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    results.append(together(*of_stream))
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            return results
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        graphs[count] = graph, inputs, results
    for turn in range(6):
        for count, (graph, inputs, results) in graphs.items():
            for number, of_stream in enumerate(inputs):
                for target, source in zip(of_stream, draw(10 * turn + number, count, dtype)):
                    target.copy_(source)
            graph.replay()
            for of_stream, result in zip(inputs, results):
                bound = 1e-5 if dtype == torch.float32 else 2**-6  # tiles differ with the number of tokens
                torch.testing.assert_close(result, alone(*of_stream), rtol=bound, atol=bound)
    group.step_tokens = 7
    if rank == 0:
        together.join_forward(torch.empty((0, HIDDEN), dtype=dtype, device=device), TOP_K)
    else:
        inputs = draw(99, 7, dtype)
        torch.testing.assert_close(together(*inputs), alone(*inputs), rtol=2**-6, atol=2**-6)
    group.step_tokens = 0
torch.cuda.synchronize()
group.leave()
"""


EXCHANGES = """
import os
import random
import sys
import torch
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.core.model.rank_exchange import sum_in_order
from hisparse_pd.core.model.rank_group import RankGroup

rank, path, size, scenario = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
group = RankGroup(RankPlace(rank, size, path), device, agree_secs=120.0, forward_secs=20.0)
exchange = group.exchange
assert exchange is not None, "these GPUs do not reach each other's memory"
BYTES, BFLOAT16, FLOAT32 = torch.uint8, torch.bfloat16, torch.float32

if scenario == "missing":
    if rank == 0:
        group.gather(torch.ones((3, 64), device=device))
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(3)
        sys.exit("the others were not missed")
    group.meet("ended")
exchange.max_gather_bytes = 1 << 62

def draw(rank, number, shape, dtype):
    drawn = torch.Generator(device).manual_seed(1000 * number + rank)
    options = {"generator": drawn, "device": device}
    if dtype == BYTES:
        return torch.randint(0, 256, shape, dtype=dtype, **options)
    values = torch.randn(shape, **options) * 2.0 ** torch.randint(-9, 9, shape, **options)
    return values.to(dtype)

def check(number, count, columns, dtype):
    given = [draw(each, number, (size * count, columns), dtype) for each in range(size)]
    gathered = group.gather(given[rank][:count].contiguous())
    assert torch.equal(gathered, torch.cat([x[:count] for x in given])), ("gather", count, columns, dtype)
    if dtype != BYTES:
        own = group.sum_own(given[rank])
        parts = [x[rank * count : (rank + 1) * count] for x in given]
        assert torch.equal(own, sum_in_order(parts)), ("sum", count, columns, dtype)
    return gathered

def begin_at(count):
    group.agree(0)
    exchange.memory.begin_at(count)
    group.agree(0)

OF_BYTES = ((14400, BYTES), (88, BYTES), (27, BYTES))
CASES = (*OF_BYTES, (1024, BFLOAT16), (9, BFLOAT16), (512, FLOAT32), (3, FLOAT32))
late = random.Random(rank)
for first in (0, 2**32 - 200, 2**31 - 200):
    begin_at(first)
    for number, count in enumerate((*range(1, 300, 14), 0, 2, 1000, 1)):
        for columns, dtype in CASES:
            if late.random() < 0.2:
                torch.cuda._sleep(late.randrange(2_000_000))
            check(number, count, columns, dtype)

gathered = check(7, 299, 14400, BYTES)
group.exchange = None  # NCCL
assert torch.equal(group.gather(draw(rank, 7, (size * 299, 14400), BYTES)[:299].contiguous()), gathered)
group.exchange = exchange

# A row has the same sum alone and among others.
whole = draw(rank, 3, (300, 4096), BFLOAT16)
of_all = group.sum_own(whole.repeat(size, 1))
for count in (1, 2, 31, 64):
    assert torch.equal(group.sum_own(whole[:count].repeat(size, 1)), of_all[:count]), count

# In a graph, of several sizes, from two streams side by side, what is given changing with each replay.
counter = torch.zeros((), dtype=torch.int64, device=device)
num_wrong = torch.zeros((), dtype=torch.int64, device=device)
SIZES = ((1, 14400), (64, 14400), (3, 27), (300, 1030))
bases = {
    case: [draw(each, 11, (size * case[0], case[1]), BYTES) for each in range(size)] for case in SIZES
}
streams = [torch.cuda.Stream() for _ in range(2)]

def given_by(each, case, dtype):
    x = bases[case][each] + counter.to(BYTES)
    return x if dtype == BYTES else x.to(dtype) / 7

def exchange_all():
    for number, case in enumerate(SIZES * 2):
        stream = streams[number % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            count = case[0]
            gathered = group.gather(given_by(rank, case, BYTES)[:count].contiguous())
            expected = torch.cat([given_by(each, case, BYTES)[:count] for each in range(size)])
            wrong = (gathered != expected).sum()
            for dtype in (BFLOAT16, FLOAT32):
                own = group.sum_own(given_by(rank, case, dtype))
                mine = slice(rank * count, (rank + 1) * count)
                parts = [given_by(each, case, dtype)[mine] for each in range(size)]
                wrong = wrong + (own != sum_in_order(parts)).sum()
        torch.cuda.current_stream().wait_stream(stream)
        num_wrong.add_(wrong)
    counter.add_(1)

exchange_all()
torch.cuda.synchronize()
assert num_wrong.item() == 0
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    exchange_all()
begin_at(2**32 - 1000)
for turn in range(1000):
    if late.random() < 0.05:
        torch.cuda._sleep(late.randrange(2_000_000))
    graph.replay()
    if turn % 100 == 99:
        torch.cuda.synchronize()
        check(turn, 5, 1024, BFLOAT16)
assert counter.item() == 1001
assert num_wrong.item() == 0, num_wrong.item()
torch.cuda.synchronize()
group.agree(0)
group.leave()
"""


@pytest.mark.parametrize("way", ["memory", "nccl"])
def test_experts_of_two_ranks_in_graphs_are_those_of_one(way: str, tmp_path: Path) -> None:
    """In the last forward only one rank has tokens."""
    codes, errors = run_ranks(PROGRAM, 2, tmp_path, way)
    assert codes == [0, 0], errors


@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_ranks_exchange_arrives_and_is_added_up_in_their_order(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} GPUs")
    codes, errors = run_ranks(EXCHANGES, size, tmp_path, "bits")
    assert codes == [0] * size, errors


def test_a_rank_that_waits_for_a_missing_one_ends_with_an_error(tmp_path: Path) -> None:
    codes, errors = run_ranks(EXCHANGES, 2, tmp_path, "missing")
    assert codes[0] not in (None, 0)
    assert "CUDA error" in errors[0]


def run_ranks(program: str, size: int, directory: Path, word: str) -> tuple[list[int | None], list[str]]:
    """Run the ranks. Returns each rank's status and errors; when one rank fails, the others are ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(directory / "meeting"), str(size), word],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + 240
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.poll() for process in ranks):
            break  # the others would wait for it
        time.sleep(0.2)
    for process in ranks:
        process.kill()
    errors = [process.communicate()[1] for process in ranks]
    return [process.returncode for process in ranks], errors
