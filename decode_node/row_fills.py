"""Owns what is still to be copied to rows that are being filled, and the stream in which that is done.

``RequestTables`` makes the fill of a row (``RowStart``) or of its pages (``PageFill``), and hands it to
``begin`` or ``begin_pages``. In each turn ``go_on`` launches slices of them beside the steps of others, until
``is_ready``. Rows come first: requests whose pages are filled take part in steps meanwhile. ``finish`` and
``stop`` end the filling of a row before its time. Whatever a launched copy reads or writes stays until the
copy is over, for which ``wait`` waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, TypeAlias

import torch

from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.kernels.page_fill import PageFill
from hisparse_pd.kernels.swap_in import RowStart

SLICE_BYTES: Final = 32 << 20
"""Bytes of one slice of the copies that fill rows: 0.7 ms of PCIe, beside a step."""

Fills: TypeAlias = "dict[int, RowStart | PageFill] | dict[int, PageFill]"
"""What is not launched yet, by row."""


class RowFills:
    """The fills of one engine's rows, by ``req_row``."""

    def __init__(self, device: torch.device, ranks: RankGroup | None = None) -> None:
        """``ranks``: those of the node, without which a step of the device may not go on."""
        self._device = device
        self._ranks = ranks
        self.slice_bytes = SLICE_BYTES
        self.rows: dict[int, RowStart | PageFill] = {}
        """By row, what is not launched yet of its filling, in the order in which rows are filled."""
        self.pages: dict[int, PageFill] = {}
        """By row that is in steps, what is not launched yet of the filling of its pages, in order."""
        self.ends: dict[int, torch.cuda.Event] = {}
        """By row, the end of the copies that were launched last to fill it or its pages."""
        self._begun: set[int] = set()
        """Rows of whose present fill a slice was launched."""
        self._last_slice: torch.cuda.Event | None = None
        """The end of the copies that were launched last for any row."""
        self._stream = SideStream(device)

    def begin(self, row: int, fill: RowStart | PageFill) -> None:
        """Fill a row from now on, and launch its first slice if no other row is being filled."""
        is_next = not self.rows and self._is_slice_over()
        self.rows[row] = fill
        self._begun.discard(row)
        if is_next:
            self._launch_slice(self.rows, row, self.slice_bytes)

    def begin_pages(self, row: int, fill: PageFill) -> None:
        """Fill the pages of a row that is in steps, once no row is being filled."""
        self.pages[row] = fill
        self._begun.discard(row)

    def go_on(self, link_share: float) -> dict[int, Exception]:
        """Launch the next slices of rows, once those before are over. Together they have ``slice_bytes``, or
        an eighth of all that is left if that is more, so that many rows do not take many turns. If no row is
        being filled, launch slices of pages: they have what misses, which take ``link_share`` of the link to
        the host, leave of ``slice_bytes``.

        Returns the rows for which that failed. Raises torch.AcceleratorError when the device is lost.
        """
        if not self._is_slice_over():
            return {}
        if self.rows:
            num_all_bytes = sum(each.num_left_bytes or 0 for each in self.rows.values())
            return self._launch_slices(self.rows, max(self.slice_bytes, num_all_bytes // 8))
        return self._launch_slices(self.pages, int(self.slice_bytes * (1 - link_share)))

    def is_ready(self, row: int) -> bool:
        """Return whether a row and its pages are filled, or their filling has stopped."""
        if row in self.rows or row in self.pages:
            return False
        filled = self.ends.get(row)
        if filled is None:
            return True
        if not filled.query():
            return False
        del self.ends[row]
        return True

    def launch_all(self, row: int) -> None:
        """Launch all that is left to fill of a row."""
        while row in self.rows:
            self._launch_slice(self.rows, row, None)

    def finish(self, row: int) -> None:
        """Fill a row to its end, and wait for that."""
        self.launch_all(row)
        self.wait(row)

    def stop(self, row: int) -> None:
        """Launch nothing more for a row or its pages. Copies under way go on until ``is_ready``."""
        self.rows.pop(row, None)
        self.pages.pop(row, None)

    def stop_pages(self, row: int) -> None:
        """Fill no more of a row's pages. Waits for copies under way."""
        self.pages.pop(row, None)
        self.wait(row)

    def wait(self, row: int) -> None:
        """Wait for the copies to a row that were launched, which may be behind the step in flight."""
        if (filled := self.ends.pop(row, None)) is not None:
            with self._ranks.bounded_wait() if self._ranks else nullcontext():
                filled.synchronize()

    def note_end(self, row: int) -> None:
        """Note that the current stream copies to a row's slots: they are in use until that is over."""
        if self._device.type == "cuda":
            self.ends[row] = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def beside_steps(self, row: int, *, is_first: bool) -> Iterator[None]:
        """Send work that fills a row to the stream for that, and note its end. ``is_first``: it is the first
        work for this row."""
        if self._device.type != "cuda":
            yield
            return
        # The last step in the current stream may have used the row's slots for the request before.
        with self._stream.behind_current() if is_first else self._stream.use():
            try:
                yield
            finally:  # also after an error: what was launched before it still reads the request's slots
                filled = torch.cuda.Event()
                filled.record()
                self.ends[row] = self._last_slice = filled

    def _launch_slices(self, fills: Fills, budget_bytes: int) -> dict[int, Exception]:
        """Launch slices of ``fills`` for ``budget_bytes``, the first row's first. Returns the rows for which
        that failed."""
        failed: dict[int, Exception] = {}
        for row in tuple(fills):
            try:
                while row in fills and budget_bytes > 0:
                    num_bytes = self._launch_slice(fills, row, budget_bytes)
                    budget_bytes -= max(1, num_bytes)  # so that slices without bytes are bounded, too
            except torch.AcceleratorError:
                raise
            except Exception as error:
                failed[row] = error
        return failed

    def _is_slice_over(self) -> bool:
        return self._last_slice is None or bool(self._last_slice.query())

    def _launch_slice(self, fills: Fills, row: int, most_bytes: int | None) -> int:
        """Launch up to ``most_bytes`` of the copies that fill a row, or all for None. Returns their bytes. A
        row leaves ``fills`` when all is launched, or when that raises."""
        num_left_bytes = None
        try:
            is_first = row not in self._begun
            self._begun.add(row)
            with self.beside_steps(row, is_first=is_first):
                num_bytes = fills[row].launch_slice(most_bytes)
            num_left_bytes = fills[row].num_left_bytes
        finally:
            if num_left_bytes is None:
                del fills[row]
        return num_bytes
