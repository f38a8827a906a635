"""How an endpoint writes its answers, and the usage that they all show.

A dialect shows each engine message as events (``events``, then ``last_events``), or finished samples as one
body (``keep`` with each engine message, ``choice`` with each sample's last one, then ``whole``). The body
has what its events have together. Each call encodes what one engine message brought: to encode all logprobs
of a long answer at once would hold up the event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Raw

from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.frame import SSE_DONE
from hisparse_pd.serving.api.output import Delta, SampleOutput
from hisparse_pd.serving.http.http_errors import ApiError

Json = dict[str, Any]


class Dialect(ABC):
    """How one endpoint shows the samples of one request."""

    end = SSE_DONE
    """What stands behind the last event of a stream."""

    def __init__(self, context: DecodeContext, work: Work) -> None:
        self._work = work
        self._identity = work.identity
        self._token_bytes = context.codec.token_bytes
        self._model_name = context.settings.model_name

    @abstractmethod
    def keep(self, output: SampleOutput, delta: Delta) -> None:
        """Take in one delta of a sample that is to be shown whole."""

    @abstractmethod
    def choice(self, output: SampleOutput) -> Raw:
        """A finished sample in the body of a non-streaming answer."""

    @abstractmethod
    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> object:
        """That body."""

    @abstractmethod
    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        """The events for one delta; none when it shows nothing new."""

    def replay(self, output: SampleOutput, delta: Delta) -> None:
        """Take in one delta whose events the client has."""
        for _ in self.events(output, delta):
            pass

    def last_events(self, outputs: Sequence[SampleOutput]) -> Iterator[Json]:
        """The events after the last delta of all samples."""
        return iter(())

    def failed(self, error: ApiError) -> Json | None:
        """The event that ends a stream which has begun; None: an error as of its endpoint."""
        return None


def usage(outputs: Sequence[SampleOutput], num_reasoning_tokens: int | None = None) -> Json:
    """OpenAI's usage object. A prompt counts once, however many samples it has.

    ``num_reasoning_tokens``: of all samples together; None where answers have no reasoning.
    """
    firsts = list({output.sample.prompt_index: output for output in reversed(outputs)}.values())
    num_prompt_tokens = sum(output.num_prompt_tokens for output in firsts)
    num_new_tokens = sum(len(output.token_ids) for output in outputs)
    details = {} if num_reasoning_tokens is None else {"reasoning_tokens": num_reasoning_tokens}
    if num_drafted := sum(output.num_drafted for output in outputs):
        num_accepted = sum(output.num_accepted for output in outputs)
        details["accepted_prediction_tokens"] = num_accepted
        details["rejected_prediction_tokens"] = num_drafted - num_accepted
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in firsts),
            "held_tokens": sum(output.num_held_tokens for output in firsts),
        },
        **({"completion_tokens_details": details} if details else {}),
        "hisparse": hisparse_usage(outputs),
    }


def hisparse_usage(outputs: Sequence[SampleOutput]) -> Json | None:
    """Mode, and hits and misses of all samples together; None before the engine has told, and where it took
    no part.

    Samples that were served in different modes have the mode "mixed", with ``modes`` for each of them. Of an
    answer that went on at another node, how often it did, with the hits and misses of the last one.
    """
    stats = [output.stats for output in outputs if output.stats is not None]
    if not stats:
        return None
    modes = [entry.mode for entry in stats]
    shown: Json = {
        "mode": modes[0] if len(set(modes)) == 1 else "mixed",
        "hits": sum(entry.hits for entry in stats),
        "misses": sum(entry.misses for entry in stats),
    }
    if num_resumes := outputs[0].sample.num_resumes:
        shown["resumes"] = num_resumes
    return shown if len(set(modes)) == 1 else shown | {"modes": modes}
