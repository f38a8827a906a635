"""An engine tells its front how far it is while it reads the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

import hisparse_pd.decode_node.engine
import hisparse_pd.prefill_node.engine
from hisparse_pd.base.settings import DecodeSettings, PrefillSettings
from hisparse_pd.base.vocabulary import CheckpointError, RankPlace, StartError
from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine import start as engine_process
from hisparse_pd.engine.messages import EngineLoading


@pytest.mark.parametrize("module", [hisparse_pd.prefill_node.engine, hisparse_pd.decode_node.engine])
def test_the_front_hears_how_much_of_the_weights_is_read(
    module: Any, tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: Any) -> None:
        on_progress = arguments[-1]
        on_progress(3, 9)
        raise CheckpointError("the third shard is gone")

    monkeypatch.setattr(engine_process, "load_model", load)
    monkeypatch.setattr(engine_process, "setup_logging", lambda *_: None)  # the tests' own stays
    kind = DecodeSettings if module is hisparse_pd.decode_node.engine else PrefillSettings
    front = zmq.Context.instance().socket(zmq.PAIR)
    try:
        front.bind(f"ipc://{tmp_path}/front")
        settings = kind(model_path=tiny_checkpoint("v32"))
        with pytest.raises(StartError, match="the third shard is gone"):
            module.run_engine(settings, [f"ipc://{tmp_path}/front"], RankPlace())
        assert front.poll(20_000)
        said = engine_messages.from_engine_decoder.decode(front.recv())
        assert said == EngineLoading("weights", 3, 9)
    finally:
        front.close(linger=0)
