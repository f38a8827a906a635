"""Takes in the Bootstraps of decode nodes: opens a request for each, or answers why there is none.

``DecodeEvents`` calls ``bootstrap``. A Bootstrap may come again after its connection was lost, and after its
room has ended; whatever was said of the room is then said again. ``PrefillLife`` has the requests, makes all
of their later moves, and counts what is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.prefill_node.bootstrap_checks import BootstrapChecks
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.request_life import PrefillLife, room_failed
from hisparse_pd.prefill_node.requests import EndedRequest, PrefillRequest, PrefillState
from hisparse_pd.protocol.messages import Bootstrap, Room, first_stepped

log = logging.getLogger(__name__)

MAX_QUEUED_TOKENS = 64 << 20
"""Most prompt tokens of all waiting requests: 256 MiB of ids, and up to as much of keys with pages of 16."""


class Arrivals:
    """What an engine answers to Bootstraps."""

    def __init__(self, life: PrefillLife, checks: BootstrapChecks, max_queued: int) -> None:
        """``max_queued``: most requests that wait."""
        self._life = life
        self._checks = checks
        self._max_queued = max_queued

    def bootstrap(
        self, peer: Peer, message: Bootstrap, now_secs: float, keys: Sequence[PageKey] | None = None
    ) -> None:
        """Open the request of a Bootstrap, or answer how it ended or why it is refused. A refused Bootstrap
        opens no request, so a correct one may follow. ``keys``: what ``PromptPages.keys_of`` returns, if it
        is computed already, as it is while a forward runs."""
        room = Room(message.room)
        request = self._life.requests.get(room)
        if request is not None:
            self._answer_repeated(request, peer, message)
            return
        if (ended := self._life.requests.ended(room)) is not None:
            self._answer_late(ended, peer, message)
            return
        if self._life.requests.was_given_up(room, peer.session, message.attempt):
            self._life.dropped["late"] += 1
            given_up = f"room {room}: its decode node has given this attempt up"
            self._life.tell_peer(peer, room_failed(message, 503, given_up, quiet=True, batch_failed=False))
            return
        if (error := self._checks.why_refused(message, peer)) is not None:
            self._refuse(peer, message, 400, error)
            return
        if (error := self._why_full(message)) is not None:
            self._refuse(peer, message, 429, error)
            return
        keys = self._life.pages.keys_of(message) if keys is None else keys
        first = first_stepped(message.num_prompt_tokens, message.num_resumed_tokens, peer.page_size)
        # KV from ``first`` on is rounded as in decode steps: such pages are never shared.
        shared = tuple(keys[: first // self._life.pages.page_size])
        deadline_secs = now_secs + self._life.keep_secs
        self._life.requests.open(PrefillRequest(peer, message, now_secs, deadline_secs, shared))

    def _answer_repeated(self, request: PrefillRequest, peer: Peer, message: Bootstrap) -> None:
        """Answer a Bootstrap for a live request.

        If the request has failed, its own Bootstrap, sent again by the same node with a numbered attempt, is
        answered with the failure again. Every other Bootstrap is dropped. 0 is the attempt of nodes that do
        not number them.
        """
        is_its_node = request.peer.node_id == peer.node_id
        if request.is_draining and is_its_node and message.attempt > 0 and message == request.bootstrap:
            failed = room_failed(
                message,
                status=request.end_status,
                error=request.end_error,
                quiet=False,
                batch_failed=request.batch_failed,
            )
            self._life.tell_peer(peer, failed)
            return
        self._life.dropped["duplicate"] += 1
        log.warning("room %d: dropped a second Bootstrap, from node %s", request.room, peer.node_id)

    def _answer_late(self, ended: EndedRequest, peer: Peer, message: Bootstrap) -> None:
        """Answer a Bootstrap for a room that has ended: with its RoomDone if this is the attempt that was
        delivered, else with RoomFailed."""
        delivery = ended.delivery
        if delivery is not None and delivery.answers(peer.node_id, message.attempt):
            self._life.tell_peer(peer, delivery.done)  # the first answer was lost with its connection
            return
        self._life.dropped["late"] += 1
        failed = room_failed(message, ended.status, ended.error, quiet=True, batch_failed=ended.batch_failed)
        self._life.tell_peer(peer, failed)

    def _why_full(self, message: Bootstrap) -> str | None:
        num_queued = self._life.requests.count(PrefillState.QUEUED)
        if num_queued >= self._max_queued:
            return (
                f"{num_queued} rooms wait on this prefill node, and {self._max_queued} may "
                "(--max-running-requests + --max-queued-requests); try again later or elsewhere"
            )
        num_tokens = self._life.requests.num_queued_tokens
        if num_tokens + message.num_prompt_tokens > MAX_QUEUED_TOKENS:
            return (
                f"prompts of {num_tokens} tokens wait on this prefill node, and {message.num_prompt_tokens} "
                f"more would exceed {MAX_QUEUED_TOKENS}; try again later or elsewhere"
            )
        return None

    def _refuse(self, peer: Peer, message: Bootstrap, status: int, error: str) -> None:
        log.info("room %d refused: %d %s", message.room, status, error)
        self._life.counters["failed_requests_total"] += 1
        text = f"room {message.room}: {error}"
        self._life.tell_peer(peer, room_failed(message, status, text, quiet=True, batch_failed=False))
