"""What it costs those that run when others join and end: times between tokens on a decode node's own steps.

    python -m tools.bench.turnover --model-path DIR [--running 64] [--context 32768] [--every 8] [--out STEM]

The scheduler, the moves of requests and the line of steps run as in an engine; fronts, prefill nodes and
the transport are left out. Half of the requests run from the first step to the last, and the times between
their tokens are what is measured: first while nobody else comes or goes, then while one of the others ends in
every ``--every``-th step and the next one joins. KV is that of one prompt of random tokens, everywhere in the
pools, so a request that joins is there at once, with an aux record and the hint in it.

Turns are those of the engine's loop: with an end in them, with a join, those right behind a join, and others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decode_node.live_requests import LiveRequests
from decode_node.memory import DecodeMemory
from decode_node.metrics import Metrics
from decode_node.next_plan import NextPlan
from decode_node.prefill_peers import PrefillPeers, RoomMessage
from decode_node.request import PeerAddress
from decode_node.request_life import RequestLife
from decode_node.runner import make_runner
from decode_node.scrub import Scrubber
from decode_node.sizing import make_limits, max_hot_capacity
from decode_node.step_line import StepLine
from hisparse_pd.bench.facts import OUT
from hisparse_pd.bench.report import make_console, write_json
from hisparse_pd.engine.lockstep import Lockstep
from hisparse_pd.engine.messages import FromEngine, Generate, Tokens
from hisparse_pd.memory.device import use_device
from hisparse_pd.model.dsa import DsaModel
from hisparse_pd.model.loader import load_model
from hisparse_pd.model.spec import ModelSpec
from hisparse_pd.paging.pools import Pools, round_up
from hisparse_pd.settings import DecodeSettings, HisparsePolicy
from hisparse_pd.vocabulary import HisparseFlag, Mode, SamplingParams
from protocol.messages import Bootstrap, RoomDone
from tools.bench.decode_step import (
    PAGE_SIZE,
    Prefilled,
    add_shared_options,
    load_shared_spec,
    make_hot_buffers,
    prefill,
    shared_report,
    shared_settings,
    synchronize,
)

PEER = PeerAddress("prefill", 1)
INSTANCE = "run"
TURNS_AFTER = 6
"""Turns behind a join that are counted as such."""


class Peers(PrefillPeers):
    """One prefill node, without a socket, that has delivered a room as soon as it hears of it."""

    def __init__(self, spec: ModelSpec, memory: DecodeMemory, prompt: Prefilled) -> None:
        self._vocab_size = spec.vocab_size
        self._memory = memory
        self._hint = prompt.hints.numpy()
        self.delivered: list[RoomMessage] = []

    def address_for(self, host: str, port: int, room: int) -> PeerAddress:
        return PEER

    def use(self, address: PeerAddress, now: float) -> None:
        pass

    def may_entrust(self, address: PeerAddress) -> bool:
        return True

    def page_size(self, address: PeerAddress) -> int:
        return PAGE_SIZE

    def instance_id(self, address: PeerAddress) -> str:
        return INSTANCE

    def send(self, address: PeerAddress, message: object) -> bool:
        if isinstance(message, Bootstrap):
            record = self._memory.aux[message.aux_slot].numpy()
            first_token = message.room % self._vocab_size
            self._memory.aux_layout.pack_into(record, message.room, first_token, None, self._hint)
            done = RoomDone(message.room, 0, 0, 0.0)
            self.delivered.append(RoomMessage(PEER, INSTANCE, done))
        return True


class Node:
    """A decode node whose loop is turned here, and when what came of it."""

    def __init__(
        self, spec: ModelSpec, model: DsaModel, settings: DecodeSettings, prompt: Prefilled, mode: Mode
    ) -> None:
        self.context = prompt.kv.shape[1]
        self.mode = mode
        limits = make_limits(settings, spec, settings.device_pool_tokens)
        self.requests = LiveRequests(Pools(limits.totals, PAGE_SIZE), settings.quarantine_secs)
        self.memory = DecodeMemory(spec, self.requests.pools.totals, PAGE_SIZE, model.device)
        _fill(self.memory.k_host, prompt.kv_host)
        _fill(self.memory.index, prompt.index)
        if mode is Mode.DENSE:
            _fill(self.memory.k_dev, prompt.kv)
        self.hot_buffers = make_hot_buffers(
            spec, settings, self.memory, self.requests.pools, max_hot_capacity(settings, spec)
        )
        self.peers = Peers(spec, self.memory, prompt)
        self.token_times: dict[str, list[float]] = defaultdict(list)
        self.lifecycle = RequestLife(
            limits=limits,
            policy=HisparsePolicy.ALWAYS,
            room_timeout_secs=1e9,
            requests=self.requests,
            hot_buffers=self.hot_buffers,
            peers=self.peers,
            metrics=Metrics(),
            send=self._note,
        )
        self.steps = StepLine(
            make_runner(settings, model, self.hot_buffers),
            Lockstep(None),
            self.requests,
            self.hot_buffers,
            self.lifecycle,
            most_drafts=settings.speculative_num_steps,
            scrubber=Scrubber(self.hot_buffers, self.requests.held, self.lifecycle.held_row_is_wrong),
        )
        self._next_plan = NextPlan(limits, self.requests)
        self.num_ended = 0
        self._num_arrived = 0

    def _note(self, message: FromEngine) -> None:
        if not isinstance(message, Tokens):
            raise RuntimeError(f"a request failed: {message}")
        now = time.perf_counter()
        self.token_times[message.request_id] += [now] * len(message.token_ids)
        self.num_ended += message.finish_reason is not None

    def arrive(self, num_new: int) -> str:
        """A request of so many tokens; it joins in one of the next turns."""
        self._num_arrived += 1
        request_id = str(self._num_arrived)
        sampling = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
        flag = HisparseFlag.TRUE if self.mode is Mode.HISPARSE else HisparseFlag.FALSE
        message = Generate(request_id, self._num_arrived, self.context, sampling, *PEER.node, flag)
        self.lifecycle.generate(message, bytes(16), time.monotonic())
        return request_id

    def turn(self) -> bool:
        """As the engine's; whether somebody joined."""
        now = time.monotonic()
        delivered, self.peers.delivered = self.peers.delivered, []
        for event in delivered:
            self.lifecycle.peer_event(event, now)
        self.lifecycle.expire(now)
        self.lifecycle.refresh_queue(now)
        if not self.steps.may_follow():
            self.steps.settle()
        plan = self._next_plan.make(now)
        if plan.exchanges and self.steps.in_flight is not None:
            self.steps.settle()
            plan = self._next_plan.make(now)
        self.lifecycle.carry_out(plan, now)
        self.steps.take(is_stopping=False)
        return bool(delivered)

    def close(self) -> None:
        self.steps.settle()
        synchronize(self.hot_buffers.device)
        self.memory.close()


def _fill(pool: torch.Tensor, values: torch.Tensor) -> None:
    """[num_layers, num_slots, bytes] with ``values`` over and over."""
    num_slots, length = pool.shape[1], values.shape[1]
    for start in range(0, num_slots, length):
        pool[:, start : start + length] = values[:, : min(length, num_slots - start)]


def measure(node: Node, num_running: int, every: int, num_turns: int) -> dict[str, Any]:
    """Steps of a batch in which nobody comes or goes, and then of one in which somebody always does."""
    half = num_running // 2
    staying = [node.arrive(8 * num_turns) for _ in range(num_running - half)]
    first = 4 * num_turns  # the first end comes behind the steps of which none ends
    leaving = [node.arrive(first + every * (number + 1)) for number in range(half)]
    while not all(len(node.token_times[each]) > 4 for each in (*staying, *leaving)):
        node.turn()
    rows: list[dict[str, Any]] = []
    rows.append(_part(node, "nobody", staying, num_turns, 0))
    while not node.num_ended:
        node.turn()
    node.arrive(every * half)
    for _ in range(every * half):  # of each kind of turn some, for what is compiled or allocated once
        _turn(node, every * half)
    rows.append(_part(node, f"one every {every} steps", staying, num_turns, every * half))
    return {"batch": num_running, "mode": str(node.mode), "rows": rows}


def _turn(node: Node, life: int) -> tuple[bool, bool]:
    """Whether somebody has ended in it, and whether somebody has joined. For whom ends, another comes."""
    num_ended = node.num_ended
    has_joined = node.turn()
    for _ in range(node.num_ended - num_ended):
        if life:
            node.arrive(life)
    return node.num_ended > num_ended, has_joined


def _part(node: Node, name: str, staying: Sequence[str], num_turns: int, life: int) -> dict[str, Any]:
    before = {each: len(node.token_times[each]) for each in staying}
    turns: dict[str, list[float]] = defaultdict(list)
    since_join = TURNS_AFTER + 1
    for _ in range(num_turns):
        started = time.perf_counter()
        has_ended, has_joined = _turn(node, life)
        since_join = 0 if has_joined else since_join + 1
        if has_ended:
            kind = "end"
        elif has_joined:
            kind = "join"
        else:
            kind = f"{since_join} after a join" if since_join <= TURNS_AFTER else "others"
        turns[kind].append(1e3 * (time.perf_counter() - started))
    gaps = np.concatenate([1e3 * np.diff(node.token_times[each][before[each] :]) for each in staying])
    return {
        "turnover": name,
        "num_tokens": len(gaps),
        "itl_ms": {
            "p50": float(np.percentile(gaps, 50)),
            "p99": float(np.percentile(gaps, 99)),
            "max": float(gaps.max()),
            "mean": float(gaps.mean()),
        },
        "turns_ms": {
            kind: {"num": len(of), "median": float(np.median(of)), "max": max(of)}
            for kind, of in sorted(turns.items())
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_shared_options(parser)
    parser.set_defaults(modes=["hisparse"])
    parser.add_argument("--running", type=int, default=64, help="requests that run at a time")
    parser.add_argument("--every", type=int, default=8, help="steps between two ends")
    parser.add_argument("--turns", type=int, default=400, help="of each part")
    parser.add_argument("--speculative-num-steps", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT / "turnover", help="JSON, without suffix")
    arguments = parser.parse_args(argv)
    use_device(arguments.device)
    spec = load_shared_spec(arguments, arguments.speculative_num_steps)
    model = load_model(arguments.model_path, spec, arguments.device)
    settings = [make_settings(arguments, Mode(mode)) for mode in arguments.modes]
    prompt = prefill(spec, model, settings[0], arguments.chunk, arguments.context)
    console = make_console()
    report: dict[str, Any] = {
        **shared_report(arguments, spec),
        "every": arguments.every,
        "num_drafts": arguments.speculative_num_steps,
        "results": [],
    }
    for mode, of_mode in zip(arguments.modes, settings, strict=True):
        node = Node(spec, model, of_mode, prompt, Mode(mode))
        try:
            result = measure(node, arguments.running, arguments.every, arguments.turns)
        finally:
            node.close()
        report["results"].append(result)
        for row in result["rows"]:
            itl = ", ".join(f"{name} {value:.3f}" for name, value in row["itl_ms"].items())
            console.print(f"{mode} {arguments.running}, {row['turnover']}: ms between tokens {itl}")
            for kind, of in row["turns_ms"].items():
                console.print(f"    {kind}: {of['num']} turns, {of['median']:.3f} ms, max {of['max']:.3f}")
    write_json(arguments.out.with_suffix(".json"), report)
    return 0


def make_settings(arguments: argparse.Namespace, mode: Mode) -> DecodeSettings:
    """With pools for one request more than run."""
    num_new = 1 + arguments.speculative_num_steps
    life = round_up(arguments.context + 8 * arguments.turns * num_new + num_new, PAGE_SIZE)
    num_tokens = (arguments.running + 1) * life
    device_each = life if mode is Mode.DENSE else round_up(arguments.buffer, PAGE_SIZE)
    return DecodeSettings(
        **shared_settings(arguments),
        max_running_requests=arguments.running + 1,
        host_pool_tokens=num_tokens if mode is Mode.HISPARSE else PAGE_SIZE,
        device_pool_tokens=(arguments.running + 1) * device_each,
        index_pool_tokens=num_tokens,
        speculative_num_steps=arguments.speculative_num_steps,
        disable_held_prefixes=True,
    )


if __name__ == "__main__":
    sys.exit(main())
