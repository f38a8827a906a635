"""Grammars in a decode engine: requests wait for their compilation, and steps get masks of allowed tokens.

The engine calls ``ask_for_grammar`` for landing requests and ``take_matcher`` for running ones in each turn;
``StepDraws`` calls ``masks_of`` for each step that has a request with a grammar. The grammar's state is in
the request: ``grammar`` while it is compiled, then ``matcher``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hisparse_pd.core.grammar.compiler import MAX_WAIT_SECS, Compiler
from hisparse_pd.core.grammar.matcher import ALL_ALLOWED, OutputMasks, fill_masks
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState


class GrammarLate(Exception):
    """A grammar was not compiled in time, because others were compiled before it."""


def has_grammar(batch: Sequence[Request]) -> bool:
    return any(request.sampling.grammar for request in batch)


def masks_of(batch: Sequence[Request], drafts: Sequence[Sequence[int]], masks: Tensor) -> Tensor:
    """Fill the first rows of ``masks``, in main memory: for each request a row for its next token, and a row
    for the token behind each of its drafts. Returns these rows, int32 [num_rows, num_words].

    All earlier steps of the requests must have been read, because a matcher has to know every token before
    the next one. A request that has ended since the launch, or whose ``matcher`` has an ``error`` afterwards,
    may draw anything: its tokens are dropped.
    """
    to_fill = []
    num_rows = 0
    for request, own_drafts in zip(batch, drafts, strict=True):
        if request.matcher is not None and request.state is RequestState.RUNNING:
            to_fill.append(OutputMasks(request.matcher, num_rows, own_drafts))
        else:
            masks[num_rows : num_rows + 1 + len(own_drafts)] = ALL_ALLOWED
        num_rows += 1 + len(own_drafts)
    fill_masks(masks.numpy(), to_fill)
    return masks[:num_rows]


def ask_for_grammar(request: Request, compiler: Compiler, now: float) -> None:
    """Have the request's grammar compiled, if it has one and that is not under way."""
    if request.sampling.grammar and request.grammar is None:
        resumed = request.resumed_token_ids.tolist()
        request.grammar, request.grammar_asked_at = compiler.compile(request.sampling.grammar, resumed), now


def take_matcher(request: Request, compiler: Compiler, now: float) -> None:
    """Give a running request the matcher of its grammar, once that is compiled. Raises GrammarError, and
    GrammarLate after ``MAX_WAIT_SECS``."""
    ask_for_grammar(request, compiler, now)
    assert request.grammar is not None
    if not request.grammar.done():
        if now - request.grammar_asked_at > MAX_WAIT_SECS:
            raise GrammarLate(f"its grammar was not compiled within {MAX_WAIT_SECS:g} s; try again")
        return
    request.matcher = request.grammar.result().matcher(ignore_eos=request.sampling.ignore_eos)
