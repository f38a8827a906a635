"""A decode engine without its process, and a prefill node that its tests control.

The prefill node is real where it meets the decode node: HTTP discovery, control socket, Mooncake writes, KV
of the real model. The test decides what it does with a room.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import zmq

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import HisparseFlag, SamplingParams, TokenLogprob
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import ModelSpec, load_spec
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, page_keys
from hisparse_pd.decode_node import sizing
from hisparse_pd.decode_node.engine import DecodeEngine
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine.messages import (
    Abort,
    EngineLoading,
    EngineStats,
    FlushCache,
    Flushed,
    FromEngine,
    Generate,
    GenerateGroup,
    PromptScores,
    RequestFailed,
    RequestStats,
    ToEngine,
    Tokens,
    pack_token_ids,
    unpack_token_ids,
)
from hisparse_pd.engine.sockets import EngineSocket
from hisparse_pd.protocol.messages import (
    ROW_CHECK_BYTES,
    AbortRoom,
    Bootstrap,
    PrefillTimes,
    Region,
    RegionKind,
    Register,
    RoomDone,
    RoomQuiet,
    ToDecode,
)
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.transfer.aux_record import AuxLayout
from hisparse_pd.transfer.transport import TCP
from tests.unit.decode_node.oracle import Expected
from tests.unit.decode_node.peers_support import PrefillNode
from tests.unit.kept_engines import kept_engine, kept_engines
from tests.unit.kernels.table_rules import check_consistency
from tests.unit.prefilled import Pools, prefilled
from tests.waiting import NEVER_SECS, WAIT_SECS

Prompt = tuple[int, ...]
TIMES = PrefillTimes(0.25, 0.5, 0.125)
"""Times that the double reports."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    spec: ModelSpec
    model: DsaModel


@lru_cache
def load_checkpoint(path: Path, num_draft_layers: int = 0) -> Checkpoint:
    spec = load_spec(path, num_draft_layers=num_draft_layers)
    return Checkpoint(path, spec, load_model(path, spec))


def random_prompt(seed: int, num_tokens: int) -> Prompt:
    return tuple(np.random.default_rng(seed).integers(32, 127, num_tokens).tolist())


def raising(error: Exception) -> Callable[..., Any]:
    """Return a function that raises ``error``, to stand in for what fails."""

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    return broken


@lru_cache
def _prefill_model(path: Path, num_draft_layers: int) -> DsaModel:
    """Load a model for prefill alone: a test may break the engine's before the first prompt is computed."""
    return load_model(path, load_checkpoint(path, num_draft_layers).spec)


@lru_cache(maxsize=256)
def _prefill(path: Path, num_draft_layers: int, prompt: Prompt) -> Pools:
    spec = load_checkpoint(path, num_draft_layers).spec
    return prefilled(spec, _prefill_model(path, num_draft_layers), prompt)


def computed(checkpoint: Checkpoint, prompt: Prompt) -> Pools:
    """Return what a prefill node has of ``prompt``, whatever its page size."""
    return _prefill(checkpoint.path, checkpoint.spec.num_draft_layers, prompt)


class PrefillDouble(PrefillNode):
    """A prefill node with the KV of the real model, whose behaviour the test decides."""

    def __init__(self, checkpoint: Checkpoint, page_size: int = 64) -> None:
        super().__init__(run=uuid.uuid4().hex, geometry=checkpoint.spec.geometry(page_size))
        self.checkpoint = checkpoint
        self.page_size = page_size
        self.bootstraps: list[Bootstrap] = []
        self.aborts: list[AbortRoom] = []
        self.delivers = True
        """Whether to deliver a room as soon as its Bootstrap is here."""
        self.answers_aborts = True
        self._layout = AuxLayout(checkpoint.spec.num_index_groups, checkpoint.spec.index_topk)
        self._transfer = kept_engine("127.0.0.1")

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def instance_id(self) -> str:
        return f"{self.run}-0"

    def close(self) -> None:
        super().close()
        self._transfer.close()

    def note_registration(self, register: Register) -> None:
        self._transfer.renew(register.session, register.instance_id)

    def take(self, identity: bytes, message: Bootstrap | AbortRoom) -> None:
        match message:
            case Bootstrap():
                self.bootstraps.append(message)
                if self.delivers:
                    self.deliver(message)
            case AbortRoom(room):
                self.aborts.append(message)
                if self.answers_aborts:
                    self.controls[0].send(identity, RoomQuiet(room, False))

    def say(self, message: ToDecode) -> None:
        """Send to every registered decode node."""
        for identity in self.registered:
            self.controls[0].send(identity, message)

    def write(self, bootstrap: Bootstrap) -> None:
        """Write the room's KV, indexer keys and aux record to the decode node that asked last."""
        register = list(self.registered.values())[-1]
        regions = {region.kind: region for region in register.regions}
        spec = self.checkpoint.spec
        prompt = tuple(unpack_token_ids(bootstrap.prompt).tolist())
        ready = computed(self.checkpoint, prompt)
        kv_region = regions[RegionKind.KV_HOST if bootstrap.hisparse else RegionKind.KV_DEVICE]
        first = bootstrap.num_held_tokens
        parts = [
            (ready.kv, spec.item_bytes, kv_region, bootstrap.kv_extents),
            (ready.index, spec.index_item_bytes, regions[RegionKind.INDEX], bootstrap.index_extents),
        ]
        if (checks := regions.get(RegionKind.ROW_CHECKS)) is not None:
            parts.append((ready.row_checks, ROW_CHECK_BYTES, checks, bootstrap.index_extents))
        for source, item_bytes, region, extents in parts:
            self._write_pool(register.session, source[:, first:].contiguous(), item_bytes, region, extents)
        record = torch.zeros(self._layout.slot_bytes, dtype=torch.uint8)
        self._layout.pack_into(record.numpy(), bootstrap.room, ready.hint.numpy())
        aux = regions[RegionKind.AUX]
        dst_addr = aux.base_addr + bootstrap.aux_slot * self._layout.slot_bytes
        self._send(register.session, record, [record.data_ptr()], [dst_addr], [record.nbytes])

    def deliver(self, bootstrap: Bootstrap) -> None:
        self.write(bootstrap)
        self.say(RoomDone(bootstrap.room, 1000, 0, 0.001, TIMES))

    def _write_pool(
        self, session: str, source: torch.Tensor, item_bytes: int, region: Region, extents: tuple[Any, ...]
    ) -> None:
        if not extents:
            return  # all of it is held
        src_addrs, dst_addrs, lengths = [], [], []
        num_layers = source.shape[0]
        position = 0
        for extent in extents:
            for layer in range(num_layers):
                src_addrs.append(source[layer, position:].data_ptr())
                dst_addrs.append(region.base_addr + (layer * region.num_slots + extent.start) * item_bytes)
                lengths.append(extent.length * item_bytes)
            position += extent.length
        self._send(session, source, src_addrs, dst_addrs, lengths)

    def _send(
        self, session: str, source: torch.Tensor, src: list[int], dst: list[int], lengths: list[int]
    ) -> None:
        addr = self._transfer.register(source)
        try:
            self._transfer.write(session, (src, dst, lengths))
        finally:
            self._transfer.unregister(addr)


@dataclass
class Answer:
    """What the front got for one request."""

    prompt: Prompt = ()
    num_new_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Tokens | None = None
    failure: RequestFailed | None = None
    phases: list[str] = field(default_factory=list)
    prefill: list[PrefillTimes] = field(default_factory=list)
    scores: list[PromptScores] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.last is not None or self.failure is not None

    @property
    def stats(self) -> RequestStats:
        """Statistics of an answer that has ended well."""
        assert self.last is not None
        assert self.last.stats is not None
        return self.last.stats


class EngineHarness:
    """A decode engine whose loop the test turns, the front's end of its ipc channel, and a prefill node."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ipc_dir: Path,
        *,
        growth_pages: int = sizing.GROWTH_PAGES,
        health_timeout_secs: float = 30.0,
        placement: Placement = ANYWHERE,
        **settings: Any,
    ) -> None:
        path = ipc_dir / "engine.ipc"
        self.front: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.front.setsockopt(zmq.SNDHWM, 0)  # a flood is sent before the engine, in the same thread, reads
        self.front.setsockopt(zmq.LINGER, 0)
        self.front.bind(f"ipc://{path}")
        self._engine_socket = EngineSocket([f"ipc://{path}"])
        self.settings = DecodeSettings(
            model_path=checkpoint.path,
            **{
                "debug_checks": True,
                "heartbeat_interval_secs": 0.1,
                "host_pool_tokens": 8192,
                "device_pool_tokens": 4096,
                "device_buffer_size": 128,
                "max_running_requests": 16,
                "disable_prefix_cache": True,
                **settings,
            },
        )
        with (
            kept_engines(),
            patch.object(sizing, "GROWTH_PAGES", growth_pages),
            patch("hisparse_pd.base.node_settings.HEALTH_TIMEOUT_SECS", health_timeout_secs),
            patch("hisparse_pd.base.node_settings.MAX_HEARTBEAT_FAILURES", 600),  # a minute
        ):
            self.engine = DecodeEngine(
                self.settings, checkpoint.spec, checkpoint.model, self._engine_socket, TCP, placement
            )
        self.engine.queue_moves.contact_timeout_secs = NEVER_SECS
        self.double = PrefillDouble(checkpoint, self.settings.page_size)
        self.answers: dict[str, Answer] = {}
        self.stats: EngineStats | None = None
        self._num_requests = 0

    def close(self) -> None:
        self.engine.close()
        self._engine_socket.close()
        self.front.close()
        self.double.close()

    def send(self, message: ToEngine) -> None:
        self.front.send(engine_messages.encoder.encode(message))

    def generate(
        self,
        prompt: Prompt,
        num_new_tokens: int,
        hisparse: HisparseFlag | None = None,
        *,
        double: PrefillDouble | None = None,
        is_speculative: bool = True,
        room: int | None = None,
        root: PageKey = NO_ISOLATION,
        scores: WantedScores | None = None,
        **sampling: Any,
    ) -> Answer:
        """Ask for one answer, with KV of the prefill node ``double`` if it is given."""
        double = double or self.double
        self._num_requests += 1
        room = 1000 + self._num_requests if room is None else room
        request_id = f"request-{self._num_requests}"
        params = {"temperature": 0.0, "ignore_eos": True, **sampling}
        self.answers[request_id] = answer = Answer(prompt, num_new_tokens)
        self.send(
            GenerateGroup(
                (
                    Generate(
                        request_id=request_id,
                        room=room,
                        num_prompt_tokens=len(prompt),
                        sampling=SamplingParams(max_new_tokens=num_new_tokens, **params),
                        bootstrap_host="127.0.0.1",
                        bootstrap_port=double.port,
                        hisparse=hisparse,
                        is_speculative=is_speculative,
                        scores=scores,
                    ),
                ),
                root,
                pack_token_ids(prompt),
                tuple(page_keys(root, pack_token_ids(prompt), self.settings.page_size)),
            )
        )
        return answer

    def generate_samples(
        self, prompt: Prompt, num_new_tokens: int, num_samples: int, hisparse: HisparseFlag
    ) -> list[Answer]:
        """Ask for several samples of one prompt."""
        answers = [Answer(prompt, num_new_tokens) for _ in range(num_samples)]
        samples = []
        for answer in answers:
            self._num_requests += 1
            request_id = f"request-{self._num_requests}"
            self.answers[request_id] = answer
            samples.append(
                Generate(
                    request_id=request_id,
                    room=1000 + self._num_requests,
                    num_prompt_tokens=len(prompt),
                    sampling=SamplingParams(max_new_tokens=num_new_tokens, temperature=0.0, ignore_eos=True),
                    bootstrap_host="127.0.0.1",
                    bootstrap_port=self.double.port,
                    hisparse=hisparse,
                )
            )
        packed = pack_token_ids(prompt)
        keys = page_keys(NO_ISOLATION, packed, self.settings.page_size)
        self.send(GenerateGroup(tuple(samples), NO_ISOLATION, packed, tuple(keys)))
        return answers

    def leave(self, answer: Answer) -> None:
        """Abort the request of ``answer``, as if its client were gone."""
        (request_id,) = (each for each, given in self.answers.items() if given is answer)
        self.send(Abort(request_id))

    def turn(self, *others: PrefillDouble) -> None:
        """Turn the loop once. ``others``: prefill nodes that get a turn beside its own."""
        for double in (self.double, *others):
            double.answer()
        self.engine.turn(max_wait_secs=0.005)
        check_consistency(self.engine.tables.state)
        while self.front.poll(0):
            self._take(engine_messages.from_engine_decoder.decode(self.front.recv()))

    def turn_until(self, condition: Callable[[], object], *others: PrefillDouble) -> None:
        deadline = time.monotonic() + WAIT_SECS
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            self.turn(*others)

    def flush(self) -> None:
        """Have the engine let go of the prefixes that it holds."""
        self.send(FlushCache("00"))
        self.turn_until(lambda: not self.engine.requests.held)

    def come_to_rest(self) -> None:
        """Turn until no request is live, and check that all pools are whole without held prefixes."""
        self.turn_until(lambda: not self.engine.requests)
        self.flush()
        self.engine.requests.check_integrity()

    def tokens_of(self, answer: Answer) -> list[int]:
        """Return the tokens of a request, which must end well."""
        self.turn_until(lambda: answer.is_over)
        assert answer.failure is None
        return answer.token_ids

    def ask(self, prompt: Prompt, num_new_tokens: int, hisparse: HisparseFlag, **more: Any) -> Answer:
        """Send a request, which must end well; return its answer."""
        answer = self.generate(prompt, num_new_tokens, hisparse, **more)
        self.tokens_of(answer)
        return answer

    def entrust(
        self, prompt: Prompt, num_new_tokens: int, hisparse: HisparseFlag = HisparseFlag.TRUE
    ) -> Answer:
        """Send a request; return once the prefill node has its Bootstrap, for which it delivers nothing."""
        self.double.delivers = False
        num_before = len(self.double.bootstraps)
        answer = self.generate(prompt, num_new_tokens, hisparse)
        self.turn_until(lambda: len(self.double.bootstraps) > num_before)
        return answer

    def failure_of(
        self, answer: Answer, *others: PrefillDouble, status: int | None = None, error: str = ""
    ) -> RequestFailed:
        """Return the failure with which a request ends. ``error``: a part of its text."""
        self.turn_until(lambda: answer.is_over, *others)
        assert answer.failure is not None, f"it went well: {answer.last}"
        assert status in (None, answer.failure.status)
        assert error in answer.failure.error
        return answer.failure

    def turn_for(self, secs: float, *others: PrefillDouble) -> None:
        deadline = time.monotonic() + secs
        while time.monotonic() < deadline:
            self.turn(*others)

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """Hold back all steps: requests come, land and leave, and none gets a token."""
        with patch.object(self.engine.steps, "next_batch", list):
            yield

    def begin_together(self, answers: Sequence[Answer]) -> None:
        """Take no step before all of ``answers`` that there is room for have landed, so that they run side by
        side, however late some messages are. No other request may be live.
        """
        requests = self.engine.requests

        def have_landed() -> bool:
            num_awaited = sum(not answer.is_over for answer in answers)
            return len(requests.select(RequestState.RUNNING, RequestState.WAITING)) == num_awaited

        with self.without_steps():
            self.turn_until(have_landed)

    def finish(self, answers: Sequence[Answer], expected: Mapping[Prompt, list[int]] | None = None) -> None:
        """Turn until all have ended well and nothing is owned; check the ``expected`` tokens."""
        requests = self.engine.requests
        self.turn_until(
            lambda: all(answer.is_over for answer in answers) and not requests.select(RequestState.ENDING)
        )
        assert [answer.failure for answer in answers] == [None] * len(answers)
        assert requests.pools.free == requests.pools.totals
        if expected is not None:
            for answer in answers:
                if isinstance(expected, Expected):
                    expected.guess(answer.prompt, answer.token_ids)
                wanted = expected[answer.prompt][: answer.num_new_tokens]
                assert answer.token_ids == wanted, f"{len(answer.prompt)} prompt tokens"

    def _take(self, message: FromEngine) -> None:
        match message:
            case Tokens():
                answer = self.answers[message.request_id]
                assert not answer.is_over
                answer.token_ids.extend(message.token_ids)
                answer.logprobs.extend(message.logprobs)
                answer.phases += [phase.name for phase in message.phases]
                answer.prefill += [message.prefill] if message.prefill is not None else []
                if message.finish_reason is not None:
                    answer.last = message
            case RequestFailed():
                answer = self.answers[message.request_id]
                assert not answer.is_over
                answer.failure = message
                answer.phases += [phase.name for phase in message.phases]
            case PromptScores():
                answer = self.answers[message.request_id]
                assert not answer.token_ids
                answer.scores.append(message)
            case EngineLoading() | Flushed():
                pass
            case EngineStats():
                self.stats = message
            case _:
                raise AssertionError(f"unexpected {message}")


def landing_slots(bootstrap: Bootstrap) -> set[int]:
    return set(extents_to_slots(bootstrap.kv_extents).tolist())
