"""What is in flight on a node, counted by all of its fronts on the board that they share.

Who takes a place counts itself first and then looks at the sum of all rows: two fronts at once may both find
the last place taken, never both free.
"""

from __future__ import annotations

from hisparse_pd.http.board import Board

_IS_READY, _SAMPLES, _PROMPT_TOKENS, _OF_RANKS = range(4)


def make_board(num_ranks: int, num_fronts: int = 1) -> Board:
    """With the numbers of these ranks."""
    return Board(_OF_RANKS + 2 * num_ranks, num_fronts)


class InFlight:
    """The counts as one front sees them: sums over all fronts, to which it adds its own."""

    def __init__(self, board: Board, front: int) -> None:
        self._board = board
        self._front = front

    @property
    def num_samples(self) -> int:
        """Of all fronts, those included whose abort has not gone to their engine yet."""
        return self._board.sum(_SAMPLES)

    @property
    def are_ready(self) -> bool:
        """Whether all fronts are connected to all engines."""
        return self._board.sum(_IS_READY) == self._board.num_fronts

    @property
    def others_load(self) -> bool:
        """Whether some are, and others not."""
        return 0 < self._board.sum(_IS_READY) < self._board.num_fronts

    def is_ready(self) -> None:
        """This front is connected to all engines."""
        self._board.add(self._front, _IS_READY, 1)

    @property
    def num_prompt_tokens(self) -> int:
        """Once on each rank that has samples of a prompt."""
        return self._board.sum(_PROMPT_TOKENS)

    def add(self, num_samples: int, num_prompt_tokens: int = 0) -> None:
        self._board.add(self._front, _SAMPLES, num_samples)
        self._board.add(self._front, _PROMPT_TOKENS, num_prompt_tokens)

    def tokens_of(self, rank: int) -> int:
        """Prompt tokens of the samples that the rank has."""
        return self._board.sum(_OF_RANKS + 2 * rank)

    def given_to(self, rank: int) -> int:
        """Samples that the rank ever got."""
        return self._board.sum(_OF_RANKS + 2 * rank + 1)

    def give(self, rank: int, num_tokens: int) -> None:
        """One sample."""
        self._board.add(self._front, _OF_RANKS + 2 * rank, num_tokens)
        self._board.add(self._front, _OF_RANKS + 2 * rank + 1, 1)

    def take_back(self, rank: int, num_tokens: int) -> None:
        """It has ended there, or was not sent after all."""
        self._board.add(self._front, _OF_RANKS + 2 * rank, -num_tokens)
