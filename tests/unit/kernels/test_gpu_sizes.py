"""Sizes that GPU kernels cannot take are refused before a model is loaded, with the remedy in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.vocabulary import MAX_DRAFTS, RankPlace, StartError
from hisparse_pd.core.memory.device import use_device
from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.decode_node.engine import DecodeEngine
from hisparse_pd.decode_node.sizing import check_swap_in
from hisparse_pd.engine import start as engine_process
from hisparse_pd.kernels.attention import AttentionBackendError
from hisparse_pd.kernels.gpu_sizes import check_indexer_sizes, check_swap_in_sizes
from hisparse_pd.prefill_node.engine import PrefillEngine
from tests.unit.model.model_specs import make_spec

INDEXER = {"num_heads": 64, "head_dim": 128, "top_k": 2048, "context_length": 163840}
SWAP_IN = {"top_k": 2048, "max_running_requests": 64, "capacity": 4096}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 5, "head_dim": 24, "top_k": 37, "context_length": 100},
        {"num_heads": 128, "head_dim": 256, "top_k": 4096, "context_length": 1 << 20},
    ],
)
def test_sizes_that_the_indexer_takes(changes: dict[str, Any]) -> None:
    check_indexer_sizes(**{**INDEXER, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 129}, "index_n_heads 129: the GPU's indexer takes 128 at most; serve .* --device cpu"),
        ({"head_dim": 257}, "index_head_dim 257: the GPU's indexer takes 256 at most"),
        ({"top_k": 4097}, "index_topk 4097: the GPU's top-k takes 4096 at most"),
        ({"context_length": 1 << 21}, "context_length 2097152: .* 1048576 at most; lower --context-length"),
    ],
)
def test_sizes_that_the_indexer_cannot_take(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        check_indexer_sizes(**{**INDEXER, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 4097}, "index_topk 4097: the GPU's swap-in takes 4096 at most"),
        ({"max_running_requests": 8192}, "max_running_requests 8192: .* 8191 at most; lower --max-running"),
        ({"capacity": 32769}, "device_buffer_size 32769: .* 32768 at most; lower --device-buffer-size"),
        ({"top_k": 8, "max_running_requests": 65536}, "max_running_requests 65536: .* 65535 at most"),
        (
            {"top_k": 8, "num_new": 8, "max_running_requests": 8192},
            "max_running_requests 8192: .* 8191 at most",
        ),
        ({"num_new": 4, "max_running_requests": 2048}, "max_running_requests 2048: .* 2047 at most"),
        ({"num_new": 9}, "speculative_num_steps 8: .* takes 7 at most; lower --speculative-num-steps"),
        ({"top_k": 4096, "num_new": 5}, "speculative_num_steps 4: .* 3 at most"),
        ({"num_new": 8, "max_running_requests": 1024}, "max_running_requests 1024: .* 1023 at most"),
    ],
)
def test_sizes_that_the_swap_in_cannot_take(changes: dict[str, Any], message: str) -> None:
    check_swap_in_sizes(**SWAP_IN)
    check_swap_in_sizes(**{**SWAP_IN, "num_new": MAX_DRAFTS + 1, "max_running_requests": 1023})
    with pytest.raises(StartError, match=message):
        check_swap_in_sizes(**{**SWAP_IN, **changes})


def test_a_node_asks_by_its_device() -> None:
    spec = make_spec(index_num_heads=200)

    def settings(**changes: Any) -> DecodeSettings:
        return DecodeSettings(model_path=Path("/m"), **{"device_buffer_size": 40000, **changes})

    def check(settings: DecodeSettings) -> None:
        AttentionKernels.check(spec, torch.device(settings.device), settings.attention_backend)

    check(settings())
    check_swap_in(settings(), spec)
    with pytest.raises(AttentionBackendError, match="triton: it needs a CUDA device, not cpu"):
        check(settings(attention_backend="triton"))
    on_gpu = settings(device="cuda:1", attention_backend="torch")
    with pytest.raises(StartError, match="index_n_heads 200"):
        check(on_gpu)
    with pytest.raises(StartError, match="device_buffer_size 40000"):
        check_swap_in(on_gpu, spec)


@pytest.mark.parametrize(("name", "expected"), [("cpu", []), ("cuda", [0]), ("cuda:0", [0]), ("cuda:1", [1])])
def test_the_device_of_the_node_becomes_the_current_one(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: list[int]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    use_device(name)
    assert chosen == expected


@pytest.mark.parametrize(
    ("engine", "settings_class"), [(DecodeEngine, DecodeSettings), (PrefillEngine, PrefillSettings)]
)
def test_a_size_is_refused_before_the_model_is_loaded(
    engine: Any,
    settings_class: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(engine_process, "check_devices", lambda names: calls.append(names))
    monkeypatch.setattr(engine_process, "load_spec", lambda *_, **__: make_spec(index_head_dim=300))
    for name in ("die_with_parent", "setup_logging", "quiet_mooncake_logs", "EngineSocket"):
        monkeypatch.setattr(engine_process, name, lambda *_: FakeSocket())

    def load(*_: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(engine_process, "load_model", load)
    settings = settings_class(model_path=tmp_path, device="cuda:1", attention_backend="torch")
    with pytest.raises(StartError, match="index_head_dim 300: the GPU's indexer takes 256 at most"):
        engine_process.run_engine_process(engine, settings, ["ipc://nobody"], RankPlace())
    assert calls == [("cuda:1",), 1]


class FakeSocket:
    def close(self) -> None:
        pass
