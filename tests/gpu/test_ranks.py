"""Routed experts of two ranks, each with a GPU, by NCCL and in CUDA graphs: as one rank has them."""

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

rank, path = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
NUM, HIDDEN, INNER, TOP_K = 16, 512, 256, 4
group = RankGroup(RankPlace(rank, 2, path), device, agree_secs=60.0, forward_secs=60.0)
assert group.agree(rank) == [(0,), (1,)]

def filled(ranks, dtype):
    experts = RoutedExperts(NUM, HIDDEN, INNER, dtype, device, ranks)
    for matrices, seed in ((experts.gate_up, 1), (experts.down, 2)):
        whole = torch.randn((NUM, *matrices.values.shape[1:]), generator=torch.Generator().manual_seed(seed))
        matrices.values.copy_((whole / 16).to(dtype)[experts.experts.start : experts.experts.stop])
        if matrices.scales is not None:
            matrices.scales.fill_(0.5)
    return experts

def draw(number, count, dtype):
    drawn = torch.Generator().manual_seed(10 * number + rank)
    ids = torch.rand((count, NUM), generator=drawn).topk(TOP_K).indices
    weights = torch.rand((count, TOP_K), generator=drawn)
    return [x.to(device) for x in (torch.randn((count, HIDDEN), generator=drawn).to(dtype), ids, weights)]

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
for dtype, of_weights in ((FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FP8)):
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
        together.forward_of_others(torch.empty((0, HIDDEN), dtype=dtype, device=device), TOP_K)
    else:
        inputs = draw(99, 7, dtype)
        torch.testing.assert_close(together(*inputs), alone(*inputs), rtol=2**-6, atol=2**-6)
    group.step_tokens = 0
torch.cuda.synchronize()
group.leave()
"""


def test_experts_of_two_ranks_in_graphs_are_those_of_one(tmp_path: Path) -> None:
    """The last forward is of one rank alone."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "meeting")],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + 180
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        if any(process.poll() for process in ranks):
            break  # the other one waits for it, for ever
        time.sleep(0.2)
    for process in ranks:
        process.kill()
    errors = [process.communicate()[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
