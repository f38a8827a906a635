"""A CUDA stream beside the current one. A CPU has none: there everything happens in the order of the calls.

On such streams, nodes copy KV (``request_tables.py``, ``row_fills.py``, ``step_halves.py``,
``key_pages.py``, ``host_pages.py``), parts of a step run at once (``micro_batches.py``,
``attention_parts.py``, ``feed_forward.py``), and the ranks of a node exchange (``rank_group.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyFailed(Exception):
    """A copy between the device and main memory could not begin, as without memory for what it needs beside.
    Nothing of it is under way."""


class SideStream:
    """A stream of ``device``. ``priority``: below 0, its kernels come before those of other streams."""

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=priority)

    def use(self) -> torch.cuda.StreamContext:
        """Return the context in which work goes to this stream; on a CPU it does nothing."""
        return torch.cuda.stream(self._stream)

    def behind_current(self) -> torch.cuda.StreamContext:
        """Let this stream wait for all work enqueued on the current one. Returns the context of ``use``."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.use()

    @contextmanager
    def copying(self, *, is_behind: bool = True) -> Iterator[None]:
        """Wrap what launches a copy on this stream, ``behind_current`` if ``is_behind``. Raises CopyFailed,
        once what was launched is over, for any error but a lost device."""
        try:
            with self.behind_current() if is_behind else self.use():
                yield
        except torch.AcceleratorError:
            raise
        except Exception as error:
            self.synchronize()
            raise CopyFailed(f"{type(error).__name__}: {error}") from error

    def join(self) -> None:
        """Let the current stream wait for all work enqueued on this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def record(self) -> torch.cuda.Event | None:
        """Return an event behind all work enqueued on this stream, for ``wait_for``; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def synchronize(self) -> None:
        """Block until all work enqueued on this stream is done."""
        if self._stream is not None:
            self._stream.synchronize()


def wait_for(event: torch.cuda.Event | None) -> None:
    """Let the current stream wait for an ``event``; None: for nothing."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def is_over(event: torch.cuda.Event | None) -> bool:
    """Return whether the work before an ``event`` is done; None: it is."""
    return event is None or event.query()
