"""The CUDA swap-in in graphs: several batch sizes, several states, and captures that are refused."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import swap_in
from tests.gpu.decoder import Decoder, draw
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize(("max_new", "capacity"), [(1, 80), (3, 200)])
def test_graphs_of_several_batch_sizes_and_numbers_of_drafts_on_one_state(
    max_new: int, capacity: int
) -> None:
    sizes = (3, 40, 140)
    decoder = Decoder(1, sizes, top_k=64, capacity=capacity, max_new=max_new)
    for _ in range(60):
        size = draw(decoder.generator, sizes)
        decoder.prepare(size, draw(decoder.generator, tuple(range(1, max_new + 1))))
        decoder.replay(size)
        decoder.check()
    decoder.finish()


@pytest.mark.parametrize(("max_new", "capacity", "context"), [(1, 2200, 5000), (4, 8200, 20000)])
def test_graphs_of_one_request_with_a_large_selection(max_new: int, capacity: int, context: int) -> None:
    decoder = Decoder(2, (1, 2), top_k=2048, capacity=capacity, max_context=context, max_new=max_new)
    for step in range(40):
        decoder.prepare(1 + step % 2, 1 + step % max_new)
        decoder.replay(1 + step % 2)
        decoder.check()
    decoder.finish()


def test_graphs_of_two_states_in_turn() -> None:
    one, other = Decoder(3, (3, 40), top_k=64, capacity=70), Decoder(4, (1, 5), top_k=200, capacity=220)
    for step in range(40):
        sizes = {one: draw(one.generator, (3, 40)), other: draw(one.generator, (1, 5))}
        for decoder, size in sizes.items():
            decoder.prepare(size)
        for decoder in (one, other) if step % 3 else (other, one):
            decoder.replay(sizes[decoder])
        for decoder in sizes:
            decoder.check()
    one.finish()
    other.finish()


def test_graphs_of_two_states_at_the_same_time() -> None:
    """Blocks of both states share the GPU; neither may wait for the other's."""
    decoders = [Decoder(5, (40,), top_k=256, capacity=300), Decoder(6, (40,), top_k=256, capacity=300)]
    streams = [torch.cuda.Stream() if DEVICE == "cuda" else None for _ in decoders]
    for _ in range(30):
        for decoder in decoders:
            decoder.prepare(40)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        for decoder, stream in zip(decoders, streams, strict=True):
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                decoder.replay(40)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        for decoder in decoders:
            decoder.check()
    for decoder in decoders:
        decoder.finish()


def test_capture_of_a_fresh_state_is_refused() -> None:
    one, other = (HotBufferState.create(1, 1, 64, 9, 16, 64, 16, DEVICE) for _ in range(2))
    host = torch.zeros((1, 64, 32), dtype=torch.uint8, pin_memory=True)
    dev = torch.zeros((1, 16, 32), dtype=torch.uint8, device=DEVICE)
    selected = torch.zeros((1, 1), dtype=torch.int32, device=DEVICE)
    number = torch.ones(1, dtype=torch.int32, device=DEVICE)

    def call(state: HotBufferState) -> None:
        requests = StepRequests(state, number, number * 0, number)
        swap_in(selected, requests, group=0, layer=0, k_host=host, k_dev=dev)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            number.clone()  # an empty graph would warn
            call(one)

    call(other)
    with pytest.raises(KernelArgumentError, match="expected a call before the graph capture"):
        capture()
