"""A prompt's own logprobs as the dialects show them: written once a prompt, a piece at a time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from hisparse_pd.api.answers import finite, likeliest_by_text
from hisparse_pd.api.app import Work
from hisparse_pd.api.detokenizer import TokenBytes
from hisparse_pd.api.requests import SampleRequest
from hisparse_pd.api.schemas import Endpoint
from hisparse_pd.api.score_report import PromptLists, Report
from hisparse_pd.engine.messages import score_dtype, unpack_token_ids
from hisparse_pd.http.http_errors import RequestFailedError
from hisparse_pd.http.off_loop import off_loop

_PIECE_ENTRIES = 2048
"""Logprobs that are encoded at a time: a millisecond or two, in which no other thread runs."""

_INLINE_BYTES = 16 << 10
_INLINE_PROMPTS = 64
"""Rows of so many bytes and prompts are written at once: what takes no longer than a piece."""


class Scores(Struct):
    """Of one prompt, as they come from the engine: ``rows`` as of ``score_dtype(num_top)``."""

    num_top: int = 0
    rows: list[bytes] = []


async def write_report(work: Work, scores: Mapping[int, Scores], token_bytes: TokenBytes) -> Report:
    """``scores``: by number of the prompt; of no prompt where nobody asked for them.

    Raises RequestFailedError when the engine left positions out.
    """
    written: list[PromptLists] = []
    of_prompt = {sample.prompt_index: sample for sample in work.samples}
    is_short = sum(len(rows) for each in scores.values() for rows in each.rows) <= _INLINE_BYTES
    for index in sorted(scores):
        writing = _write(of_prompt[index], scores[index], token_bytes, written)
        if is_short and len(scores) <= _INLINE_PROMPTS:
            deque(writing, maxlen=0)
        else:
            while await off_loop(next, writing, False):
                pass
    if not written:
        no_lists = PromptLists({}, {}, {})
        return Report((0,) * len(work.samples), (no_lists,))
    if work.request.endpoint is Endpoint.CHAT:  # which shows them once, beside the choices
        return Report((0,) * len(work.samples), (PromptLists({}, {}, {}),), written[0].choice)
    return Report(tuple(sample.prompt_index for sample in work.samples), tuple(written))


def _write(
    sample: SampleRequest, scores: Scores, token_bytes: TokenBytes, written: list[PromptLists]
) -> Iterator[bool]:
    """Append what the prompt's fields show, a piece at a time; each yields True."""
    options, wanted = sample.options, sample.wanted_scores
    assert wanted is not None
    token_ids = unpack_token_ids(sample.prompt)[wanted.first - 1 :]
    rows = np.frombuffer(b"".join(scores.rows), score_dtype(scores.num_top))
    if len(rows) != max(0, len(token_ids) - 1):
        raise RequestFailedError(500, f"the engine sent {len(rows)} logprobs for {len(token_ids)} tokens")
    choice, logprobs, meta = _Lists(), _Lists(), _Lists()
    num_shown = options.num_logprobs or 0
    offsets = _Offsets(sample.echo) if options.echo and options.num_logprobs is not None else None
    first = 1
    """Of the piece, the first token that has a logprob."""
    for piece in _pieces(token_ids, rows, scores.num_top):
        if options.num_prompt_logprobs is not None:
            choice.add("prompt_logprobs", [None] * first)
            by_id = [_by_id(token_bytes, token, options.num_prompt_logprobs) for token in piece[first:]]
            choice.add("prompt_logprobs", by_id)
        if offsets is not None:
            texts = [token_bytes.text(token.token_id) for token in piece]
            logprobs.add("tokens", texts)
            logprobs.add("text_offset", [offsets.next(text) for text in texts])
            for name in ("token_logprobs", "top_logprobs"):
                logprobs.add(name, [None] * first)
            logprobs.add("token_logprobs", [finite(token.logprob) for token in piece[first:]])
            likeliest = [
                likeliest_by_text(token_bytes, token.token_id, token.logprob, token.top[:num_shown])
                for token in piece[first:]
            ]
            logprobs.add("top_logprobs", likeliest)
        if options.logprob_start is not None:
            # SGLang has no logprob of the first token from where it starts, wherever that is.
            with_text = options.text_in_logprobs
            shown = [_as_sglang(token_bytes, token.token_id, None, with_text) for token in piece[:first]]
            shown += [
                _as_sglang(token_bytes, token.token_id, token.logprob, with_text) for token in piece[first:]
            ]
            meta.add("input_token_logprobs", shown)
            if num_shown:
                tops = [
                    [_as_sglang(token_bytes, *entry, with_text) for entry in token.top[:num_shown]]
                    for token in piece[first:]
                ]
                meta.add("input_top_logprobs", [None] * first)
                meta.add("input_top_logprobs", tops)
        first = 0
        yield True
    written.append(PromptLists(choice.joined(), logprobs.joined(), meta.joined()))


class _Token(NamedTuple):
    """One of the prompt, with the likeliest ones in its place and their logprobs."""

    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top: Sequence[tuple[int, float]] = ()


def _pieces(
    token_ids: npt.NDArray[np.int32], rows: npt.NDArray[np.void], num_top: int
) -> Iterator[list[_Token]]:
    """All tokens; the first one has no row."""
    if not len(token_ids):
        return
    head = [_Token(int(token_ids[0]))]
    step = max(1, _PIECE_ENTRIES // (1 + num_top))
    for start in range(0, max(1, len(rows)), step):
        part = rows[start : start + step]
        tops = zip(part["top_ids"].tolist(), part["top_logprobs"].tolist(), strict=True)
        tokens = map(
            _Token,
            token_ids[1 + start : 1 + start + step].tolist(),
            part["logprob"].tolist(),
            part["rank"].tolist(),
            [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in tops],
        )
        yield [*head, *tokens]
        head = []


class _Lists:
    """JSON of growing lists by field."""

    def __init__(self) -> None:
        self._pieces: defaultdict[str, list[bytes]] = defaultdict(list)

    def add(self, name: str, entries: Sequence[object]) -> None:
        if entries:
            self._pieces[name].append(msgspec.json.encode(entries)[1:-1])

    def joined(self) -> dict[str, memoryview]:
        return {name: memoryview(b",".join(pieces)) for name, pieces in self._pieces.items()}


class _Offsets:
    """Where each token begins in the text that is echoed.

    Tokens that the tokenizer put before the client's text are not in it, and begin where it does.
    """

    def __init__(self, echo: str) -> None:
        self._echo = echo
        self._next = 0
        self._has_begun = False

    def next(self, text: str) -> int:
        self._has_begun = self._has_begun or self._echo.startswith(text)
        offset = self._next
        self._next += len(text) * self._has_begun
        return offset


def _by_id(token_bytes: TokenBytes, token: _Token, num_top: int) -> dict[str, object]:
    """As vLLM shows a prompt's token: itself, then the likeliest ones."""
    ranked = [(token.token_id, token.logprob, token.rank)]
    ranked += [(top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(token.top[:num_top], 1)]
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": token_bytes.text(token_id),
        }
        for token_id, logprob, rank in ranked
    }


def _as_sglang(
    token_bytes: TokenBytes, token_id: int, logprob: float | None, with_text: bool
) -> list[object]:
    text = token_bytes.text(token_id) if with_text else None
    return [None if logprob is None else finite(logprob), token_id, text]
