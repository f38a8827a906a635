"""The memory of a GPU as it is read before pools are sized."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.core.memory.device import DeviceMemory
from hisparse_pd.core.model import loader
from hisparse_pd.core.model.spec import load_spec


def test_memory_that_a_load_has_left_in_cycles_is_freed_first(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has matrices of its own in place of those that it joins and takes apart."""
    loaded: list[weakref.ref[Any]] = []

    class Model:
        def __init__(self, _: Any, hf_model: Any, __: Any) -> None:
            loaded.append(weakref.ref(hf_model.model.layers[0].self_attn.kv_b_proj.weight))

    def free_bytes(_: torch.device) -> tuple[int, int]:
        return (70 if loaded[0]() is None else 40), 100

    monkeypatch.setattr(loader, "DsaModel", Model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path = tiny_checkpoint("v32")
    spec = load_spec(path)
    gc.disable()
    try:
        loader.load_model(path, spec)
        assert DeviceMemory.read(torch.device("cuda")).used_bytes == 30
    finally:
        gc.enable()
