"""Logprobs of a prompt's own tokens, on their way from the engine to the samples that show them.

The handler in ``decode_node/server.py`` has a ``ScoredPrompt`` for each prompt. It turns the engine's rows
into deltas, which the dialects of completions, chats and ``/generate`` write like any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hisparse_pd.engine.messages import PromptScores, Tokens
from hisparse_pd.protocol.prompt_scores import score_dtype
from hisparse_pd.serving.api.detokenizer import TokenBytes
from hisparse_pd.serving.api.output import Delta, PromptToken, SampleOutput
from hisparse_pd.serving.api.token_names import finite
from hisparse_pd.serving.http.http_errors import RequestFailedError

_PIECE_ENTRIES = 2048
"""Logprobs in one delta, whose JSON takes a millisecond or two to write."""

_NO_ROWS = np.empty(0, score_dtype(0))


def scored_prompts(outputs: Sequence[SampleOutput]) -> dict[int, ScoredPrompt]:
    """Return a ``ScoredPrompt`` for each prompt, by the prompt's index."""
    by_prompt: defaultdict[int, list[SampleOutput]] = defaultdict(list)
    for output in outputs:
        by_prompt[output.sample.prompt_index].append(output)
    return {index: ScoredPrompt(samples) for index, samples in by_prompt.items()}


class ScoredPrompt:
    """A prompt's logprobs, and the messages of its samples, which wait for the logprobs.

    One sample has the prompt scored for all. Samples on other ranks may have tokens before that. The first
    token shown has no logprob, and so no row: where only this one is lacking, nothing is scored.
    """

    def __init__(self, outputs: Sequence[SampleOutput]) -> None:
        """``outputs``: those of the prompt's samples."""
        self._outputs = [each for each in outputs if len(each.sample.scored_ids) and each.finish is None]
        self._token_ids = self._outputs[0].sample.scored_ids if self._outputs else np.empty(0, np.int32)
        self._num_read = min((output.num_scored for output in self._outputs), default=0)
        """Tokens that all samples have with their logprobs. A resumed stream begins with its journal's."""
        generates = [output.sample.generate for output in outputs]
        self._scored_id = next((each.request_id for each in generates if each.scores is not None), None)
        """Request id of the sample whose prompt the engine scores; None if no row is needed."""
        self._waiting: list[Tokens] = []
        assert self._scored_id is not None or self._num_lacking <= 1, "or the samples would wait for ever"

    def due(self, event: PromptScores | Tokens) -> Iterable[Delta | Tokens]:
        """Return what samples show now that ``event`` is here: logprobs of the prompt first, then tokens.

        Raises RequestFailedError for tokens of the scored sample while positions are without a logprob.
        """
        if isinstance(event, PromptScores):
            return self._with_waiting(np.frombuffer(event.rows, score_dtype(event.num_top)))
        if not self._num_lacking:
            return (event,)
        if event.request_id == self._scored_id:
            num_rows, num_tokens = max(0, self._num_read - 1), len(self._token_ids)
            raise RequestFailedError(500, f"the engine sent {num_rows} logprobs for {num_tokens} tokens")
        self._waiting.append(event)
        # Without scores only the first token is lacking: it is shown now, and the message behind it.
        return self._with_waiting(_NO_ROWS) if self._scored_id is None else ()

    def _with_waiting(self, rows: npt.NDArray[np.void]) -> Iterator[Delta | Tokens]:
        """Yield what the next rows add and, behind the last one, the messages that waited for it."""
        yield from self._read(rows)
        if not self._num_lacking:
            yield from self._waiting
            self._waiting.clear()

    @property
    def _num_lacking(self) -> int:
        return len(self._token_ids) - self._num_read

    def _read(self, rows: npt.NDArray[np.void]) -> Iterator[Delta]:
        """Yield what the next rows add to each sample. Rows behind the prompt's last token are dropped: the
        engine also scores output that is resumed."""
        unread = self._token_ids[self._num_read :]
        num_without_row = 0 if self._num_read else 1  # the first token shown has no logprob
        head = [PromptToken(token_id) for token_id in unread[:num_without_row].tolist()]
        for piece in _pieces(head, unread[num_without_row:], rows):
            self._num_read += len(piece)
            for output in self._outputs:
                num_new = self._num_read - output.num_scored
                if num_new > 0:
                    yield output.score(piece[-num_new:])


def _pieces(
    head: list[PromptToken], token_ids: npt.NDArray[np.int32], rows: npt.NDArray[np.void]
) -> Iterator[list[PromptToken]]:
    """Yield ``token_ids`` as far as they have a row, in pieces of bounded size; ``head`` precedes the first
    one, even if there is no row."""
    num_top = rows.dtype["top_ids"].shape[0]
    step = max(1, _PIECE_ENTRIES // (1 + num_top))
    for start in range(0, max(len(head), min(len(rows), len(token_ids))), step):
        part = rows[start : start + step]
        tops = zip(part["top_ids"].tolist(), part["top_logprobs"].tolist(), strict=True)
        tokens = map(
            PromptToken,
            token_ids[start : start + step].tolist(),
            part["logprob"].tolist(),
            part["rank"].tolist(),
            [tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in tops],
        )
        yield [*head, *tokens]
        head = []


def vllm_entry(token_bytes: TokenBytes, token: PromptToken, num_top: int) -> dict[str, object] | None:
    """Return vLLM's entry for a prompt's token: itself, then the likeliest ones; None without a logprob."""
    if token.logprob is None:
        return None
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
