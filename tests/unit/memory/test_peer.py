"""Memory of other processes: it is opened by its handle and closed again, both on the device that writes to
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hisparse_pd.core.memory import peer
from hisparse_pd.core.memory.peer import GpuWriter

ADDR = 0x7F00_0000_0000


@pytest.mark.I8
def test_what_was_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that stays open keeps its owner's GPU memory allocated, even after the owner has ended."""
    current: list[torch.device] = []
    opened: dict[int, bytes] = {}

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def open_handle(handle: bytes, flags: int) -> int:
        assert current == [torch.device("cuda:1")]
        opened[ADDR] = handle
        return ADDR

    def close_handle(addr: int) -> None:
        assert current == [torch.device("cuda:1")]
        del opened[addr]

    runtime = SimpleNamespace(ipcOpenMemHandle=open_handle, ipcCloseMemHandle=close_handle)
    monkeypatch.setattr(peer, "cupy_module", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(torch.cuda, "device", on_device)
    writer = GpuWriter(torch.device("cuda:1"), [])
    addr = writer.open(b"handle")
    assert (addr, opened) == (ADDR, {ADDR: b"handle"})
    writer.close(addr)
    assert opened == {}
