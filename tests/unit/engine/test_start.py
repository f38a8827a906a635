"""What ends the start of an engine before its model is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.decode_node.engine import DecodeEngine
from hisparse_pd.engine import start
from hisparse_pd.kernels.row_trial import RowBitsError


def unexpected(*_: Any, **__: Any) -> Any:
    raise AssertionError("the start went on")


def test_a_cpu_whose_products_differ_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    def refuse() -> None:
        raise RowBitsError("linear gives other bits")

    for name in ("die_with_parent", "setup_logging", "quiet_mooncake_logs", "fix_arithmetic"):
        monkeypatch.setattr(start, name, lambda *_: None)
    monkeypatch.setattr(start, "EngineSocket", lambda *_: SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(start, "try_products", refuse)
    monkeypatch.setattr(start, "check_devices", unexpected)
    settings = DecodeSettings(model_path="nowhere", device="cpu", host="127.0.0.1")
    with pytest.raises(RowBitsError, match="other bits"):
        start.run_engine_process(DecodeEngine, settings, ["ipc://nowhere"], RankPlace(0, 1, ""))
    assert closed
