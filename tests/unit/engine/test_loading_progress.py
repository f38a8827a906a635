"""An engine tells its front how far it is while it reads the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import CheckpointError, RankPlace, StartError
from hisparse_pd.decode_node.engine import DecodeEngine
from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine import start as engine_process
from hisparse_pd.engine.messages import EngineLoading


def test_the_front_hears_how_much_of_the_weights_is_read(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: Any) -> None:
        on_progress = arguments[-1]
        on_progress(3, 9)
        raise CheckpointError("the third shard is gone")

    monkeypatch.setattr(engine_process, "load_model", load)
    monkeypatch.setattr(engine_process, "setup_logging", lambda *_: None)  # keeps the tests' logging
    front: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    try:
        front.bind(f"ipc://{tmp_path}/front")
        endpoints = [f"ipc://{tmp_path}/front"]
        settings = DecodeSettings(model_path=tiny_checkpoint("v32"))
        with pytest.raises(StartError, match="the third shard is gone"):
            engine_process.run_engine_process(DecodeEngine, settings, endpoints, RankPlace())
        assert front.poll(20_000)
        said = engine_messages.from_engine_decoder.decode(front.recv())
        assert said == EngineLoading("weights", 3, 9)
    finally:
        front.close(linger=0)
