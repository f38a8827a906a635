"""What one forward sends while it runs: the cached prefixes of admitted requests, and layers as it writes
them.

The engine makes a ``ForwardPush`` for each forward, which calls ``layer_written``. Requests whose prefix is
still arriving send nothing before all of it is there and right: their layers are noted, and follow with
``send_arrived``. A request whose prefix came up wrong sends nothing at all.
"""

from __future__ import annotations

from hisparse_pd.prefill_node.compute import Batch
from hisparse_pd.prefill_node.push import ChunkPush, Pusher
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.transfer.sender import Ready


class ForwardPush:
    """The pushes of a forward over ``batch``, whose requests are admitted."""

    def __init__(self, pusher: Pusher, batch: Batch) -> None:
        self._pusher = pusher
        self._ready = [(request, chunk) for request, chunk in batch if not request.is_arriving]
        self._arriving = [(request, chunk) for request, chunk in batch if request.is_arriving]
        self._pushes: list[ChunkPush] | None = None
        """What the chunks of ``_ready`` send; None: it is not planned yet."""
        self._written: list[tuple[int, Ready | None]] = []
        """The layers that are written, with what to wait for."""
        self.lost: list[PrefillRequest] = []
        """Requests whose prefix came up wrong."""

    @property
    def has_arriving(self) -> bool:
        """Whether a request's prefix was arriving when the forward began."""
        return bool(self._arriving)

    def layer_written(self, layer: int, ready: Ready | None) -> None:
        """Send what is due of all layers up to ``layer``; see ``Pusher.layer_written``."""
        if self._pushes is None:  # the device already computes: planning what to send delays no token
            self._pushes = self._plan(self._ready)
        self._pusher.layer_written(self._pushes, layer, ready)
        self._written.append((layer, ready))

    def send_arrived(self) -> None:
        """Send what was held back of the requests whose prefix has arrived and is right. The forward has
        launched all of its layers."""
        self.lost = [request for request, _ in self._arriving if request.has_lost_prefix]
        pushes = self._plan([entry for entry in self._arriving if not entry[0].has_lost_prefix])
        for layer, ready in self._written:
            self._pusher.layer_written(pushes, layer, ready)

    def _plan(self, batch: Batch) -> list[ChunkPush]:
        """Submit the cached prefixes of admitted requests, and plan what the chunks send."""
        for request, chunk in batch:
            if chunk.admits:
                self._pusher.push_cached(request)
        return [self._pusher.plan(request, chunk.start, chunk.stop) for request, chunk in batch]
