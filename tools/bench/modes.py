"""Simulates how many tokens a second a decode node makes dense, hisparse and with ``auto``.

    python -m tools.bench.modes --clients 16 24 32 64 --input-tokens 8192 32768 --output-tokens 256

The decode node's own scheduler and books plan for clients that ask again as soon as they have an answer. What
a GPU and links do is modelled, by times that were measured: a step takes some time for any number of
requests, some for each, some more for each with a hot buffer, and the time in which misses cross the link.
The prefill node has each prompt cached. So what plans choose can be judged without a GPU. The defaults are
five layers of V3.2 on an H200, with as much memory as 16 dense requests of 32k take (docs/measurements.md).
With ``--turns`` clients hold conversations: the next prompt has all that was said before, which may be held,
and ``--turn-tokens`` more. With ``--dense-first`` other prompts are held on the device, and with ``--held``
the prompts are held that come.

A hot buffer of ``c`` entries for a sequence of ``s`` tokens misses ``w / c - w / s`` positions, as
``miss_cost.py`` has it: a synthetic trace with 65% hits at 4,096 entries of 32k has 95% at 16,384.
"""

from __future__ import annotations

import argparse
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from hisparse_pd.base.vocabulary import HisparseFlag, Mode, SamplingParams
from hisparse_pd.core.paging.pools import Pools, SlotCounts
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PromptKeys
from hisparse_pd.decode_node.draft_choice import DraftChoice
from hisparse_pd.decode_node.held_matches import num_shareable_pages
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.local_kv import local_modes
from hisparse_pd.decode_node.miss_cost import MissCosts
from hisparse_pd.decode_node.next_plan import NextPlan
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_line import STEPS_BETWEEN_ESTIMATES
from hisparse_pd.decode_node.step_plan import Admission, Exchange, Fill, StepPlan
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import TOKEN_BYTES, Room
from tools.bench.facts import OUT
from tools.bench.report import make_console, table_of, write_report

PAGE_SIZE: Final = 64
FULL_SIZE: Final = 4096
"""Entries of a hot buffer of the full size, for which hit rates are given."""
HIT_CONTEXT: Final = 32768
"""Tokens of the sequences for which hit rates are given."""
LARGEST: Final = 16384
"""Most entries of a hot buffer without a bound."""
IDLE_SECS: Final = 0.0005
"""Time of a turn without a step."""
PEER: Final = PeerAddress("prefill", 8998)


@dataclass(frozen=True)
class Node:
    """The sizes and times of a decode node. Times are seconds, rates bytes a second."""

    device_tokens: int
    host_tokens: int
    max_requests: int
    position_bytes: int
    """Bytes of a position's items in all layers."""
    fixed_secs: float
    """A step's time for any number of requests."""
    request_secs: float
    """The time that each request adds."""
    hot_secs: float
    """The time that each request with a hot buffer adds to that, if it misses nothing."""
    hit_share: float
    """The share of selected positions that are in a hot buffer of FULL_SIZE, in sequences of HIT_CONTEXT."""
    index_topk: int = 2048
    link_rate: float = 50e9
    """From the host pool to the device."""
    retract_rate: float = 31e9
    """From the device to the host pool."""
    lane_rate: float = 20e9
    """From the prefill node, which has each prompt cached."""
    slice_bytes: int = 32 << 20
    """Most bytes of a slice of pages that are filled beside a step."""
    growth_tokens: int = 1024

    def limits(self, max_context: int, *, is_bounded: bool) -> Limits:
        """Return the scheduler's limits. ``is_bounded``: hot buffers have no more than FULL_SIZE entries."""
        totals = SlotCounts(
            host=self.host_tokens,
            device=self.device_tokens,
            index=self.host_tokens + self.device_tokens,
            lookup=2 * self.host_tokens,
            aux=4 * self.max_requests,
            req_row=self.max_requests,
        )
        return Limits(
            totals=totals,
            page_size=PAGE_SIZE,
            max_context=max_context,
            index_topk=self.index_topk,
            device_buffer_size=FULL_SIZE,
            growth_tokens=self.growth_tokens,
            largest_hot_buffer=0 if is_bounded else LARGEST,
            keeps_residents=not is_bounded,
            fill_tokens=(128 << 20) // self.position_bytes,
        )

    def first_step_secs(self) -> dict[int, float]:
        """Return what a node measures at its start: steps of requests that miss nothing in hot buffers."""
        request_secs = self.request_secs + self.hot_secs
        sizes = (1 << bits for bits in range(self.max_requests.bit_length()))
        return {size: self.fixed_secs + request_secs * size for size in sizes}

    def miss_share(self, hot_capacity: int, seq_len: int) -> float:
        """Return the share of selected positions that miss in a hot buffer."""
        at_full_size = 1 / FULL_SIZE - 1 / HIT_CONTEXT
        share = (1 - self.hit_share) * (1 / hot_capacity - 1 / max(hot_capacity, seq_len)) / at_full_size
        return min(1.0, share)


@dataclass(frozen=True)
class Load:
    """Clients, each of which asks for the next answer when it has one."""

    num_clients: int
    prompt_lens: Sequence[int]
    """The prompts have these lengths by turns."""
    output_tokens: int
    num_requests: int
    num_turns: int = 1
    """Prompts of a conversation."""
    turn_tokens: int = 0
    """Tokens that a later prompt has beside what was said before."""
    pause_secs: float = 0.0
    """Time between an answer and its client's next request."""
    num_dense_first: int = 0
    """The first of the requests, which are dense in all modes. When they end, their pages are held."""
    ramp_secs: float = 0.0
    """Time between the first requests of two clients."""
    num_held: int = 0
    """Prompts that come by turns, and that hisparse requests have left held; 0: all prompts are new."""

    @property
    def max_context(self) -> int:
        each_turn = self.turn_tokens + self.output_tokens
        return max(self.prompt_lens) + self.output_tokens + (self.num_turns - 1) * each_turn


@dataclass
class Outcome:
    """The counts of a simulation."""

    secs: float = 0.0
    num_tokens: int = 0
    num_by_mode: Counter[Mode] = field(default_factory=Counter)
    """Requests by the mode in which they were admitted."""
    num_retractions: int = 0
    num_exchanges: int = 0
    """Changes of hot buffers' sizes, and pages left for hot buffers."""
    num_landed_tokens: int = 0
    """Tokens that prefill nodes have sent."""

    @property
    def tokens_per_sec(self) -> float:
        return self.num_tokens / self.secs


class Simulation:
    """One node under one load. All requests but the load's ``num_dense_first`` have the flag ``flag``."""

    def __init__(self, node: Node, load: Load, flag: HisparseFlag, *, is_bounded: bool) -> None:
        self._node, self._load, self._flag = node, load, flag
        self._limits = node.limits(load.max_context, is_bounded=is_bounded)
        self._requests = LiveRequests(Pools(self._limits.totals, PAGE_SIZE), quarantine_secs=60.0)
        self._plans = NextPlan(self._limits, self._requests)
        miss_secs = node.position_bytes / node.link_rate
        self._costs = MissCosts(node.index_topk, miss_secs, node.first_step_secs())
        self._plans.miss_cost = self._costs.present()
        self._step_times = DraftChoice(0)
        self._prompt_lens = cycle(load.prompt_lens)
        self._num_arrived = self._num_conversations = self._num_steps = 0
        self._turns: dict[Request, int] = {}
        """The number, from 1, of each request's turn in its conversation."""
        self._now = self._lane_free_at = self._began_at = 0.0
        self._landed_at: dict[Request, float] = {}
        self._filled_at: dict[Request, float] = {}
        self._pausing: list[tuple[float, Callable[[], None]]] = []
        """When clients ask again, and what they do then; in order."""
        self._num_hot: dict[Request, int] = {}
        """The entries of hot buffers that positions have; misses take the others."""
        self._unfilled: dict[Request, float] = {}
        """The bytes that pages still lack which are filled beside steps."""
        self._skipping: set[Request] = set()
        """Requests whose device slots change beside the next step, which they skip."""
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Simulate the load to the end of its last request. Raises RuntimeError if the scheduler admits
        nobody although nobody runs."""
        if self._load.num_held:
            self._hold_prompts()
        for number in range(self._load.num_clients):
            self._pausing.append((self._now + number * self._load.ramp_secs, self._begin_conversation))
        self._run()
        return self.outcome

    def _hold_prompts(self) -> None:
        """Let each of the prompts that will come be held, as after a hisparse request."""
        load, flag = self._load, self._flag
        self._load, self._flag = replace(load, output_tokens=8), HisparseFlag.TRUE
        for _ in range(load.num_held):
            self._load = replace(self._load, num_requests=self._num_arrived + 1)
            self._begin_conversation()
            self._run()
            self._pausing.clear()
        self._load, self._flag = replace(load, num_requests=self._num_arrived + load.num_requests), flag
        self.outcome, self._began_at = Outcome(), self._now

    def _run(self) -> None:
        while len(self._requests) or self._pausing:
            while self._pausing and self._pausing[0][0] <= self._now:
                self._pausing.pop(0)[1]()
            plan = self._plans.make(self._now)
            self._carry_out(plan)
            self._go_on()
            running = self._requests.select(RequestState.RUNNING)
            may_run = (r for r in running if not r.is_filling and r not in self._skipping)
            batch = [r for r in may_run if r.has_slots_for_next and r.has_next_step]
            self._skipping.clear()
            if batch:
                self._step(batch)
            elif len(self._requests) and not (running or self._landed_at or self._pausing):
                raise RuntimeError("nobody runs or lands, and the scheduler admits nobody")
            else:
                self._now += IDLE_SECS
        self.outcome.secs = self._now - self._began_at

    def _begin_conversation(self) -> None:
        if self._num_arrived == self._load.num_requests:
            return
        self._num_conversations += 1
        number = self._num_conversations % (self._load.num_held or self._load.num_requests)
        self._arrive(pack_token_ids([number] * next(self._prompt_lens)), turn=1)

    def _arrive(self, prompt: bytes, turn: int) -> None:
        if self._num_arrived == self._load.num_requests:
            return
        self._num_arrived += 1
        flag = HisparseFlag.FALSE if self._num_arrived <= self._load.num_dense_first else self._flag
        sampling = SamplingParams(max_new_tokens=self._load.output_tokens)
        room, prompt_len = Room(self._num_arrived), len(prompt) // TOKEN_BYTES
        request = Request(f"id-{room}", room, prompt_len, sampling, flag, PEER, self._now, prompt)
        request.prompt_keys = PromptKeys.of(NO_ISOLATION, prompt, PAGE_SIZE)
        self._turns[request] = turn
        self._requests.open(request)

        def num_held(mode: Mode) -> int:
            return num_shareable_pages(self._requests.held, request.usable_keys, mode) * PAGE_SIZE

        is_local = bool(local_modes(request, self._limits, num_held))
        self._requests.queue(request, RequestState.WAITING, float("inf"), is_local=is_local)

    def _carry_out(self, plan: StepPlan) -> None:
        plan.carry_out(
            wait_for_node=lambda request: self._requests.queue(request, RequestState.WAITING, float("inf")),
            use_held=self._requests.use_held,
            use_resident=self._requests.use_resident,
            exchange_slots=self._exchange,
            begin_fill=self._begin_fill,
            grow=lambda growth: self._requests.grow(growth.request, growth.need),
            admit=self._admit,
        )

    def _exchange(self, exchange: Exchange) -> None:
        request, node = exchange.request, self._node
        self.outcome.num_exchanges += 1
        self._skipping.add(request)
        self._unfilled.pop(request, None)
        self._requests.grow_for_exchange(exchange)
        if request.mode is Mode.DENSE:  # no step runs while all that it has is copied
            self._now += request.num_kv_tokens * node.position_bytes / node.retract_rate
        first_kept = None if request.hot_capacity else self._limits.first_kept(request, exchange.hot_capacity)
        num_before = request.num_retractions
        self._requests.replace_device_slots(exchange, first_kept)
        self.outcome.num_retractions += request.num_retractions - num_before
        request.row_counters = SwapCounts()
        self._num_hot[request] = min(self._num_hot.get(request, request.num_kv_tokens), exchange.hot_capacity)

    def _begin_fill(self, fill: Fill) -> None:
        self._requests.begin_fill(fill)
        self._unfilled[fill.request] = fill.num_page_slots * float(self._node.position_bytes)

    def _admit(self, admission: Admission) -> None:
        request, node = admission.request, self._node
        self._requests.reserve(admission, "run of the prefill node", float("inf"))
        self.outcome.num_by_mode[request.mode] += 1
        num_landing = request.num_prompt_tokens - request.held_prefix_tokens
        self.outcome.num_landed_tokens += num_landing
        if not request.needs_prefill_node:
            self._landed_at[request] = self._now
            return
        secs = num_landing * node.position_bytes / node.lane_rate
        self._lane_free_at = max(self._lane_free_at, self._now) + secs
        self._landed_at[request] = self._lane_free_at

    def _fill_row(self, request: Request, num_positions: int) -> None:
        """Keep a request from steps until that many positions are in its hot buffer."""
        request.is_filling, self._num_hot[request] = True, num_positions
        secs = num_positions * self._node.position_bytes / self._node.link_rate
        self._filled_at[request] = self._now + secs

    def _go_on(self) -> None:
        """Start the requests that have landed, and let those go on whose rows and pages are filled."""
        for request in [r for r, at in self._landed_at.items() if at <= self._now]:
            del self._landed_at[request]
            self._requests.start(request)
            if request.hot_capacity:
                whole = request.num_prompt_tokens < request.hot_capacity
                self._fill_row(request, request.num_prompt_tokens if whole else self._node.index_topk)
            elif request.is_resident:
                self._fill_row(request, request.num_prompt_tokens)
        for request in [r for r, at in self._filled_at.items() if at <= self._now]:
            del self._filled_at[request]
            request.is_filling = False
        for request in [r for r, num_bytes in self._unfilled.items() if num_bytes <= 0]:
            del self._unfilled[request]
            if request.has_next_step:
                del self._num_hot[request]
                self._requests.end_fill(request)
                self._skipping.add(request)

    def _step(self, batch: Sequence[Request]) -> None:
        node, num_missed, num_hot = self._node, 0.0, 0
        for request in batch:
            if request.hot_capacity:
                share = node.miss_share(self._num_hot[request], request.next_seq_len)
                missed = round(node.index_topk * share)
                self._num_hot[request] = min(request.hot_capacity, self._num_hot[request] + missed + 1)
                request.row_counters = request.row_counters.plus(SwapCounts(node.index_topk - missed, missed))
                num_missed += missed
                num_hot += 1
        miss_secs = num_missed * node.position_bytes / node.link_rate
        secs = node.fixed_secs + node.request_secs * len(batch) + node.hot_secs * num_hot + miss_secs
        self._now += secs
        self._num_steps += 1
        self._fill_pages((secs - miss_secs) / secs, secs)
        for request in batch:
            request.output_token_ids.append(0)
            self.outcome.num_tokens += 1
            if request.shares_from is not None and len(request.output_token_ids) >= request.shares_from:
                min_own = self._limits.in_pages(self._limits.min_capacity(request))
                self._requests.share_resident(request, min_own)
            if not request.has_next_step:
                self._end(request)
        self._step_times.note_turn(len(batch), 0, self._now)
        if self._num_steps % STEPS_BETWEEN_ESTIMATES == 0:
            step_secs = self._step_times.step_secs(len(batch))
            self._plans.miss_cost = self._costs.estimate(batch, step_secs)

    def _fill_pages(self, free_share: float, secs: float) -> None:
        """Fill the pages of the first request that has some to fill, with what misses leave of the link."""
        for request in self._unfilled:
            most = min(self._node.slice_bytes, secs * self._node.link_rate)
            self._unfilled[request] -= most * free_share
            return

    def _end(self, request: Request) -> None:
        self._unfilled.pop(request, None)
        self._num_hot.pop(request, None)
        self._requests.start_ending(request, is_sound=True)
        self._requests.release(request, self._now)
        turn, ask_again = self._turns.pop(request), self._begin_conversation
        if turn < self._load.num_turns:
            new_ids = [self._num_conversations] * self._load.turn_tokens
            ask_again = partial(self._arrive, request.all_token_ids + pack_token_ids(new_ids), turn + 1)
        insort(self._pausing, (self._now + self._load.pause_secs, ask_again), key=itemgetter(0))


def modes(node: Node, load: Load) -> dict[str, Any]:
    """Return the tokens a second of each mode, and what ``auto`` has of the better one of dense and of
    hisparse with a bound."""

    def outcome(flag: HisparseFlag, *, is_bounded: bool = False) -> Outcome:
        return Simulation(node, load, flag, is_bounded=is_bounded).run()

    dense, auto = outcome(HisparseFlag.FALSE), outcome(HisparseFlag.AUTO)
    bounded, unbounded = (outcome(HisparseFlag.TRUE, is_bounded=is_bounded) for is_bounded in (True, False))
    return {
        "clients": load.num_clients,
        "dense": dense.tokens_per_sec,
        "hisparse_bounded": bounded.tokens_per_sec,
        "hisparse": unbounded.tokens_per_sec,
        "auto": auto.tokens_per_sec,
        "auto_of_best": auto.tokens_per_sec / max(dense.tokens_per_sec, bounded.tokens_per_sec),
        "admitted_dense": auto.num_by_mode[Mode.DENSE],
        "admitted_hisparse": auto.num_by_mode[Mode.HISPARSE],
        "retractions": auto.num_retractions,
        "exchanges": auto.num_exchanges,
        "landed_tokens": auto.num_landed_tokens,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 16, 20, 24, 32, 64])
    parser.add_argument(
        "--input-tokens", type=int, nargs="+", default=[32768], help="lengths that prompts have by turns"
    )
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=1, help="prompts of each conversation")
    parser.add_argument("--turn-tokens", type=int, default=700, help="new tokens of each later prompt")
    parser.add_argument(
        "--pause-ms", type=float, default=0.0, help="time between an answer and its client's next request"
    )
    parser.add_argument(
        "--ramp-ms", type=float, default=0.0, help="time between the first requests of two clients"
    )
    parser.add_argument(
        "--dense-first", type=int, default=0, help="first requests that are dense in all modes, and then held"
    )
    parser.add_argument(
        "--held", type=int, default=0, help="prompts that come by turns, and that are held; 0: all are new"
    )
    parser.add_argument("--num-requests", type=int, help="default: six for each client, and 24 at least")
    parser.add_argument("--device-tokens", type=int, default=540672, help="size of the device pool")
    parser.add_argument("--host-tokens", type=int, default=2386944, help="size of the host pool")
    parser.add_argument("--max-running-requests", type=int, default=72)
    parser.add_argument(
        "--position-bytes", type=int, default=5 * 656, help="bytes of a token's KV in all layers"
    )
    parser.add_argument(
        "--fixed-ms", type=float, default=1.08, help="a step's time for any number of requests"
    )
    parser.add_argument("--request-ms", type=float, default=0.036, help="what each request adds to it")
    parser.add_argument("--hot-ms", type=float, default=0.0045, help="what each hot buffer adds to that")
    parser.add_argument(
        "--hit-share", type=float, default=0.65, help=f"hits of {FULL_SIZE} entries in {HIT_CONTEXT} tokens"
    )
    parser.add_argument("--out", type=Path, default=OUT / "modes")
    options = parser.parse_args(arguments)
    node = Node(
        device_tokens=options.device_tokens,
        host_tokens=options.host_tokens,
        max_requests=options.max_running_requests,
        position_bytes=options.position_bytes,
        fixed_secs=options.fixed_ms / 1e3,
        request_secs=options.request_ms / 1e3,
        hot_secs=options.hot_ms / 1e3,
        hit_share=options.hit_share,
    )
    rows = []
    for num_clients in options.clients:
        num_requests = options.num_requests or max(6 * num_clients, 24)
        load = Load(
            num_clients,
            options.input_tokens,
            options.output_tokens,
            num_requests,
            options.turns,
            options.turn_tokens,
            options.pause_ms / 1e3,
            options.dense_first,
            options.ramp_ms / 1e3,
            options.held,
        )
        rows.append(modes(node, load))
        write_report(options.out, {"options": vars(options), "rows": rows})
    make_console().print(table_of("tokens a second", rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
