"""Writes the answers to SGLang's native ``/generate``, whole and streamed.

``answering.py`` makes a ``GenerateDialect`` for each request and calls it as ``dialect.py`` says: ``keep``,
``choice`` and ``whole`` for a whole answer, ``events`` for a stream, after ``replay`` where it is resumed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from hisparse_pd.base.vocabulary import TokenLogprob
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.dialect import Dialect, Json, hisparse_usage
from hisparse_pd.serving.api.grown_json import GrownObject
from hisparse_pd.serving.api.output import Delta, Finish, PromptToken, SampleOutput
from hisparse_pd.serving.api.token_names import finite


class GenerateDialect(Dialect):
    """``/generate``. Each event of a stream has all text, ids and logprobs so far, as SGLang's have.

    A stream's bytes grow with the square of its length, so an event is left out when the next one is waiting,
    and of a sample's events only the first and the last have the prompt's logprobs.
    """

    def __init__(self, context: DecodeContext, work: Work) -> None:
        super().__init__(context, work)
        self._is_list = work.request.is_batch or len(work.samples) > 1
        self._logprobs: defaultdict[int, GrownObject] = defaultdict(GrownObject)
        """Lists of the output's logprobs, by sample."""
        self._prompt_logprobs: defaultdict[int, GrownObject] = defaultdict(GrownObject)
        """Lists of the prompt's logprobs, by sample."""
        self._begun: set[int] = set()
        """Samples whose first event is written."""

    def keep(self, output: SampleOutput, delta: Delta) -> None:
        if output.sample.options.sampling.num_logprobs is None:
            return
        if delta.scored:
            self._prompt_logprobs[output.index].add(self._lists("input", output, delta.scored))
        else:
            self._logprobs[output.index].add(self._lists("output", output, delta.logprobs))

    def choice(self, output: SampleOutput) -> Raw:
        return Raw(msgspec.json.encode(self._show(output, with_prompt=True)))

    def whole(self, outputs: Sequence[SampleOutput], choices: Sequence[Raw]) -> object:
        return choices if self._is_list else choices[0]

    def events(self, output: SampleOutput, delta: Delta) -> Iterator[Json]:
        self.keep(output, delta)
        if self.repeats_output(output, delta):
            is_edge = delta.finish is not None or output.index not in self._begun
            self._begun.add(output.index)
            shown = self._show(output, with_prompt=is_edge)
            yield shown | ({"index": output.index} if self._is_list else {})

    def repeats_output(self, output: SampleOutput, delta: Delta) -> bool:
        has_tokens = delta.last_token > delta.first_token
        return delta.finish is not None or (has_tokens and not output.is_behind)

    def replay(self, output: SampleOutput, delta: Delta) -> None:
        self.keep(output, delta)  # the next event repeats all earlier ones
        # Each record came with an event, so the client has the first one, with the prompt's logprobs.
        self._begun.add(output.index)

    def _show(self, output: SampleOutput, *, with_prompt: bool) -> Json:
        """Return the whole answer of a sample so far; ``with_prompt``: with the prompt's logprobs."""
        meta: Json = {
            "id": self._request_id(output),
            "finish_reason": output.finish and self._finish_reason(output, output.finish),
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "cached_tokens_details": output.cached_by_tier,
            "held_tokens": output.num_held_tokens,
            "e2e_latency": time.monotonic() - self._work.arrived_at,
            "hisparse": hisparse_usage([output]),
        }
        if output.num_drafted:
            meta["spec_draft_token_num"] = output.num_drafted
            meta["spec_accept_token_num"] = output.num_accepted
        if output.sample.options.sampling.num_logprobs is not None:
            meta["input_token_logprobs"] = []
            if with_prompt:
                meta |= self._prompt_logprobs[output.index].show()
            meta |= self._logprobs[output.index].show()
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    def _lists(
        self, side: str, output: SampleOutput, tokens: Sequence[PromptToken] | Sequence[TokenLogprob]
    ) -> Json:
        """Return the lists of logprobs of ``tokens``; ``side``: "input" or "output"."""
        lists: Json = {
            f"{side}_token_logprobs": [self._token(output, each.token_id, each.logprob) for each in tokens]
        }
        if num_top := output.sample.options.sampling.num_logprobs:
            lists[f"{side}_top_logprobs"] = [
                None
                if each.logprob is None
                else [self._token(output, *entry) for entry in each.top[:num_top]]
                for each in tokens
            ]
        return lists

    def _token(self, output: SampleOutput, token_id: int, logprob: float | None) -> list[object]:
        """Return SGLang's entry of a token: logprob, token id, and text or None."""
        text = self._token_bytes.text(token_id) if output.sample.options.text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token_id, text]

    def _request_id(self, output: SampleOutput) -> str:
        given = self._work.request.request_ids
        return given[output.sample.prompt_index] if given else self._identity.name("", 12, output.index)

    @staticmethod
    def _finish_reason(output: SampleOutput, finish: Finish) -> Json:
        shown: Json = {"type": finish.reason}
        if finish.reason == "length":
            shown["length"] = len(output.token_ids)
        if finish.matched is not None:
            shown["matched"] = finish.matched
        return shown
