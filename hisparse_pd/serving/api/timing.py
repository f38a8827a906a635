"""The phases of one HTTP request with their times: for histograms, ``server-timing`` and traces.

``app.py`` makes one ``Timeline`` for each request that generates; the handler in ``decode_node/server.py``
notes what the engines report, sample by sample. The decode node's first report includes the prefill node's
phases. A trace gets its spans from these reports, with the engines' times. ``arrived_at`` and
``_complete_at`` are times of ``time.monotonic``; all other names in ``_at`` are Unix time, in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.engine.messages import RequestStats
from hisparse_pd.engine.phases import DECODE_PHASES, Phase, wall_clock_ahead
from hisparse_pd.protocol.messages import PrefillTimes
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.requests import SampleRequest
from hisparse_pd.serving.api.schemas import ApiRequest
from hisparse_pd.serving.http.metrics import FrontMetrics

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import RequestSpan

TIMING_HEADER = b"x-request-timing"
"""Header of a request; with ``1`` the answer has ``server-timing``."""

MAX_TRACED_SAMPLES = 16
"""Samples of one HTTP request whose phases become spans."""

_TEXT_ENDPOINTS = (Endpoint.COMPLETIONS, Endpoint.GENERATE)

Attributes = dict[str, str | bool | int | float | Sequence[str]]

_LANDING = "landing"
"""Name of the decode node's phase that ends when the prefill node's last one ends."""


class Timeline:
    """The times of one HTTP request, from its complete body on."""

    def __init__(
        self,
        metrics: FrontMetrics,
        arrived_at: float,
        headers: Iterable[tuple[bytes, bytes]],
        span: RequestSpan | None,
    ) -> None:
        """``arrived_at`` is a time of ``time.monotonic``, and ``headers`` are the request's. ``span`` is None
        where the request is not traced."""
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._complete_at = time.monotonic()
        self._wants_header = (TIMING_HEADER, b"1") in [
            (name.lower(), value.strip()) for name, value in headers
        ]
        self._span = span if span is not None and span.is_recording else None
        self._secs: dict[str, float] = {}
        """Seconds of each phase, of the sample that took longest, and the request's "ttft"."""
        self._samples: Sequence[SampleRequest] = ()
        self._ranks: Mapping[str, int] = {}
        """Each sample's rank by request id, for traces."""
        self._checked_at = 0.0
        """Unix time when the body was parsed and its prompts were tokens."""
        self._ended_at: dict[int, float] = {}
        """Unix time of the end of each sample's last phase."""
        self._decoding: set[int] = set()
        """Samples that have had their first decode step and have not finished."""
        self._stats: dict[int, RequestStats] = {}
        """Latest statistics of each traced sample."""
        self._num_output_tokens = 0
        self._finish_reasons: list[str] = []

    def note_checked(self, request: ApiRequest, samples: Sequence[SampleRequest], model_name: str) -> None:
        """Note that the body is parsed and its prompts are tokens."""
        now, ahead = time.monotonic(), wall_clock_ahead()  # now + ahead is Unix time, which spans have
        self._samples, self._checked_at = samples, now + ahead
        self._observe("tokenize", now - self._complete_at)
        if self._span is not None:
            operation = "text_completion" if request.endpoint in _TEXT_ENDPOINTS else "chat"
            num_tokens = {"gen_ai.usage.input_tokens": sum(s.generate.num_prompt_tokens for s in samples)}
            self._span.set(
                {
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "hisparse-pd",
                    "gen_ai.request.model": model_name,
                    "gen_ai.request.stream": request.stream,
                    "hisparse_pd.samples": len(samples),
                    **num_tokens,
                }
            )
            self._span.part("tokenize", self._complete_at + ahead, self._checked_at, num_tokens)

    def note_sent(self, ranks: Mapping[str, int]) -> None:
        """Note that the samples went to the engines of these ``ranks``, by request id."""
        self._ranks = ranks

    def note_first_token(self) -> float:
        """Note that a sample's first token has come; the earliest one's time is the request's "ttft". Returns
        the seconds since the request arrived."""
        secs = time.monotonic() - self._arrived_at
        self._secs.setdefault("ttft", secs)
        return secs

    def note_phases(
        self,
        index: int,
        phases: Sequence[Phase],
        stats: RequestStats | None = None,
        prefill: PrefillTimes | None = None,
        *,
        error: str = "",
    ) -> None:
        """Note that sample ``index`` has been through ``phases``. With ``error`` it failed in the last one.

        ``prefill`` is what the prefill node reported when the landing ended.
        """
        if stats is not None and self._is_traced(index):
            self._stats[index] = stats
        for phase in phases:
            phase_error = error if phase is phases[-1] else ""
            started_at = self._end_phase(index, phase.name, phase.started_at, phase.ended_at, phase_error)
            if prefill is not None and phase.name == _LANDING:
                self._note_prefill(index, prefill, started_at)
        if phases and phases[-1].name == DECODE_PHASES[-1] and not error:  # the first step is over
            self._decoding.add(index)

    def _note_prefill(self, index: int, times: PrefillTimes, landing_began_at: float) -> None:
        """Note the prefill node's phases. Only their durations are used, since its clock may be another
        machine's: they follow one another up to the landing's end, within the landing."""
        secs_of = {
            "prefill_queue": times.queue_secs,
            "prefill": times.prefill_secs,
            "transfer": times.transfer_secs,
        }
        landing_ended_at = self._ended_at[index]
        secs_to_end = sum(secs_of.values())
        for phase, secs in secs_of.items():
            started_at = landing_ended_at - secs_to_end
            secs_to_end -= secs
            ended_at = landing_ended_at - secs_to_end
            self._observe(phase, secs)
            self._trace_part(index, phase, max(started_at, landing_began_at), max(ended_at, landing_began_at))

    def note_finished(self, index: int, num_tokens: int, reason: FinishReason) -> None:
        """Note that sample ``index`` has all its tokens."""
        self._num_output_tokens += num_tokens
        if len(self._finish_reasons) < MAX_TRACED_SAMPLES:
            self._finish_reasons.append(str(reason))
        if index in self._decoding:
            self._decoding.discard(index)
            self._end_phase(
                index,
                "decode",
                self._ended_at[index],
                time.time(),
                attributes={
                    "gen_ai.usage.output_tokens": num_tokens,
                    "gen_ai.response.finish_reasons": [str(reason)],
                },
            )

    def note_failed(self, index: int, phases: Sequence[Phase], error: str) -> None:
        """Note that sample ``index``, and the request with it, failed in the last of ``phases`` or later."""
        self.note_phases(index, phases, error=error)
        if self._span is not None:
            self._span.error = error

    def close(self) -> None:
        """End the request. A sample that has not finished has failed, or its client is gone."""
        if self._span is None:
            return
        for index in self._decoding:
            error = self._span.error or "the request was aborted"
            self._end_phase(index, "decode", self._ended_at[index], time.time(), error)
        attributes: Attributes = {}
        if self._finish_reasons:
            attributes["gen_ai.usage.output_tokens"] = self._num_output_tokens
            attributes["gen_ai.response.finish_reasons"] = self._finish_reasons
        if "ttft" in self._secs:
            attributes["gen_ai.response.time_to_first_chunk"] = self._secs["ttft"]
        if len(self._samples) == 1:
            attributes |= self._attributes(0)
        self._span.set(attributes)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The ``server-timing`` header with the phases so far, in milliseconds, where it was asked for."""
        if not self._wants_header:
            return []
        secs = self._secs | {"total": time.monotonic() - self._arrived_at}
        return [(b"server-timing", ", ".join(f"{n};dur={1e3 * s:.3f}" for n, s in secs.items()).encode())]

    def _is_traced(self, index: int) -> bool:
        return self._span is not None and index < MAX_TRACED_SAMPLES

    def _observe(self, phase: str, secs: float) -> None:
        self._metrics.phase_secs(phase).observe(secs)
        self._secs[phase] = max(secs, self._secs.get(phase, 0.0))

    def _end_phase(
        self,
        index: int,
        phase: str,
        started_at: float,
        ended_at: float,
        error: str = "",
        attributes: Attributes | None = None,
    ) -> float:
        """Note a phase of sample ``index`` that began and ended at these Unix times. Returns its start as the
        trace has it."""
        if not error:
            self._observe(phase, max(0.0, ended_at - started_at))
        # An engine's clock may be another machine's, so times are moved to between the phase before and now.
        now = time.time()
        started_at = min(max(started_at, self._ended_at.get(index, self._checked_at)), now)
        self._ended_at[index] = min(max(ended_at, started_at), now)
        self._trace_part(index, phase, started_at, self._ended_at[index], error, attributes)
        return started_at

    def _trace_part(
        self,
        index: int,
        phase: str,
        started_at: float,
        ended_at: float,
        error: str = "",
        attributes: Attributes | None = None,
    ) -> None:
        if self._span is not None and self._is_traced(index):
            described = self._attributes(index) | (attributes or {})
            self._span.part(phase, started_at, ended_at, described, error)

    def _attributes(self, index: int) -> Attributes:
        """Return what a trace says of sample ``index``; its statistics once they are known."""
        generate, stats = self._samples[index].generate, self._stats.get(index)
        attributes: Attributes = {
            "hisparse_pd.room": generate.room,
            "hisparse_pd.dp_rank": self._ranks.get(generate.request_id, 0),
            "gen_ai.usage.input_tokens": generate.num_prompt_tokens,
        }
        if stats is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = stats.num_cached_tokens
            attributes["hisparse_pd.held_tokens"] = stats.num_held_tokens
            attributes["hisparse_pd.transfer_bytes"] = stats.transfer_bytes
            attributes["hisparse_pd.transfer_secs"] = stats.transfer_secs
            attributes["hisparse_pd.mode"] = str(stats.mode)
        return attributes
