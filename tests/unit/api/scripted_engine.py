"""An engine that speaks the real messages over the real socket and does what a script tells it.

Stands in for the model only: fronts under test are the product's own. Imports nothing heavy, so it starts
quickly in a process of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from hisparse_pd.base.vocabulary import FinishReason, Mode, TokenLogprob
from hisparse_pd.engine.messages import (
    Abort,
    CachedTokens,
    EngineReady,
    EngineStats,
    FlushCache,
    Flushed,
    FromEngine,
    Generate,
    GenerateGroup,
    RequestStats,
    Shutdown,
    ToEngine,
    Tokens,
)
from hisparse_pd.engine.sockets import EngineSocket
from hisparse_pd.protocol.messages import Geometry

CONTEXT_LENGTH = 256
POOL_HISPARSE = 200
POOL_DENSE = 100

Script = Callable[[Generate], Iterable[FromEngine | float]]
"""What the engine does with a request: messages to send, or seconds to wait."""


def ready() -> EngineReady:
    geometry = Geometry("tiny", "float32", 4, 4, 1152, 132, 64, 64)
    return EngineReady(
        context_length=CONTEXT_LENGTH,
        max_total_tokens_hisparse=POOL_HISPARSE,
        max_total_tokens_dense=POOL_DENSE,
        control_endpoint="0.0.0.0:4711",
        instance_id="instance-1",
        geometry=msgspec.msgpack.encode(geometry),
        transfer_protocol="rdma",
        transfer_devices=("mlx5_0", "mlx5_1"),
        transfer_reason="RDMA devices usable",
        numa_node=1,
        numa_placement="node 1, that of cuda:5",
    )


def stats(step: int = 0, num_running: int = 0, num_waiting: int = 1, **counters: float) -> EngineStats:
    return EngineStats(
        gauges={"num_running_reqs": float(num_running), 'pool_used_tokens{pool="host"}': 42.0},
        counters={'requests_total{mode="dense"}': 3.0, "kv_transfer_bytes_total": 7.0, **counters},
        num_running=num_running,
        num_waiting=num_waiting,
        num_used_tokens=17,
        step=step,
    )


def say(
    text: str, *, mode: Mode = Mode.DENSE, per_message: int = 1, delay_secs: float = 0.0
) -> Callable[[Generate], Iterable[FromEngine | float]]:
    """A decode engine that says ``text`` byte by byte and ends for length at max_new_tokens."""

    def script(generate: Generate) -> Iterable[FromEngine | float]:
        token_ids = list(text.encode())[: generate.sampling.max_new_tokens]
        num_top = generate.sampling.num_logprobs
        for start in range(0, len(token_ids), per_message):
            chunk = tuple(token_ids[start : start + per_message])
            is_last = start + per_message >= len(token_ids)
            logprobs = (
                tuple(TokenLogprob(i, -0.5, tuple((i + k, -0.5 - k) for k in range(num_top))) for i in chunk)
                if num_top is not None
                else ()
            )
            if delay_secs:
                yield delay_secs
            yield Tokens(
                generate.request_id,
                chunk,
                logprobs,
                FinishReason.LENGTH if is_last else None,
                stats=RequestStats(mode, cached=CachedTokens(host=2), num_held_tokens=1, hits=10, misses=4),
            )

    return script


def plays(*messages: Any) -> Script:
    """An engine that sends these messages about each sample, and waits for the seconds between them."""

    def script(generate: Generate) -> Iterable[FromEngine | float]:
        for message in messages:
            is_wait = isinstance(message, float)
            yield message if is_wait else msgspec.structs.replace(message, request_id=generate.request_id)

    return script


def stops_after(text: str, per_message: int = 3) -> Script:
    """A decode engine that says ``text`` byte by byte and then stops."""
    said = text.encode()
    parts = [tuple(said[start : start + per_message]) for start in range(0, len(said), per_message)]
    return plays(
        *(Tokens("", part) for part in parts[:-1]), Tokens("", parts[-1], finish_reason=FinishReason.STOP)
    )


class ScriptedEngine(threading.Thread):
    """Runs beside the test; ``received`` is everything that the front sent."""

    def __init__(
        self, endpoints: Sequence[str], script: Script, *, num_running: int = 0, is_ready: bool = True
    ) -> None:
        super().__init__(daemon=True)
        self._endpoints = endpoints
        self._script = script
        self.num_running = num_running
        self.num_waiting = 1
        self.step = 0
        self.is_ready = is_ready
        self.is_silent = False
        self.received: list[ToEngine] = []
        self._aborted: set[str] = set()
        self._stopped = threading.Event()
        self._scripts: list[tuple[str, Any, float]] = []

    def run(self) -> None:
        serve_script(self._endpoints, self)

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)

    @property
    def generates(self) -> list[Generate]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def groups(self) -> list[GenerateGroup]:
        return [message for message in self.received if isinstance(message, GenerateGroup)]

    @property
    def aborts(self) -> list[str]:
        return [message.request_id for message in self.received if isinstance(message, Abort)]

    def turn(self, socket: EngineSocket) -> bool:
        """Do one iteration. Returns False at the end."""
        for message in socket.receive():
            self.received.append(message)
            match message:
                case GenerateGroup():
                    self._scripts += [
                        (sample.request_id, iter(self._script(sample)), 0.0) for sample in message.samples
                    ]
                case Abort():
                    self._scripts = [entry for entry in self._scripts if entry[0] != message.request_id]
                case FlushCache():
                    socket.send(Flushed(message.request_id))
                case Shutdown():
                    return False
        left = []
        for request_id, script, wait_until in self._scripts:
            if time.monotonic() < wait_until:
                left.append((request_id, script, wait_until))
                continue
            match next(script, None):
                case None:
                    continue
                case float() as secs:
                    left.append((request_id, script, time.monotonic() + secs))
                case event:
                    socket.send(event)
                    left.append((request_id, script, 0.0))
        self._scripts = left
        return not self._stopped.is_set()


def serve_script(endpoints: Sequence[str], engine: ScriptedEngine) -> None:
    socket = EngineSocket(endpoints)
    try:
        next_stats_at = 0.0
        is_announced = False
        while engine.turn(socket):
            if engine.is_ready and not is_announced:
                socket.send(ready())
                is_announced = True
            if is_announced and not engine.is_silent and time.monotonic() > next_stats_at:
                socket.send(stats(engine.step, engine.num_running, engine.num_waiting))
                next_stats_at = time.monotonic() + 0.05
            time.sleep(0.001)
    finally:
        socket.close()
