"""An engine's process is on its NUMA node before anything is loaded, and so are pools and RDMA devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import RankPlace, StartError
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import Placement, PoolPolicy
from hisparse_pd.core.memory.numa_binding import bind_threads, with_allowed_policy
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.engine import start
from hisparse_pd.transfer.transport import TCP
from tests.unit.memory.numa_machines import two_sockets
from tests.unit.transfer.fake_machine import GIB, FakeMachine


class Started:
    """An engine process without a model, which records what happens in which order."""

    def __init__(self, machine: Machine, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened: list[tuple[Any, ...]] = []
        self.compared: list[dict[str, Any]] = []
        """Settings that the rank compares with those of others."""
        self.settings: list[DecodeSettings] = []
        """Those with which its engine is made."""
        self._model_path = model_path
        monkeypatch.setattr(start, "Machine", lambda: machine)
        of_process = ("die_with_parent", "setup_logging", "quiet_mooncake_logs")
        for name in (*of_process, "fix_arithmetic", "try_products"):
            monkeypatch.setattr(start, name, lambda *_: None)
        socket = SimpleNamespace(close=lambda: None, send=lambda _: None)
        monkeypatch.setattr(start, "EngineSocket", lambda *_: socket)
        monkeypatch.setattr(RankGroup, "__init__", lambda *_, **__: None)
        for name in ("meet", "leave"):
            monkeypatch.setattr(RankGroup, name, lambda *_: None)
        monkeypatch.setattr(RankGroup, "check_same", lambda _, facts: self.compared.append(facts))
        monkeypatch.setattr(start, "check_host_memory", lambda _: None)
        monkeypatch.setattr(start, "choose_transport", self._choose_transport)
        monkeypatch.setattr(start, "load_model", lambda *_: self.happened.append(("load",)))
        monkeypatch.setattr(
            torch, "set_num_threads", lambda number: self.happened.append(("threads", number))
        )
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)

    def _choose_transport(self, settings: DecodeSettings, num_bytes: int, near: tuple[str, ...]) -> Any:
        self.happened.append(("transport", tuple(near)))
        return TCP

    def run(
        self, rank: int = 0, num_host_bytes: int = 0, num_other_bytes: int = 0, **options: Any
    ) -> Placement:
        """Run the process; return the placement that its engine is made with."""
        made: list[Placement] = []
        made_with = self.settings

        class Engine:
            role = "decode"

            def __init__(self, *parts: Any) -> None:
                made_with.append(parts[0])
                made.append(parts[-1])

            @staticmethod
            def with_host_sizes(settings: DecodeSettings, *_: Any) -> DecodeSettings:
                return settings.model_copy(update={"host_pool_tokens": 640})

            @staticmethod
            def registered_host_bytes(*_: Any) -> int:
                return num_host_bytes

            @staticmethod
            def other_host_bytes(*_: Any) -> int:
                return num_other_bytes

            def run(self) -> None: ...

            def close(self) -> None: ...

        settings = DecodeSettings(model_path=self._model_path, **options).of_rank(rank)
        engine_class: Any = Engine
        place = RankPlace(rank, settings.dp_size)
        start.run_engine_process(engine_class, settings, ["ipc://nobody"], place)
        return made[0]


@pytest.fixture
def model_path(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("v32")


@pytest.fixture
def fake_binding(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record what the kernel would be asked for, and ask it for nothing."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(start, "bind_threads", lambda placement: asked.append(("bind", placement.cpus)))
    monkeypatch.setattr(start, "with_allowed_policy", lambda placement: placement)
    return asked


def test_threads_are_bound_first_and_pools_and_transport_are_of_the_same_node(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, fake_binding: list[tuple[Any, ...]]
) -> None:
    started = Started(two_sockets(tmp_path).machine, model_path, monkeypatch)
    started.happened = fake_binding
    placement = started.run(rank=1, num_host_bytes=200 * GIB, dp_size=2, numa="0,1", num_threads=3)
    cpus = (*range(16, 32), *range(48, 64))
    assert fake_binding == [
        *(("bind", cpus), ("threads", 3)),
        *(("transport", ("mlx5_2", "mlx5_3")), ("load",)),
    ]
    assert (placement.node, placement.policy) == (1, PoolPolicy.BIND)


def test_ranks_of_one_node_share_its_memory_and_torch_has_no_more_threads_than_cpus(
    tmp_path: Path,
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_binding: list[tuple[Any, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    started = Started(two_sockets(tmp_path).machine, model_path, monkeypatch)
    placement = started.run(num_host_bytes=200 * GIB, numa="1")
    assert placement.policy is PoolPolicy.BIND
    assert ("threads", 32) in started.happened
    sizes = {"num_host_bytes": 150 * GIB, "num_other_bytes": 50 * GIB}
    placement = started.run(rank=1, dp_size=2, numa="1", num_threads=1, **sizes)
    assert (placement.node, placement.policy) == (1, PoolPolicy.PREFERRED)
    assert "400.0 GiB" in caplog.text


def test_ranks_compare_what_was_asked_for_and_have_sizes_of_their_own(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, fake_binding: list[tuple[Any, ...]]
) -> None:
    """The free memory of two NUMA nodes differs."""
    started = Started(two_sockets(tmp_path).machine, model_path, monkeypatch)
    started.run(rank=1, dp_size=2, num_threads=1, host_pool_tokens=6400)
    assert [facts["host_pool_tokens"] for facts in started.compared] == [6400]
    assert [settings.host_pool_tokens for settings in started.settings] == [640]


def test_a_node_that_is_not_there_ends_the_start_before_anything_is_bound(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, fake_binding: list[tuple[Any, ...]]
) -> None:
    started = Started(two_sockets(tmp_path).machine, model_path, monkeypatch)
    with pytest.raises(StartError, match="--numa 5: this machine has the NUMA nodes 0, 1, and 5 is not one"):
        started.run(numa="5")
    assert not fake_binding
    assert not started.happened


@pytest.mark.parametrize("numa", ["auto", "off", "0"])
def test_on_a_machine_of_one_node_nothing_of_the_process_is_changed(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, numa: str
) -> None:
    fake = FakeMachine(tmp_path)
    fake.add_numa_node(0, "0-1")
    fake.put_nic("mlx5_0", 0)

    def asked(*_: object) -> None:
        pytest.fail("the kernel is asked to place something")

    monkeypatch.setattr(start, "bind_threads", partial(bind_threads, set_affinity=asked))
    monkeypatch.setattr(start, "with_allowed_policy", partial(with_allowed_policy, bind=asked))
    started = Started(fake.machine, model_path, monkeypatch)
    placement = started.run(numa=numa)
    assert placement == Placement("--numa off" if numa == "off" else "one NUMA node")
    assert started.happened == [("transport", ()), ("load",)]
