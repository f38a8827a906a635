"""Moves requests that own nothing yet: from their arrival until the scheduler admits them or they fail.

A request is CONNECTING until its prefill node is registered with, then WAITING for slots. One that can have
all its KV without a prefill node (``local_kv.py``) waits without one, and goes back to CONNECTING when that
is no longer so. The engine calls ``generate`` for a front's message, and in each turn ``expire``, then
``refresh``. ``PlanMoves`` calls ``wait_for_node``; ``PrefillEvents`` calls ``readdress`` and
``wait_locally``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from hisparse_pd.base.decode_settings import HisparsePolicy
from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED, HisparseFlag, Mode
from hisparse_pd.core.paging.prompt_keys import PageKey, PromptKeys
from hisparse_pd.decode_node.end_moves import EndMoves
from hisparse_pd.decode_node.held_matches import num_shareable_pages
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.local_kv import local_modes
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_index import DuplicateRoom
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.engine.messages import Generate, num_packed_tokens
from hisparse_pd.protocol.messages import Room

CONTACT_TIMEOUT_SECS = 10.0
"""Longest time that a request waits for its prefill node to be found and registered with."""

_DEFAULT_FLAG = {
    HisparsePolicy.AUTO: HisparseFlag.AUTO,
    HisparsePolicy.ALWAYS: HisparseFlag.TRUE,
    HisparsePolicy.NEVER: HisparseFlag.FALSE,
}


@dataclass
class QueueMoves:
    """The moves of requests to CONNECTING and WAITING, and their deadlines. Times are those of
    ``time.monotonic``."""

    limits: Limits
    policy: HisparsePolicy
    """The mode of requests that ask for none."""
    room_timeout_secs: float
    """Longest time that a request waits for slots, and again for its KV."""
    requests: LiveRequests
    peers: PrefillPeers
    ends: EndMoves
    contact_timeout_secs: float = CONTACT_TIMEOUT_SECS

    # --- arrival ------------------------------------------------------------------------------------

    def generate(
        self,
        message: Generate,
        root: PageKey,
        prompt: bytes,
        now: float,
        prompt_keys: PromptKeys | None = None,
        prompt_token_ids: NDArray[np.int32] | None = None,
        first_sample: Request | None = None,
    ) -> Request | None:
        """Take a request in and return it, or send the error that refuses it.

        ``root``, ``prompt``: see ``GenerateGroup``; the other arguments: see ``Request``.
        """
        request = self._make_request(message, root, prompt, now, prompt_keys, prompt_token_ids, first_sample)
        error = self._why_malformed(request) or refusal(self.limits, request)
        try:
            if not error:
                self.requests.open(request)
        except DuplicateRoom as duplicate:
            error = str(duplicate)
        if error:
            self.ends.refuse(request.request_id, error)
            return None
        if first_sample is not None:
            first_sample.has_further_samples = True
        if not self.wait_locally(request):
            self.peers.use(request.peer, now)
        return request

    def _make_request(
        self,
        message: Generate,
        root: PageKey,
        prompt: bytes,
        now: float,
        prompt_keys: PromptKeys | None,
        prompt_token_ids: NDArray[np.int32] | None,
        first_sample: Request | None,
    ) -> Request:
        num_prompt_tokens = message.num_prompt_tokens
        # The last output token may be the one past the context's end: its KV is never computed.
        max_new_tokens = min(message.sampling.max_new_tokens, self.limits.max_context + 1 - num_prompt_tokens)
        return Request(
            request_id=message.request_id,
            room=Room(message.room),
            num_prompt_tokens=num_prompt_tokens,
            sampling=replace(message.sampling, max_new_tokens=max_new_tokens),
            flag=message.hisparse or _DEFAULT_FLAG[self.policy],
            peer=self.peers.address_for(message.bootstrap_host, message.bootstrap_port, message.room),
            arrived_at=now,
            deadline=now + self.contact_timeout_secs,
            prompt=prompt,
            root=root,
            scores=message.scores if message.scores and message.scores.first < num_prompt_tokens else None,
            prompt_keys=prompt_keys,
            is_speculative=message.is_speculative,
            prompt_token_ids=prompt_token_ids if message.sampling.needs_prompt else None,
            first_sample=first_sample,
        )

    def _why_malformed(self, request: Request) -> str:
        num_prompt_tokens, num_packed = request.num_prompt_tokens, num_packed_tokens(request.prompt)
        if not 1 <= num_prompt_tokens <= self.limits.max_context:
            return f"the prompt has {num_prompt_tokens} tokens; allowed are 1 to {self.limits.max_context}"
        if num_prompt_tokens != num_packed:
            return f"{num_packed} of the prompt's {num_prompt_tokens} tokens have come"
        keys, num_pages = request.prompt_keys, num_prompt_tokens // self.limits.page_size
        if keys is not None and len(keys.keys) != num_pages:
            return f"{len(keys.keys)} keys have come for the prompt's {num_pages} pages"
        if request.sampling.max_new_tokens < 1:
            return f"max_new_tokens is {request.sampling.max_new_tokens}; it must be at least 1"
        return ""

    # --- the queue ----------------------------------------------------------------------------------

    def refresh(self, now: float) -> None:
        """Move requests between CONNECTING and WAITING, by whether their prefill node is registered with."""
        for peer in self.requests.queued_at(RequestState.WAITING):
            if not self.peers.is_registered(peer):
                for request in tuple(self.requests.queued(RequestState.WAITING, peer)):
                    if not self.wait_locally(request):
                        self.requests.queue(
                            request, RequestState.CONNECTING, self._contact_deadline(request, now)
                        )
        for peer in self.requests.queued_at(RequestState.CONNECTING):
            if self.peers.is_registered(peer):
                for request in tuple(self.requests.queued(RequestState.CONNECTING, peer)):
                    self._start_waiting(request, now)

    def _start_waiting(self, request: Request, now: float) -> None:
        """Move a request to WAITING, or fail it if it must be dense and the peer's page size forbids that."""
        page_size = self.peers.page_size(request.peer)
        request.dense_refusal = ""  # an earlier run of the node may have had other pages
        if page_size != self.limits.page_size:
            request.dense_refusal = (
                f"dense needs equal pages: --page-size is {page_size} on prefill node {request.peer}, "
                f"{self.limits.page_size} here; use hisparse or equal page sizes"
            )
        self.requests.queue(request, RequestState.WAITING, request.arrived_at + self.room_timeout_secs)
        if error := refusal(self.limits, request):
            self.ends.fail(request, 400, error, now)

    def wait_locally(self, request: Request) -> bool:
        """Let a request that owns nothing yet wait without a prefill node, if it can have all its KV without
        one. Returns whether it does."""

        def num_held(mode: Mode) -> int:
            num_pages = num_shareable_pages(self.requests.held, request.usable_keys, mode)
            return num_pages * self.limits.page_size

        if not local_modes(request, self.limits, num_held):
            return False
        request.dense_refusal = ""  # it was for the page size of a node that the request does not need
        deadline = request.arrived_at + self.room_timeout_secs
        self.requests.queue(request, RequestState.WAITING, deadline, is_local=True)
        return True

    def wait_for_node(self, request: Request, now: float) -> None:
        """Let a local request wait for its prefill node, which it needs after all."""
        peer = self.peers.address_for(*request.peer.node, request.room)
        self.peers.use(peer, now)
        self.requests.queue(request, RequestState.CONNECTING, self._contact_deadline(request, now), peer)

    def _contact_deadline(self, request: Request, now: float) -> float:
        """Return the deadline of a contact that begins now; the time to wait for slots bounds it, too."""
        return min(now + self.contact_timeout_secs, request.arrived_at + self.room_timeout_secs)

    def readdress(self, node: tuple[str, int], now: float) -> None:
        """Move the requests of a prefill node whose ranks have changed to the rank that now serves their
        room. Their time for contact starts again."""
        for request in self.requests.select(RequestState.CONNECTING, RequestState.WAITING):
            if request.peer.node != node or request.is_local:
                continue
            address = self.peers.address_for(*node, request.room)
            if address != request.peer:
                deadline = self._contact_deadline(request, now)
                self.requests.queue(request, RequestState.CONNECTING, deadline, address)
                self.peers.use(address, now)

    # --- deadlines --------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Fail the requests that have waited for too long for contact, for slots or for their KV."""
        for request in self.requests.expired(now):
            match request.state:
                case RequestState.CONNECTING:
                    self._expire_contact(request, now)
                case RequestState.WAITING:
                    self._expire_waiting(request, now)
                case RequestState.LANDING:
                    self.ends.metrics.add("kv_transfer_failures_total")
                    error = f"prefill node {request.peer} delivered no KV within {self.room_timeout_secs:g} s"
                    self.ends.abort_at_peer(request, error)
                    self.ends.fail(request, 504, error, now)
                case RequestState.FETCHING:
                    secs = self.room_timeout_secs
                    error = f"the held prefix did not come from main memory within {secs:g} s"
                    self.ends.fail(request, 503, error, now)
                case RequestState.RUNNING | RequestState.ENDING | RequestState.ENDED:
                    continue
                case _:
                    assert_never(request.state)

    def _expire_contact(self, request: Request, now: float) -> None:
        """Fail a request that got no contact with its prefill node. If it can do without one by now, it waits
        for slots instead. While registering with the node is under way, which may take long, it waits on. It
        waits in either case for no longer than it may wait for slots."""
        if request.arrived_at + self.room_timeout_secs > now and self.wait_locally(request):
            return
        latest = self._contact_deadline(request, now)
        if latest > now and self.peers.is_opening(request.peer, now):
            self.requests.queue(request, RequestState.CONNECTING, latest)
            return
        error = f"no contact with prefill node {request.peer}: {self.peers.last_error(request.peer)}"
        self.ends.fail(request, 503, error, now, PREFILL_NODE_FAILED)

    def _expire_waiting(self, request: Request, now: float) -> None:
        """Fail a request that got no slots, unless it waits for a first sample whose own time is not over."""
        first = request.first_sample
        is_coming = first is not None and first.state in (RequestState.LANDING, RequestState.FETCHING)
        if first is not None and is_coming and first.deadline > now:
            self.requests.queue(request, RequestState.WAITING, first.deadline, is_local=request.is_local)
            return
        error = f"the pools had no room for this request within {self.room_timeout_secs:g} s"
        self.ends.fail(request, 503, error, now)
