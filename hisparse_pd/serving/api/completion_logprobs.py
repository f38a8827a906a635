"""Logprobs of completions: those of an echoed prompt and of the output, each beside its text.

``CompletionsDialect`` (``openai_answers.py``) has an ``Echo`` and an ``OutputLogprobs`` for each sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hisparse_pd.base.vocabulary import TokenLogprob
from hisparse_pd.serving.api.dialect import Json
from hisparse_pd.serving.api.output import Delta, PromptToken
from hisparse_pd.serving.api.requests import SampleRequest
from hisparse_pd.serving.api.token_names import EchoOffsets, TextOffsets, TokenNames, finite


class Echo:
    """The echoed prompt of one sample, which is shown in pieces where it has logprobs: each time some of the
    prompt's tokens are scored, ``logprobs`` is called with them, and then ``next_text``."""

    def __init__(self, sample: SampleRequest, names: TokenNames) -> None:
        self._text = sample.echo
        self._names = names
        self._num_top = sample.options.sampling.num_logprobs
        self._has_logprobs = sample.options.echo and self._num_top is not None
        self._num_unscored = len(sample.scored_ids)
        """Tokens whose logprobs are to come."""
        self._offsets = EchoOffsets(names.token_bytes, sample.echo)
        self._num_shown = 0
        """Characters of the text that are shown."""

    def logprobs(self, tokens: Sequence[PromptToken]) -> Json | None:
        """Return the logprobs of the prompt's next tokens; None unless the client asked for an echo and for
        logprobs of completions. It gets vLLM's ``prompt_logprobs`` elsewhere, if it asked for these."""
        self._num_unscored -= len(tokens)
        if not self._has_logprobs:
            return None
        offsets = [self._offsets.next(token.token_id) for token in tokens]
        return _logprobs(self._names, tokens, offsets, self._num_top)

    def next_text(self) -> str:
        """Return what was not shown yet of the echo up to the last token that ``logprobs`` got. Where it has
        no logprobs, or once all of them have come, this is all that is left."""
        is_in_pieces = self._has_logprobs and self._num_unscored
        end = self._offsets.end if is_in_pieces else len(self._text)
        start, self._num_shown = self._num_shown, end
        return self._text[start:end]


class OutputLogprobs:
    """The logprobs of one sample's output. A token whose text begins behind the shown text waits, because
    that text may turn out to be in a stop string and never be shown; its offset is then the end of what is
    shown."""

    def __init__(self, sample: SampleRequest, names: TokenNames) -> None:
        self._names = names
        self._num_chars = len(sample.echo)
        """Length of the shown text."""
        skips = sample.options.skip_special_tokens
        self._offsets = TextOffsets(names.token_bytes, self._num_chars, skip_special_tokens=skips)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        """Entries that are not shown yet, with the offsets of their texts."""

    def feed(self, delta: Delta) -> Json:
        """Return the logprobs to show with the delta: those of tokens whose texts begin in the shown text or
        at its end, an offset that is right whether or not they follow, and with the last delta all others."""
        self._num_chars += len(delta.text)
        self._waiting += ((self._offsets.next(entry.token_id), entry) for entry in delta.logprobs)
        entries, offsets = [], []
        while self._waiting and (delta.finish or self._waiting[0][0] <= self._num_chars):
            offset, entry = self._waiting.popleft()
            entries.append(entry)
            offsets.append(min(offset, self._num_chars))
        return _logprobs(self._names, entries, offsets)


def _logprobs(
    names: TokenNames,
    entries: Sequence[PromptToken] | Sequence[TokenLogprob],
    offsets: Sequence[int],
    num_top: int | None = None,
) -> Json:
    """Return the lists of ``entries``, with the ``num_top`` likeliest tokens of each, or with all of them."""
    return {
        "tokens": [names.of(entry.token_id) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            None
            if entry.logprob is None
            else names.likeliest(entry.token_id, entry.logprob, entry.top[:num_top])
            for entry in entries
        ],
        "text_offset": offsets,
    }
