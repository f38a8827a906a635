"""What grammars allow in a step: the masks of its rows, and who follows which grammar."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hisparse_pd.core.grammar.compiler import MAX_WAIT_SECS, Compiler
from hisparse_pd.core.grammar.matcher import ALL_ALLOWED, fill_masks
from hisparse_pd.decode_node.request import Request, RequestState


class GrammarLate(Exception):
    """A grammar was not compiled in time, since others came first."""


def has_grammar(batch: Sequence[Request]) -> bool:
    return any(request.sampling.grammar for request in batch)


def masks_of(batch: Sequence[Request], drafts: Sequence[Sequence[int]], masks: Tensor) -> Tensor:
    """Fill the first rows of ``masks``, in main memory: for each request one for its next token, and one
    behind each of its drafts. Returns these rows, int32 [num_rows, num_words].

    All tokens that a request had before have to be read. A request that has ended since the launch, or whose
    ``matcher`` has an ``error`` afterwards, may draw anything: its tokens are dropped.
    """
    wanted = []
    num_rows = 0
    for request, of_req in zip(batch, drafts, strict=True):
        if request.matcher is not None and request.state is RequestState.RUNNING:
            wanted.append((request.matcher, num_rows, of_req))
        else:
            masks[num_rows : num_rows + 1 + len(of_req)] = ALL_ALLOWED
        num_rows += 1 + len(of_req)
    fill_masks(masks.numpy(), wanted)
    return masks[:num_rows]


def ask_for_grammar(request: Request, compiler: Compiler, now: float) -> None:
    """Have the request's grammar compiled, if it has one and that is not under way."""
    if request.sampling.grammar and request.grammar is None:
        begun = request.resumed_token_ids.tolist()
        request.grammar, request.grammar_asked_at = compiler.compile(request.sampling.grammar, begun), now


def follow(request: Request, compiler: Compiler, now: float) -> None:
    """Let a running request follow its grammar, from its first token on, once that is compiled. Raises
    GrammarError and GrammarLate."""
    ask_for_grammar(request, compiler, now)
    assert request.grammar is not None
    if not request.grammar.done():
        if now - request.grammar_asked_at > MAX_WAIT_SECS:
            raise GrammarLate(f"its grammar was not compiled within {MAX_WAIT_SECS:g} s; try again")
        return
    request.matcher = request.grammar.result().matcher(ignore_eos=request.sampling.ignore_eos)
