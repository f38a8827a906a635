"""The output of one sample as it grows: tokens, text, logprobs, and the reason of its end.

``answering.py`` makes a ``SampleOutput`` for each sample. Its ``feed`` turns an engine message into a
``Delta``, which the dialect of the endpoint writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from hisparse_pd.base.vocabulary import FinishReason, TokenLogprob
from hisparse_pd.engine.messages import CachedTokens, RequestStats, Tokens, num_packed_tokens
from hisparse_pd.serving.api.detokenizer import Detokenizer, TokenBytes
from hisparse_pd.serving.api.requests import SampleRequest


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sample."""

    reason: FinishReason
    matched: str | int | None = None
    """The stop string or stop token that ended the sample."""


class PromptToken(NamedTuple):
    """A token of a prompt, with the likeliest tokens in its place and their logprobs."""

    token_id: int
    logprob: float | None = None
    """None for the first token shown, which has no logprob."""
    rank: int = 0
    top: Sequence[tuple[int, float]] = ()


class Delta(msgspec.Struct, frozen=True):
    """The addition of one engine message to sample ``index``: tokens in [first_token, last_token), and text;
    or ``scored``, the next tokens of its prompt with their logprobs."""

    index: int
    text: str
    first_token: int
    last_token: int
    finish: Finish | None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry a token where logprobs are asked for. They are not kept: a dialect encodes them at once."""
    scored: Sequence[PromptToken] = ()


class SampleOutput:
    """One sample's output. ``text`` ends neither within a character nor within a possible stop string."""

    def __init__(self, index: int, sample: SampleRequest, token_bytes: TokenBytes) -> None:
        """``index`` is the sample's place among those of the HTTP request."""
        options = sample.options
        self.index = index
        self.sample = sample
        self.token_ids: list[int] = []
        self.num_scored = 0
        """Tokens of the prompt that deltas had with their logprobs."""
        self.finish: Finish | None = None
        self.stats: RequestStats | None = None
        """The engine's latest statistics; None before the first ones, and where no engine took part."""
        self.is_behind = False
        """Whether more messages of this sample are waiting, as the client or the front is slower than the
        engine."""
        self._pieces: list[str] = []
        self._trims_stop_token = not options.no_stop_trim
        self._detokenizer = Detokenizer(
            token_bytes,
            options.stop,
            skip_special_tokens=options.skip_special_tokens,
            no_stop_trim=options.no_stop_trim,
        )

    @property
    def text(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def num_prompt_tokens(self) -> int:
        return num_packed_tokens(self.sample.prompt)

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of the prompt, without resumed output."""
        return sum(self.cached_by_tier.values())

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Cached tokens of the prompt by tier. The engine's numbers may include output that was resumed."""
        cached = self.stats.cached if self.stats else CachedTokens()
        return cached.first(self.num_prompt_tokens).by_tier()

    @property
    def num_held_tokens(self) -> int:
        """Prompt tokens that the decode node held, without resumed output."""
        return min(self.stats.num_held_tokens, self.num_prompt_tokens) if self.stats else 0

    @property
    def num_drafted(self) -> int:
        return self.stats.num_drafted if self.stats else 0

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that became output."""
        return self.stats.num_accepted if self.stats else 0

    def score(self, tokens: Sequence[PromptToken]) -> Delta:
        """Take in the next tokens of the prompt that are shown with logprobs, and return what they add."""
        self.num_scored += len(tokens)
        return Delta(self.index, "", 0, 0, None, scored=tokens)

    def replay_scored(self, num_tokens: int) -> Delta:
        """Take in the next tokens of the prompt, whose logprobs the client of a resumed stream already has.
        They are not written again, so their ids are enough."""
        token_ids = self.sample.scored_ids[self.num_scored :][:num_tokens]
        return self.score([PromptToken(token_id) for token_id in token_ids.tolist()])

    def feed(self, message: Tokens) -> Delta:
        """Take in one engine message of a sample that has not finished, and return what it adds.

        A stop string ends the sample at the token that completes it. The engine knows no stop strings, so the
        caller has to abort the sample there.
        """
        if message.stats is not None:
            self.stats = message.stats
        first_token = len(self.token_ids)
        text = ""
        # A stop token that is trimmed counts as a token, but adds no text.
        with_text, without_text = message.token_ids, message.token_ids[:0]
        if self._trims_stop_token and with_text[-1:] == (message.matched_stop_token,):
            with_text, without_text = with_text[:-1], with_text[-1:]
        for token_id in with_text:
            self.token_ids.append(token_id)
            text += self._detokenizer.feed(token_id)
            if self._detokenizer.matched is not None:
                self.finish = Finish(FinishReason.STOP, self._detokenizer.matched)
                break
        else:  # no stop string has ended the sample before its stop token
            self.token_ids += without_text
        if self.finish is None and message.finish_reason is not None:
            text += self._detokenizer.finish()
            matched = self._detokenizer.matched  # the last, incomplete character may complete a stop string
            if matched is not None:
                self.finish = Finish(FinishReason.STOP, matched)
            else:
                self.finish = Finish(message.finish_reason, message.matched_stop_token)
        self._pieces.append(text)
        last_token = len(self.token_ids)
        logprobs = message.logprobs[: last_token - first_token]
        return Delta(self.index, text, first_token, last_token, self.finish, logprobs)
