"""The record of one request on the decode node, and the states it may go through.

A record holds no tensors and knows no pool; only ``live_requests.py`` moves it between states.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from operator import add
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hisparse_pd.base.vocabulary import HisparseFlag, Mode, SamplingParams, TokenLogprob
from hisparse_pd.core.grammar.matcher import Matcher
from hisparse_pd.core.grammar.token_trie import Grammar
from hisparse_pd.core.paging.extents import joined
from hisparse_pd.core.paging.pools import Holding, PoolKind, SlotCounts
from hisparse_pd.core.paging.prefix_tree import Kinds, Prefix
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, PromptKeys
from hisparse_pd.engine.messages import RequestStats, pack_token_ids, unpack_token_ids
from hisparse_pd.engine.phases import DECODE_PHASES, PhaseLog
from hisparse_pd.protocol.messages import TOKEN_BYTES, Extent, Room, RoomDone
from hisparse_pd.protocol.prompt_scores import WantedScores

KV_POOLS: Final[dict[Mode, Kinds]] = {
    Mode.HISPARSE: (PoolKind.HOST, PoolKind.INDEX),
    Mode.DENSE: (PoolKind.DEVICE, PoolKind.INDEX),
}
"""Where the KV and the indexer keys of a request are, and of the prefix that it leaves."""


class RequestState(StrEnum):
    """Where a request is, and what it owns there."""

    CONNECTING = "connecting"
    """Waits for its prefill node to be registered with. Owns nothing."""
    WAITING = "waiting"
    """Waits in the admission queue. Owns nothing."""
    LANDING = "landing"
    """The prefill node may write. Owns the landing zone (host slots when hisparse, device pages when dense),
    index pages, an aux slot and a req_row; hisparse: lookup slots, and the device slots of its hot buffer to
    be. Of a held prefix it uses, and does not own, the pages before those."""
    RUNNING = "running"
    """Owns the same but the aux slot, and what it has grown by. In the next step when it is ``READY``; the
    first has the prompt's last token as its newest."""
    ENDING = "ending"
    """Has ended for its client, and owns the same as long as a step in flight, or what fills its row, uses
    any of it. Its room and its id are free for others."""
    ENDED = "ended"
    """Owns nothing: its slots are free, or quarantined when a remote write may still land in them."""


_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.CONNECTING: frozenset({RequestState.CONNECTING, RequestState.WAITING, RequestState.ENDED}),
    RequestState.WAITING: frozenset({RequestState.CONNECTING, RequestState.LANDING, RequestState.ENDED}),
    RequestState.LANDING: frozenset({RequestState.RUNNING, RequestState.ENDED}),
    RequestState.RUNNING: frozenset({RequestState.ENDING}),
    RequestState.ENDING: frozenset({RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}


class RunStage(StrEnum):
    """What a RUNNING request is about."""

    AWAITS_GRAMMAR = "awaits grammar"
    """What its output has to follow is being compiled."""
    FILLING = "filling"
    """Its row of the tables is being filled, or its hot buffer is."""
    LAST = "last"
    """No token may follow those in flight."""
    SITS_OUT = "sits out"
    """It has no slot for its next token."""
    READY = "ready"
    """It gets a token in the next step."""


class IllegalMove(Exception):
    """A request was moved between states that the transition table does not connect."""


class PeerAddress(NamedTuple):
    """The bootstrap endpoint that names a prefill node, and one of its ranks."""

    host: str
    port: int
    rank: int = 0

    @property
    def node(self) -> tuple[str, int]:
        return self.host, self.port

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" rank {self.rank}" if self.rank else "")


@dataclass(eq=False)
class Request:
    """One sample of one prompt. Times are of ``time.monotonic``, in seconds."""

    request_id: str
    room: Room
    num_prompt_tokens: int
    sampling: SamplingParams
    flag: HisparseFlag
    """What was asked for, or the node's policy when the request did not say."""
    peer: PeerAddress
    arrived_at: float
    prompt: bytes
    """Its token ids, as of ``pack_token_ids``; what stands for them once its KV is here is the last one's."""
    root: PageKey = NO_ISOLATION
    """The key of its isolation, behind which the keys of its pages come."""
    scores: WantedScores | None = None
    """The logprobs of the prompt's own tokens that its prefill node is to tell."""
    arrived_seq: int = -1
    """Order of arrival."""
    state: RequestState = RequestState.CONNECTING
    deadline: float = float("inf")
    """When the present state has lasted too long; infinite while running."""
    prompt_keys: PromptKeys | None = None
    """By which its KV is found when it has ended, and what is held for it; None: neither."""
    dense_refusal: str = ""
    """Why this request cannot be dense; empty when it can."""
    is_speculative: bool = True
    """Whether its steps may verify drafts."""
    first_sample: Request | None = None
    """The first sample of the same prompt, where this is another one."""
    prompt_token_ids: NDArray[np.int32] | None = None
    """Each that the prompt has, once, where draws depend on them; behind these the resumed ones in order."""

    # From LANDING on.
    mode: Mode = Mode.HISPARSE
    holding: Holding | None = None
    held_prefix_tokens: int = 0
    """Leading tokens of the prompt, in whole pages, whose KV and indexer keys were here already: nothing
    lands for them."""
    prefix: Prefix | None = None
    """The first of its pages, shared with whoever begins alike; its own are behind them."""
    owned_slots: SlotCounts = field(default_factory=SlotCounts)
    """What it owns of the pools of tokens."""
    reserved_tokens: int = 0
    """Positions, from 0 on, that have a slot in every pool that they need one in."""
    hot_capacity: int = 0
    """Entries of the hot buffer; 0 when dense."""
    admitted_seq: int = -1
    """Order of admission."""
    instance_id: str = ""
    """The run of the prefill node that got the Bootstrap; empty where nothing lacks."""
    num_scored: int = 0
    """Positions whose scores have come."""

    # From RUNNING on.
    output_token_ids: list[int] = field(default_factory=list)
    unsent_token_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[TokenLogprob] = field(default_factory=list)
    """The latest of the output, which the front has not been told of."""
    grammar: Future[Grammar] | None = None
    """What its output has to follow, asked for with its KV; None where that is nothing, and at its end."""
    grammar_asked_at: float = 0.0
    matcher: Matcher | None = None
    """How far its output has come in that, steps in flight left out; None until it is compiled."""
    is_filling: bool = False
    """Whether its row, or its hot buffer, may still be being filled."""
    is_sound: bool = False
    """When ENDING: whether the KV that it has made is as it should be."""
    num_in_flight: int = 0
    """Output tokens that launched steps will yield and nobody has read yet; at most one where a step is
    planned. Of a step that verifies drafts, the one token that it is sure to yield."""
    num_drafts_in_flight: int = 0
    """Drafts that launched steps verify at most: so many tokens more may come."""
    draft_token_ids: list[int] = field(default_factory=list)
    """What the draft layer guesses to follow the newest token; the next step takes them."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts that were verified and accepted."""
    hot_positions: list[NDArray[np.int32]] | None = None
    """Per hot group, what a new hot buffer is to be warmed with, most useful first."""
    delivery: RoomDone | None = None
    """What its prefill node said of the KV that it has sent."""
    row_counters: tuple[int, int, int] = (0, 0, 0)
    """Hits, misses and evictions of its row; ``earlier_counters``: of the rows that it had before."""
    earlier_counters: tuple[int, int, int] = (0, 0, 0)
    num_retractions: int = 0

    def __post_init__(self) -> None:
        self.phases = PhaseLog(DECODE_PHASES, self.arrived_at)

    @property
    def first_resumed(self) -> int:
        """The position from which on the prompt is the output so far of a request that goes on here."""
        return self.num_prompt_tokens - self.sampling.num_resumed_tokens

    @property
    def first_stepped(self) -> int:
        """The position from which on KV is of decode steps, or rounded like theirs: that of the last token
        before the output. Where these tokens are inside another one's prompt, their KV has other bits on a
        GPU."""
        return self.first_resumed - 1

    @property
    def num_landing_tokens(self) -> int:
        """The end of the positions whose KV the prefill node sends: the last token's is the first step's."""
        return self.num_prompt_tokens - 1

    @property
    def lacks_nothing(self) -> bool:
        """Whether it needs no prefill node: all KV but the last token's is here, and no score is wanted."""
        return self.held_prefix_tokens == self.num_landing_tokens and self.scores is None

    @property
    def newest_token_id(self) -> int:
        """The input of its next step, steps in flight left out."""
        if self.output_token_ids:
            return self.output_token_ids[-1]
        return int(unpack_token_ids(self.prompt[-TOKEN_BYTES:])[0])

    @property
    def resumed_token_ids(self) -> NDArray[np.int32]:
        """The end of the prompt that is the output's beginning, where draws depend on it."""
        num_resumed = self.sampling.num_resumed_tokens
        if not num_resumed or self.prompt_token_ids is None:
            return np.empty(0, np.int32)
        return self.prompt_token_ids[-num_resumed:]

    @cached_property
    def changes_logits(self) -> bool:
        """Whether its tokens have to be counted: asked for each step."""
        return self.sampling.changes_logits

    @property
    def life_tokens(self) -> int:
        """Token slots of the whole life: the last output token's KV is never computed."""
        return self.num_prompt_tokens + self.sampling.max_new_tokens - 1

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV exists, steps in flight left out: all but the newest output token."""
        return self.num_prompt_tokens + len(self.output_token_ids) - 1

    @property
    def next_seq_len(self) -> int:
        """Length of the sequence in the next step, the newest token included; the longest that it may have
        while drafts are in flight."""
        return self.num_kv_tokens + self.num_in_flight + self.num_drafts_in_flight + 1

    @property
    def has_next_step(self) -> bool:
        """Whether a token may follow those that are in flight."""
        return self.next_index < self.sampling.max_new_tokens

    @property
    def is_sure_of_next(self) -> bool:
        """Whether it has a next step, and slots for it, however many of the drafts in flight are right."""
        num_tokens = self.next_index + self.num_drafts_in_flight
        return num_tokens < self.sampling.max_new_tokens and self.has_slots_for_next

    @property
    def next_index(self) -> int:
        """Output tokens before the one that the next step samples; more where drafts in flight are right."""
        return len(self.output_token_ids) + self.num_in_flight

    @property
    def is_plain_greedy(self) -> bool:
        """Whether its next token is that of the largest logit, and nobody asks for more than that."""
        params = self.sampling
        if params.grammar or params.temperature != 0 or params.num_logprobs is not None:
            return False
        return self.next_index >= params.min_new_tokens and not self.changes_logits

    def enter_step(self, most_drafts: int) -> None:
        """A step that verifies so many of its drafts at most was launched."""
        self.num_in_flight += 1
        self.num_drafts_in_flight += most_drafts

    def leave_step(self, most_drafts: int) -> None:
        """Note that the tokens of that step are read, and are added next."""
        self.num_in_flight -= 1
        self.num_drafts_in_flight -= most_drafts

    @property
    def owned(self) -> Holding:
        """The holding of a request that has one. Raises IllegalMove otherwise."""
        if self.holding is None:
            raise IllegalMove(f"room {self.room} is {self.state} and owns nothing")
        return self.holding

    def extents(self, kind: PoolKind) -> tuple[Extent, ...]:
        """Its slots in the order of positions: those that it shares, and its own behind them."""
        if self.prefix is None or kind not in self.kv_pools:
            return self.owned[kind]
        return joined(self.prefix.extents(kind) + self.owned[kind])

    @property
    def kv_pools(self) -> Kinds:
        return KV_POOLS[self.mode]

    @property
    def num_shared_pages(self) -> int:
        return self.prefix.end_page if self.prefix else 0

    @property
    def req_row(self) -> int:
        return self.owned.only_slot(PoolKind.REQ_ROW)

    @property
    def num_device_slots(self) -> int:
        return self.owned.num_slots(PoolKind.DEVICE)

    @property
    def has_slots_for_next(self) -> bool:
        """Whether the next token has its slots; who has none for it waits until it is given some."""
        return self.reserved_tokens >= self.next_seq_len

    @property
    def run_stage(self) -> RunStage:
        """What a RUNNING request is doing."""
        if self.sampling.grammar and self.matcher is None:
            return RunStage.AWAITS_GRAMMAR
        if self.is_filling:
            return RunStage.FILLING
        if not self.has_next_step:
            return RunStage.LAST
        return RunStage.READY if self.has_slots_for_next else RunStage.SITS_OUT

    def take_drafts(self, max_drafts: int) -> list[int]:
        """The drafts that its next step verifies, ``max_drafts`` at most, and none behind the last token that
        was asked for; the step after has others."""
        drafts, self.draft_token_ids = self.draft_token_ids, []
        num_left = self.sampling.max_new_tokens - self.next_index
        return drafts[: max(0, min(max_drafts, num_left - 1))]

    @property
    def may_leave_pages(self) -> bool:
        """Whether it may go on as hisparse, its device pages for others: unless it shares some."""
        return self.mode is Mode.DENSE and self.prefix is None

    @property
    def may_share(self) -> bool:
        """Whether others may use the pages of its prompt while it runs: unless it may have to leave them."""
        return self.mode is Mode.HISPARSE or self.reserved_tokens >= self.life_tokens

    @property
    def usable_keys(self) -> tuple[PageKey, ...]:
        """Keys of the prompt's pages that may come from a held prefix: those with the bits of prompts."""
        if self.prompt_keys is None:
            return ()
        return self.prompt_keys.keys[: self.first_stepped // self.prompt_keys.page_size]

    def kept_keys(self, num_tokens: int) -> list[PageKey]:
        """Return the keys of the whole pages of its first ``num_tokens`` tokens."""
        if self.prompt_keys is None:
            return []
        num_pages = num_tokens // self.prompt_keys.page_size
        if num_pages <= len(self.prompt_keys.keys):
            return list(self.prompt_keys.keys[:num_pages])
        return self.prompt_keys.with_output(pack_token_ids(self.output_token_ids))[:num_pages]

    def move(self, state: RequestState) -> None:
        """Enter ``state``. Raises IllegalMove, with the room, when the transition table does not allow it."""
        if state not in _MOVES[self.state]:
            raise IllegalMove(f"room {self.room} cannot go from {self.state} to {state}")
        self.state = state

    def stats(self) -> RequestStats:
        hits, misses, evictions = map(add, self.earlier_counters, self.row_counters)
        # Without a prefill node nothing was computed but the last token.
        delivery = self.delivery or RoomDone(self.room, 0, self.held_prefix_tokens, 0.0)
        return RequestStats(
            mode=self.mode,
            num_cached_tokens=delivery.num_cached_tokens,
            num_held_tokens=self.held_prefix_tokens,
            hits=hits,
            misses=misses,
            evictions=evictions,
            transfer_bytes=delivery.num_bytes,
            transfer_secs=delivery.transfer_secs,
            num_retractions=self.num_retractions,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )
