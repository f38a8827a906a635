"""Logprobs of a prompt's own tokens, as completions, chats and ``/generate`` show them.

The handler in ``decode_node/server.py`` collects the engine's ``Scores``, has ``write_lists`` encode them
once for each prompt, in pieces, and puts them into a finished answer by ``with_lists``. The lists of one
answer have up to 40 MB, so they are never decoded again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from hisparse_pd.engine.messages import PromptScores, unpack_token_ids
from hisparse_pd.protocol.prompt_scores import score_dtype
from hisparse_pd.serving.api.app import Work
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.detokenizer import TokenBytes
from hisparse_pd.serving.api.generate_answers import sglang_token
from hisparse_pd.serving.api.grown_json import encoded, shown_lists
from hisparse_pd.serving.api.requests import SampleRequest
from hisparse_pd.serving.api.token_names import EchoOffsets, TokenNames, finite
from hisparse_pd.serving.http.http_errors import RequestFailedError
from hisparse_pd.serving.http.off_loop import off_loop

_PIECE_ENTRIES = 2048
"""Logprobs encoded at a time, which takes a millisecond or two in which no other thread runs."""

_INLINE_BYTES = 16 << 10
_INLINE_PROMPTS = 64
"""Most bytes of rows, and prompts, that are written on the event loop, which takes no longer than a piece."""


class Scores(Struct):
    """Logprobs of one prompt as the engine sends them. ``rows`` are of ``score_dtype(num_top)``."""

    num_top: int = 0
    rows: list[bytes] = []

    def add(self, piece: PromptScores) -> None:
        """Add the next piece."""
        self.num_top = piece.num_top
        self.rows.append(piece.rows)


class PromptLists(NamedTuple):
    """The JSON lists of one prompt by field, each in pieces without brackets."""

    choice: defaultdict[str, list[bytes]]
    """Fields of each choice."""
    logprobs: defaultdict[str, list[bytes]]
    """Fields of a choice's ``logprobs``, whose lists begin with these."""
    meta_info: defaultdict[str, list[bytes]]
    """Fields of SGLang's ``meta_info``."""


async def write_lists(
    work: Work, scores: Mapping[int, Scores], token_bytes: TokenBytes
) -> dict[int, PromptLists]:
    """Write the lists of each prompt in ``scores``, both by prompt index. Raises RequestFailedError where the
    engine left out positions."""
    written: dict[int, PromptLists] = {}
    names = TokenNames(token_bytes, are_ids=work.request.names_tokens_by_id)
    sample_by_prompt = {sample.prompt_index: sample for sample in work.samples}
    is_short = sum(len(rows) for each in scores.values() for rows in each.rows) <= _INLINE_BYTES
    for index, prompt_scores in scores.items():
        written[index] = lists = PromptLists(defaultdict(list), defaultdict(list), defaultdict(list))
        writing = _write(sample_by_prompt[index], prompt_scores, names, lists)
        if is_short and len(scores) <= _INLINE_PROMPTS:
            deque(writing, maxlen=0)
        else:
            while await off_loop(next, writing, False):
                pass
    return written


def with_lists(work: Work, body: bytes, written: Mapping[int, PromptLists]) -> bytes:
    """Put the lists of its prompts into the whole answer ``body``."""
    answer: Any = msgspec.json.decode(body)
    prompts = [written[sample.prompt_index] for sample in work.samples]
    if work.request.endpoint is Endpoint.GENERATE:
        for entry, lists in zip(answer if isinstance(answer, list) else [answer], prompts, strict=True):
            entry["meta_info"] |= shown_lists(lists.meta_info)
    elif work.request.endpoint is Endpoint.CHAT:
        answer |= shown_lists(prompts[0].choice)
    else:
        for choice, lists in zip(answer["choices"], prompts, strict=True):
            choice |= shown_lists(lists.choice)
            if lists.logprobs:
                output = {name: encoded(entries) for name, entries in choice["logprobs"].items()}
                both = {name: [*lists.logprobs[name], *pieces] for name, pieces in output.items()}
                choice["logprobs"] = shown_lists(both)
    return msgspec.json.encode(answer)


def _write(sample: SampleRequest, scores: Scores, names: TokenNames, lists: PromptLists) -> Iterator[bool]:
    """Append the entries of the prompt's fields to ``lists``, and yield True after each piece."""
    options, wanted = sample.options, sample.wanted_scores
    assert wanted is not None
    token_bytes = names.token_bytes
    token_ids = unpack_token_ids(sample.prompt)[wanted.first - 1 :]
    rows = np.frombuffer(b"".join(scores.rows), score_dtype(scores.num_top))
    if len(rows) != max(0, len(token_ids) - 1):
        raise RequestFailedError(500, f"the engine sent {len(rows)} logprobs for {len(token_ids)} tokens")
    choice, logprobs, meta = lists
    num_logprobs = options.sampling.num_logprobs
    num_shown = num_logprobs or 0
    offsets = None
    if options.echo and num_logprobs is not None:
        offsets = EchoOffsets(names.token_bytes, sample.echo)
    first = 1
    """Index of the piece's first token with a logprob."""
    for piece in _pieces(token_ids, rows, scores.num_top):
        unknown, known = [None] * first, piece[first:]
        if options.num_prompt_logprobs is not None:
            by_id = [_vllm_entry(token_bytes, token, options.num_prompt_logprobs) for token in known]
            choice["prompt_logprobs"] += encoded([*unknown, *by_id])
        if offsets is not None:
            logprobs["tokens"] += encoded([names.of(token.token_id) for token in piece])
            logprobs["text_offset"] += encoded([offsets.next(token.token_id) for token in piece])
            logprobs["token_logprobs"] += encoded([*unknown, *(finite(token.logprob) for token in known)])
            likeliest = [
                names.likeliest(token.token_id, token.logprob, token.top[:num_shown]) for token in known
            ]
            logprobs["top_logprobs"] += encoded([*unknown, *likeliest])
        if options.logprob_start is not None:
            # SGLang shows no logprob of the token at which it starts.
            with_text = options.text_in_logprobs
            entries: list[tuple[int, float | None]] = [(token.token_id, None) for token in piece[:first]]
            entries += [(token.token_id, token.logprob) for token in known]
            shown = [sglang_token(token_bytes, *entry, with_text) for entry in entries]
            meta["input_token_logprobs"] += encoded(shown)
            if num_shown:
                tops = [
                    [sglang_token(token_bytes, *entry, with_text) for entry in token.top[:num_shown]]
                    for token in known
                ]
                meta["input_top_logprobs"] += encoded([*unknown, *tops])
        first = 0
        yield True


class _Token(NamedTuple):
    """A token of the prompt, with the likeliest tokens in its place and their logprobs."""

    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top: Sequence[tuple[int, float]] = ()


def _pieces(
    token_ids: npt.NDArray[np.int32], rows: npt.NDArray[np.void], num_top: int
) -> Iterator[list[_Token]]:
    """Yield all tokens in pieces. The first token has no row."""
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


def _vllm_entry(token_bytes: TokenBytes, token: _Token, num_top: int) -> dict[str, object]:
    """Return vLLM's entry for a prompt's token: itself, then the likeliest ones."""
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
