"""The decode node's record of one request: one sample of one prompt.

``QueueMoves.generate`` makes a record. ``live_requests.py`` alone changes its state and slots, as the moves
(``queue_moves.py``, ``plan_moves.py``, ``end_moves.py``) tell it to. The scheduler, the tables and the runner
read the record, and steps note their tokens in it. It holds no tensors and knows no pool. The module is long
because each field is explained where it is declared.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hisparse_pd.base.vocabulary import HisparseFlag, Mode, SamplingParams, TokenLogprob
from hisparse_pd.core.grammar.matcher import Matcher
from hisparse_pd.core.grammar.token_trie import Grammar
from hisparse_pd.core.paging.extents import joined, slice_extents
from hisparse_pd.core.paging.pools import Holding, PoolKind, SlotCounts
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, PromptKeys
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.request_states import IllegalMove, RequestState, RunStage
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.engine.messages import CachedTokens, RequestStats, pack_token_ids, unpack_token_ids
from hisparse_pd.engine.phases import DECODE_PHASES, PhaseLog
from hisparse_pd.protocol.messages import TOKEN_BYTES, Extent, Room, RoomDone, first_stepped
from hisparse_pd.protocol.prompt_scores import WantedScores

KV_POOLS: Final[dict[Mode, Kinds]] = {
    Mode.HISPARSE: (PoolKind.HOST, PoolKind.INDEX),
    Mode.DENSE: (PoolKind.DEVICE, PoolKind.INDEX),
}
"""The pools in which a request of each mode, or the prefix that it leaves, has KV and indexer keys."""
RESIDENT_POOLS: Final[Kinds] = (PoolKind.DEVICE,)
"""The pool in which resident requests share pages, beside what they share in KV_POOLS."""


_NO_COUNTS = SwapCounts()


@dataclass(eq=False)
class Request:
    """One sample of one prompt. Times are those of ``time.monotonic``, in seconds.

    Three kinds of tokens are told apart while it runs. The *newest* one is the input of its next step; its KV
    is not computed yet. *Known next* ones are tokens of the prompt that follow the newest, while its steps
    compute a short tail of the prompt. Output tokens *in flight* belong to launched steps that are not read.

    Example: 96 tokens of a prompt of 100 are held, and steps compute the rest. The newest token is then that
    of position 96, known next are those of 97 to 99, ``num_tail_tokens`` is 3, and ``next_index`` is -3.
    """

    request_id: str
    room: Room
    num_prompt_tokens: int
    sampling: SamplingParams
    flag: HisparseFlag
    """The mode that the request asks for, or the node's policy if it asks for none."""
    peer: PeerAddress
    """The rank of the prefill node that its body names; it may change until the request is LANDING."""
    arrived_at: float
    prompt: bytes
    """The prompt's token ids, packed by ``pack_token_ids``. Once the request runs, only the last ones are
    left, whose KV its steps compute, unless its pages are published when it ends."""
    root: PageKey = NO_ISOLATION
    """The key from which the keys of its pages follow; only requests with the same root share pages."""
    scores: WantedScores | None = None
    """The logprobs of prompt tokens that its prefill node must send."""
    arrived_seq: int = -1
    """Its number in the order of arrival; -1 before it is live."""
    state: RequestState = RequestState.CONNECTING
    deadline: float = float("inf")
    """The time at which its present state has lasted for too long; infinite from RUNNING on."""
    is_local: bool = False
    """Whether it waits without a prefill node. It is admitted only if all of its prompt's KV is held, can be
    copied, or is left to its steps (``local_kv.py``)."""
    prompt_keys: PromptKeys | None = None
    """Keys of the prompt's pages: with them it finds held pages, and others find its own. None: it does
    neither."""
    dense_refusal: str = ""
    """Why this request cannot be dense; empty when it can."""
    is_speculative: bool = True
    """Whether its steps may verify drafts."""
    first_sample: Request | None = None
    """The first sample of the same prompt; None if this is the first."""
    has_further_samples: bool = False
    """Whether it is the first of several samples."""
    prompt_token_ids: NDArray[np.int32] | None = None
    """The prompt's distinct token ids, then its resumed ones in order; None if no draw depends on them."""

    # From LANDING on.
    mode: Mode = Mode.HISPARSE
    holding: Holding | None = None
    """All slots that it owns, as the pools know them; None if it owns nothing."""
    held_prefix_tokens: int = 0
    """Leading tokens of the prompt for which nothing lands: those of held pages, and all others if they are
    copied from the first sample."""
    num_prefilled_tokens: int = 0
    """Leading tokens in held pages before the first page that has KV of decode steps."""
    prefix: Prefix | None = None
    """The pages at its start that it shares with requests that begin alike; its own come behind them."""
    source_prefix: Prefix | None = None
    """Pages of hisparse requests, from the start of its prompt, that are to be brought to the device for a
    dense one. Set only while the plan that admits it is carried out."""
    host_prefix: Prefix | None = None
    """Pages in the host pool with the same bytes as the first pages that a dense request shares: it leaves
    the shared ones for them. Set only while an exchange is carried out."""
    resident_prefix: Prefix | None = None
    """The device pages at its start that it shares with other residents while it is resident itself, or
    becomes so; those of its own come behind them."""
    owned_slots: SlotCounts = field(default_factory=SlotCounts)
    """The numbers of slots that it owns in ``TOKEN_POOLS``."""
    reserved_tokens: int = 0
    """Positions, from 0 on, that have a slot in each pool in which they need one."""
    hot_capacity: int = 0
    """Entries of the hot buffer; 0 when dense or resident."""
    num_page_slots: int = 0
    """Device slots, behind those of the hot buffer, of its own pages while these are being filled: it becomes
    resident when they are. 0 at other times."""
    num_filled_tokens: int = 0
    """Positions, from 0 on, that the fill of its pages brings; it brings later ones when it ends."""
    admitted_seq: int = -1
    """Its number in the order of admission; -1 before."""
    instance_id: str = ""
    """The run of the prefill node that got the Bootstrap; empty if it needs no prefill node."""
    num_scored: int = 0
    """Prompt positions whose scores have come."""
    num_tail_tokens: int = 0
    """Prompt tokens before the last one whose KV its steps are still to compute; steps in flight do not count
    as done. 0 unless its steps compute a short tail (``local_kv.py``)."""

    # From RUNNING on.
    output_token_ids: list[int] = field(default_factory=list)
    """All output tokens so far, without steps in flight."""
    unsent_token_ids: list[int] = field(default_factory=list)
    """The last output tokens, which the front has not got yet."""
    unsent_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Their logprobs, if any are wanted."""
    grammar: Future[Grammar] | None = None
    """The compilation of the grammar that its output must follow. None without a grammar, before
    ``ask_for_grammar``, and once the request has ended."""
    grammar_asked_at: float = 0.0
    """When ``grammar`` was given to the compiler."""
    matcher: Matcher | None = None
    """The output's place in the grammar, without steps in flight; None until the grammar is compiled."""
    is_filling: bool = False
    """Whether its row of the tables or its hot buffer may still be incomplete. Pages are filled beside its
    steps, and do not count."""
    shares_from: int | None = None
    """The number of output tokens from which on a resident request shares its pages: those of its fill were
    right if a step that began behind it is read. None: it shares all that it may, or is not resident."""
    is_sound: bool = False
    """Whether, when it is ENDING, all of its KV is right, so that it may be held."""
    num_in_flight: int = 0
    """Positions in launched steps that are not read yet, drafts left out: for each step the newest token's,
    and those of prompt tokens behind it."""
    num_drafts_in_flight: int = 0
    """The most drafts that launched steps verify. If all are right, the steps compute as many positions
    more."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Tokens that the draft layer guesses to follow the newest one; the next step takes them."""
    num_drafted: int = 0
    """Drafts that its steps have verified."""
    num_accepted: int = 0
    """Verified drafts that were right."""
    hot_positions: list[NDArray[np.int32]] | None = None
    """Positions to warm its first hot buffer with, for each hot group, most useful first. None: the most
    recent ones."""
    landed_hint: list[NDArray[np.int32]] | None = None
    """The hint that came with the KV, kept for further samples, which start with it, too."""
    delivery: RoomDone | None = None
    """The prefill node's message that all KV is sent; None if there was none."""
    row_counters: SwapCounts = _NO_COUNTS
    """Counts of its row as it is at present, as of the last step that was read."""
    earlier_counters: SwapCounts = _NO_COUNTS
    """Counts of the time before its row was emptied or its hot buffer changed."""
    num_retractions: int = 0
    """How often it has become hisparse, or its hot buffer smaller, to make room for others."""

    def __post_init__(self) -> None:
        self.phases = PhaseLog(DECODE_PHASES, self.arrived_at)

    def move(self, state: RequestState) -> None:
        """Enter ``state``. Raises IllegalMove, with the room, if the transition table does not allow it."""
        if not self.state.may_become(state):
            raise IllegalMove(f"room {self.room} cannot go from {self.state} to {state}")
        self.state = state

    @property
    def run_stage(self) -> RunStage:
        """The stage of a RUNNING request."""
        if self.sampling.grammar and self.matcher is None:
            return RunStage.AWAITS_GRAMMAR
        if self.is_filling:
            return RunStage.FILLING
        if not self.has_next_step:
            return RunStage.LAST
        return RunStage.READY if self.has_slots_for_next else RunStage.SITS_OUT

    def stats(self) -> RequestStats:
        """Return the figures of the request so far, for its client."""
        swap_ins = self.earlier_counters.plus(self.row_counters)
        delivery = self.delivery
        return RequestStats(
            mode=self.mode,
            cached=self.cached_tokens,
            num_held_tokens=self.held_prefix_tokens,
            hits=swap_ins.hits,
            misses=swap_ins.misses,
            evictions=swap_ins.evictions,
            transfer_bytes=0 if delivery is None else delivery.num_bytes,
            transfer_secs=0.0 if delivery is None else delivery.transfer_secs,
            num_retractions=self.num_retractions,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )

    # --- its tokens -----------------------------------------------------------------------------------------

    def first_stepped(self, page_size: int) -> int:
        """Return the first position of the prompt whose KV is rounded as in steps, whichever node computes
        it; KV before that is rounded as in a prefill (``protocol.messages.first_stepped``)."""
        return first_stepped(self.num_prompt_tokens, self.sampling.num_resumed_tokens, page_size)

    @property
    def num_landing_tokens(self) -> int:
        """The number of the prompt's tokens before the last one. A prefill node sends their KV as far as it
        is missing here; the first step computes that of the last one."""
        return self.num_prompt_tokens - 1

    @property
    def attempt(self) -> int:
        """The number of its landing zone (``Bootstrap.attempt``). Known once it is admitted."""
        return 1 + self.admitted_seq

    @property
    def needs_prefill_node(self) -> bool:
        """Whether prompt scores are wanted, or KV is missing that its steps do not compute. Known once it is
        admitted."""
        num_here = self.held_prefix_tokens + self.num_tail_tokens
        return num_here != self.num_landing_tokens or self.scores is not None

    @property
    def first_own_position(self) -> int:
        """The first position that its own steps compute."""
        return self.held_prefix_tokens if self.delivery is None else self.num_landing_tokens

    @property
    def newest_token_id(self) -> int:
        """The input of its next step, if no output token is in flight."""
        if self.output_token_ids:
            return self.output_token_ids[-1]
        return int(unpack_token_ids(self.prompt[-(1 + self.num_known_next) * TOKEN_BYTES :])[0])

    @property
    def num_known_next(self) -> int:
        """Tokens of the prompt behind the newest one of its next step; they need no draw."""
        return max(0, -self.next_index)

    def known_next(self, max_drafts: int) -> list[int]:
        """Return the known next tokens that concern the next step, in order: up to ``max_drafts`` that it
        computes in the place of drafts, and one that follows the last of these."""
        num_known = self.num_known_next
        if not num_known:
            return []
        known: list[int] = unpack_token_ids(self.prompt[-num_known * TOKEN_BYTES :]).tolist()
        return known[: max_drafts + 1]

    @property
    def resumed_token_ids(self) -> NDArray[np.int32]:
        """The prompt's last tokens, which are output already; empty if no draw depends on them."""
        num_resumed = self.sampling.num_resumed_tokens
        if not num_resumed or self.prompt_token_ids is None:
            return np.empty(0, np.int32)
        return self.prompt_token_ids[-num_resumed:]

    @cached_property
    def life_tokens(self) -> int:
        """Token slots that its whole life takes; the last output token's KV is never computed."""
        return self.num_prompt_tokens + self.sampling.max_new_tokens - 1

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV exists, without steps in flight: all before the newest token."""
        return self.num_prompt_tokens + len(self.output_token_ids) - 1 - self.num_tail_tokens

    @property
    def all_token_ids(self) -> bytes:
        """The packed ids of its prompt, if that is still whole, and of its output."""
        return self.prompt + pack_token_ids(self.output_token_ids)

    # --- its steps ------------------------------------------------------------------------------------------

    @property
    def next_seq_len(self) -> int:
        """Length of the sequence in the next step, the newest token included. While drafts are in flight, it
        is the greatest possible length."""
        return self.num_kv_tokens + self.num_in_flight + self.num_drafts_in_flight + 1

    @property
    def next_index(self) -> int:
        """The number, from 0, of the output token that is drawn behind the newest token of the next step, if
        no draft in flight is right. If it is below 0, the prompt goes on there for as many tokens."""
        return len(self.output_token_ids) + self.num_in_flight - self.num_tail_tokens

    @property
    def num_outputs_in_flight(self) -> int:
        """Output tokens that launched steps yield if no draft is right, and that are not read yet. At most
        one when a step is planned."""
        return max(0, self.next_index) - len(self.output_token_ids)

    @property
    def has_next_step(self) -> bool:
        """Whether a token may follow those that are in flight."""
        return self.next_index < self.sampling.max_new_tokens

    @property
    def is_sure_of_next(self) -> bool:
        """Whether it has a next step and slots for it, however many drafts in flight are right."""
        num_tokens = self.next_index + self.num_drafts_in_flight
        return num_tokens < self.sampling.max_new_tokens and self.has_slots_for_next

    @property
    def has_slots_for_next(self) -> bool:
        """Whether the next step's positions have slots; without them the request sits out."""
        return self.reserved_tokens >= self.next_seq_len

    @property
    def is_plain_greedy(self) -> bool:
        """Whether its next token is just the one with the largest logit, and no logprobs are wanted. Before
        ``min_new_tokens`` it may not be, because tokens that end the answer are not allowed there."""
        params = self.sampling
        if params.grammar or params.temperature != 0 or params.num_logprobs is not None:
            return False
        return max(0, self.next_index) >= params.min_new_tokens and not self.changes_logits

    @cached_property
    def changes_logits(self) -> bool:
        """Whether its tokens have to be counted for penalties or biases; cached, because each step asks."""
        return self.sampling.changes_logits

    def take_drafts(self, max_drafts: int) -> list[int]:
        """Return the drafts that its next step verifies, and forget all of them.

        These are at most ``max_drafts``, and none behind the last token that the request may have.
        """
        drafts, self.draft_token_ids = self.draft_token_ids, []
        num_left = self.sampling.max_new_tokens - self.next_index
        return drafts[: max(0, min(max_drafts, num_left - 1))]

    def enter_step(self, num_sure: int, most_drafts: int) -> None:
        """Note that a step was launched that computes ``num_sure`` positions in any case, and verifies at
        most ``most_drafts`` drafts behind them."""
        self.num_in_flight += num_sure
        self.num_drafts_in_flight += most_drafts

    def leave_step(self, num_sure: int, most_drafts: int) -> None:
        """Note that the results of a step, entered with the same numbers, are read; the caller emits its
        tokens next."""
        self.num_in_flight -= num_sure
        self.num_drafts_in_flight -= most_drafts

    # --- its slots ------------------------------------------------------------------------------------------

    @property
    def owned(self) -> Holding:
        """The request's holding. Raises IllegalMove if it has none."""
        if self.holding is None:
            raise IllegalMove(f"room {self.room} is {self.state} and owns nothing")
        return self.holding

    def extents(self, kind: PoolKind) -> tuple[Extent, ...]:
        """Return its slots in the order of positions: those that it shares, then its own."""
        prefix = self.prefix if kind in self.kv_pools else None
        if kind in RESIDENT_POOLS and self.is_resident:
            prefix = self.resident_prefix
        return self.owned[kind] if prefix is None else joined(prefix.extents(kind) + self.owned[kind])

    @property
    def page_extents(self) -> tuple[Extent, ...]:
        """The device slots of its pages, in the order of positions. While these are being filled, the slots
        of its hot buffer come before its own pages, and are left out."""
        if not self.num_page_slots:
            return self.extents(PoolKind.DEVICE)
        num_slots = self.num_device_slots
        own = slice_extents(self.owned[PoolKind.DEVICE], num_slots - self.num_page_slots, num_slots)
        prefix = self.resident_prefix
        return own if prefix is None else joined(prefix.extents(PoolKind.DEVICE) + own)

    @property
    def kv_pools(self) -> Kinds:
        return KV_POOLS[self.mode]

    @property
    def req_row(self) -> int:
        return self.owned.only_slot(PoolKind.REQ_ROW)

    @property
    def num_device_slots(self) -> int:
        return self.owned.num_slots(PoolKind.DEVICE)

    @property
    def is_resident(self) -> bool:
        """Whether it is hisparse and has no hot buffer but device pages for all of its tokens. Its items are
        in the host pool, too. Known once it is admitted."""
        return self.mode is Mode.HISPARSE and self.hot_capacity == 0

    @property
    def may_leave_pages(self) -> bool:
        """Whether it may give its device pages up for a hot buffer: if it is dense, or is or becomes
        resident."""
        becomes_resident = self.num_page_slots > 0
        return self.mode is Mode.DENSE or self.is_resident or becomes_resident

    # --- the pages that it shares ---------------------------------------------------------------------------

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """The prefixes whose pages it uses."""
        prefixes = (self.prefix, self.source_prefix, self.host_prefix, self.resident_prefix)
        return tuple(prefix for prefix in prefixes if prefix is not None)

    @property
    def num_shared_pages(self) -> int:
        return self.prefix.end_page if self.prefix else 0

    @property
    def num_resident_pages(self) -> int:
        """The number of device pages that it shares with other residents."""
        return self.resident_prefix.end_page if self.resident_prefix else 0

    @property
    def num_shared_device_pages(self) -> int:
        """The number of device pages before those of its own, which it shares if it is dense or resident."""
        return self.num_shared_pages if self.mode is Mode.DENSE else self.num_resident_pages

    def copies_of_shared(self, page_size: int) -> SlotCounts:
        """Return the slots that it takes, when it leaves its pages, for copies of those that it shares: none
        unless it is dense, because a hisparse request goes on sharing what it shares in ``KV_POOLS``."""
        num_pages = self.num_shared_pages if self.mode is Mode.DENSE else 0
        return SlotCounts.of(KV_POOLS[Mode.HISPARSE], num_pages * page_size)

    @property
    def will_share(self) -> bool:
        """Whether it has become resident and its next step lets others share its pages."""
        return self.shares_from is not None and self.run_stage is RunStage.READY

    @property
    def usable_keys(self) -> tuple[PageKey, ...]:
        """Keys of the prompt pages that may come from a held prefix: those before ``first_stepped``."""
        return () if self.prompt_keys is None else self.prompt_keys.keys[: self.num_usable_pages]

    @property
    def num_usable_pages(self) -> int:
        """The number of ``usable_keys``."""
        if self.prompt_keys is None:
            return 0
        page_size = self.prompt_keys.page_size
        return self.first_stepped(page_size) // page_size

    def kept_keys(self, num_tokens: int) -> list[PageKey]:
        """Return the keys of the whole pages of its first ``num_tokens`` tokens."""
        if self.prompt_keys is None:
            return []
        num_pages = num_tokens // self.prompt_keys.page_size
        if num_pages <= len(self.prompt_keys.keys):
            return list(self.prompt_keys.keys[:num_pages])
        return self.prompt_keys.with_output(pack_token_ids(self.output_token_ids))[:num_pages]

    @property
    def cached_tokens(self) -> CachedTokens:
        """The prompt's tokens that were not computed for this request, once its KV is here."""
        if self.delivery is None:  # without a prefill node nothing was cached but what is held
            return CachedTokens(decode=self.held_prefix_tokens)
        return CachedTokens.of_room(self.delivery)


admission_order = attrgetter("admitted_seq")
"""The key by which requests are sorted so that those admitted first come first."""
