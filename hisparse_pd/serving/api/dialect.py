"""The interface of the classes that write an endpoint's answers, and the usage objects in answers.

``answering.py`` makes a ``Dialect`` for each request. It calls ``write_prompts`` while the engines compute.
For a stream it then calls ``events`` with each delta, and ``last_events`` after the last one of all
samples; for a whole body ``keep`` with each delta, ``choice`` after a sample's last delta, and ``whole`` at
the end. Streams and whole bodies have the same content. Each call with a delta encodes what one engine
message brought: encoding all logprobs of a long answer at once would hold up the event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Raw

from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.output import Delta, SampleOutput
from hisparse_pd.serving.http.events import SSE_DONE
from hisparse_pd.serving.http.http_errors import ApiError

Json = dict[str, Any]


class Dialect(ABC):
    """Writes the answer to one request of one endpoint."""

    end = SSE_DONE
    """Bytes after the last event of a stream."""
    repeats_prompts = False
    """Whether the answer repeats something of its prompts that takes long to write."""

    def __init__(self, context: DecodeContext, work: Work) -> None:
        self._work = work
        self._identity = work.identity
        self._token_bytes = context.codec.token_bytes
        self._model_name = context.settings.model_name

    async def write_prompts(self) -> None:
        """Write what the answer repeats of its prompts, if it ``repeats_prompts``. Cancelled if the request
        ends before."""
        return

    @abstractmethod
    def keep(self, output: SampleOutput, delta: Delta) -> None:
        """Take in one delta of a sample in a whole answer."""

    @abstractmethod
    def choice(self, output: SampleOutput) -> Raw:
        """Return the JSON of a finished sample in a whole answer."""

    @abstractmethod
    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> object:
        """Return the body of a whole answer, to be encoded. ``choices`` has the JSON of each sample."""

    @abstractmethod
    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        """Return the events for one delta; none where it shows nothing new."""

    def repeats_output(self, output: SampleOutput, delta: Delta) -> bool:
        """Whether the event for one delta repeats all output of the sample so far."""
        return False

    def replay(self, output: SampleOutput, delta: Delta) -> None:
        """Take in one delta whose events the client has already."""
        for _ in self.events(output, delta):
            pass

    def last_events(self, outputs: Sequence[SampleOutput]) -> Iterator[Json]:
        """Return the events after the last delta of all samples."""
        return iter(())

    def failed(self, error: ApiError) -> Json | None:
        """Return the event that ends a failed stream; None for the error event of the endpoint's API."""
        return None


def usage(outputs: Sequence[SampleOutput], num_reasoning_tokens: int | None = None) -> Json:
    """Return OpenAI's usage object. A prompt counts once, however many samples it has.

    ``num_reasoning_tokens`` counts all samples; it is None if answers have no reasoning.
    """
    # The first sample of each prompt, which comes last in reversed order and so stays.
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
            "cached_tokens_details": {
                tier: sum(output.cached_by_tier[tier] for output in firsts)
                for tier in firsts[0].cached_by_tier
            },
            "held_tokens": sum(output.num_held_tokens for output in firsts),
        },
        **({"completion_tokens_details": details} if details else {}),
        "hisparse": hisparse_usage(outputs),
    }


def hisparse_usage(outputs: Sequence[SampleOutput]) -> Json | None:
    """Return the mode, hits and misses of all samples together; None if no engine has told any.

    Samples of different modes have the mode "mixed" together, with ``modes`` for each of them. ``resumes``
    counts how often the answer went on at another node; hits and misses are those of the last node.
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
