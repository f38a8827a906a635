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
        """Return the logprobs of the prompt's next tokens, or None if the client did not ask for both an echo
        and ``logprobs``. Tokens are scored for ``prompt_logprobs`` as well, which ``openai_answers.py``
        shows."""
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
    """The logprobs of one sample's output.

    A token waits while its text begins behind the shown text: what is not shown yet may belong to a stop
    string, and is then never shown. A token whose text is never shown gets the end of the shown text as its
    offset.
    """

    def __init__(self, sample: SampleRequest, names: TokenNames) -> None:
        self._names = names
        self._num_chars = len(sample.echo)
        """Length of the shown text."""
        skips = sample.options.skip_special_tokens
        self._offsets = TextOffsets(names.token_bytes, self._num_chars, skip_special_tokens=skips)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        """Entries that are not shown yet, with the offsets of their texts."""

    def feed(self, delta: Delta) -> Json:
        """Return the logprobs to show with the delta: those of waiting tokens whose texts begin in the shown
        text or exactly at its end. That offset is right even if the text is never shown. The last delta shows
        all that wait."""
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
    """Return the lists of ``entries``. ``num_top``: how many of the likeliest tokens of each are shown; None:
    all. Entries of the prompt may have more than ``logprobs`` asks for, if ``prompt_logprobs`` asks for more.
    """
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
