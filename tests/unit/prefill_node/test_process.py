"""The prefill engine as its front starts it: a process of its own that ends when it is told to."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine.messages import EngineLoading, EngineReady, EngineStats, Shutdown
from hisparse_pd.settings import PrefillSettings
from hisparse_pd.vocabulary import RankPlace
from prefill_node.engine import run_engine

START_TIMEOUT_SECS = 60


@pytest.mark.timeout(120)
def test_serves_says_so_and_stops(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    settings = PrefillSettings(
        model_path=tiny_checkpoint("v32"), kv_pool_tokens=256, num_threads=1, log_level="warning"
    )
    front = zmq.Context.instance().socket(zmq.PAIR)
    front.setsockopt(zmq.LINGER, 0)
    front.bind(f"ipc://{tmp_path}/front")
    context = multiprocessing.get_context("spawn")
    engine = context.Process(target=run_engine, args=(settings, [f"ipc://{tmp_path}/front"], RankPlace()))
    engine.start()
    try:
        assert front.poll(START_TIMEOUT_SECS * 1000), "the engine did not start"
        stages = []
        while isinstance(said := engine_messages.from_engine_decoder.decode(front.recv()), EngineLoading):
            stages.append((said.stage, said.num_done == said.num_bytes))
            assert front.poll(START_TIMEOUT_SECS * 1000), f"the engine got no further than {said}"
        assert stages[-2:] == [("weights", True), ("pools and kernels", True)]
        ready = said
        assert isinstance(ready, EngineReady)
        assert ready.context_length == 8192
        assert ready.control_endpoint.startswith("127.0.0.1:")
        deadline = time.monotonic() + 1.2
        num_stats = 0
        while time.monotonic() < deadline:
            assert front.poll(1000), "the engine fell silent"
            stats = engine_messages.from_engine_decoder.decode(front.recv())
            assert isinstance(stats, EngineStats)
            assert stats.gauges['pool_total_tokens{pool="kv"}'] == 256
            num_stats += 1
        assert num_stats >= 3, f"{num_stats} statistics in 1.2 s"
        front.send(engine_messages.encoder.encode(Shutdown()))
        engine.join(START_TIMEOUT_SECS)
        assert engine.exitcode == 0
    finally:
        engine.kill()
        engine.join()
        front.close()
