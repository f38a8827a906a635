"""Lets a forward begin while the KV that it reads is still being copied to the device.

Copies from main memory (``HostCopies``) and from a decode node's memory (``LaneSource``) bring layer after
layer on one stream, and record an event behind each part of the layers; the forward waits for a part before
the first of its layers that reads it (``paged_kv.py``). A CUDA graph waits, too, because the events are
external: each replay waits for the records that came before it, and for nothing when all copies are over.
"""

from __future__ import annotations

from typing import Final

import torch

from hisparse_pd.core.model.side_stream import SideStream

MOST_PARTS: Final = 8
"""Most parts of a copy. Each is a launch for each pool, and an event in each forward."""


class LayerArrivals:
    """Parts of pools with ``num_layers`` layers each, such as those of KV and of indexer keys, the stream of
    the copies that bring them to ``device``, a GPU, and an event for each part.

    Part ``i`` of ``n`` has the layers from ``i / n`` to ``(i + 1) / n`` of each pool. A pool of fewer layers
    than there are parts has none in some.
    """

    def __init__(self, num_layers: tuple[int, ...], device: torch.device) -> None:
        self.num_parts = min(MOST_PARTS, max(num_layers))
        self.stream = SideStream(device)
        with torch.cuda.device(device):
            self._events = [torch.cuda.Event(external=True) for _ in range(self.num_parts)]
            for event in self._events:
                event.record()  # a graph captures no wait for an event that was never recorded

    def layers(self, part: int, num_layers: int) -> range:
        """Return the layers of a pool of ``num_layers`` in a part."""
        return layers_of_part(part, self.num_parts, num_layers)

    def record(self, part: int) -> None:
        """Record that the current stream has enqueued the copies of a part and of all parts before it."""
        self._events[part].record()

    def wait(self, layer: int, num_layers: int) -> None:
        """Let the current stream wait for the part of a layer of a pool of ``num_layers``, if the layer is
        the first one in it. Forwards read layers in order, so all later ones are behind the wait."""
        part = part_that_begins(layer, self.num_parts, num_layers)
        if part is not None:
            self._events[part].wait()


def layers_of_part(part: int, num_parts: int, num_layers: int) -> range:
    """Return the layers of one of ``num_parts`` parts."""
    return range(part * num_layers // num_parts, (part + 1) * num_layers // num_parts)


def part_that_begins(layer: int, num_parts: int, num_layers: int) -> int | None:
    """Return the part whose first layer is ``layer``, or None."""
    part = -(-((layer + 1) * num_parts) // num_layers) - 1  # the part that has the layer
    return part if layers_of_part(part, num_parts, num_layers)[0] == layer else None
