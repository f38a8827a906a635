"""Checks a Bootstrap before a request is made of it, because a bad one must not harm other requests.

``Arrivals.bootstrap`` calls ``BootstrapChecks.why_refused``. It checks, in this order, that the prompt
suits the model, that positions lie in the prompt, that the pool could hold what this node is to compute
(``num_computed_tokens``: all tokens but the last), that the landing zone can be written, and that what is
held can be read."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.prefill_node.registrations import Peer, why_held_wrong, why_not_landing
from hisparse_pd.prefill_node.scheduler import StepLimits, why_never
from hisparse_pd.protocol.messages import TOKEN_BYTES, Bootstrap


@dataclass(frozen=True, slots=True)
class BootstrapChecks:
    """The bounds against which Bootstraps are checked."""

    limits: StepLimits
    context_length: int
    vocab_size: int

    def why_refused(self, message: Bootstrap, peer: Peer) -> str | None:
        """Return why the Bootstrap can never be served, or None."""
        return (
            self._why_prompt_wrong(message)
            or _why_positions_wrong(message)
            or why_never(message.num_computed_tokens, self.limits)
            or why_not_landing(message, peer, self.limits.page_size)
            or why_held_wrong(message, peer)
        )

    def _why_prompt_wrong(self, message: Bootstrap) -> str | None:
        if len(message.prompt) % TOKEN_BYTES:
            return f"the prompt has {len(message.prompt)} bytes, which is no multiple of {TOKEN_BYTES}"
        if message.num_prompt_tokens > self.context_length:
            return (
                f"prompt of {message.num_prompt_tokens} tokens is longer than the context of "
                f"{self.context_length} tokens; shorten it"
            )
        token_ids = unpack_token_ids(message.prompt)
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            outside = lowest if lowest < 0 else highest
            return f"prompt token id {outside} is not in [0, {self.vocab_size}), the model's vocabulary"
        return None


def _why_positions_wrong(message: Bootstrap) -> str | None:
    """Return why a number of tokens or a position does not suit the prompt's length, or None."""
    num_tokens, num_computed = message.num_prompt_tokens, message.num_computed_tokens
    if message.num_resumed_tokens >= num_tokens:
        return (
            f"num_resumed_tokens {message.num_resumed_tokens} of {num_tokens} prompt tokens: at least the "
            "first one is not resumed"
        )
    if message.scores is not None and message.scores.first >= num_tokens:
        return (
            f"scores are wanted from position {message.scores.first} on, the prompt has {num_tokens} tokens; "
            f"the last one's position is {num_tokens - 1}"
        )
    # A decode node that holds all KV may still want scores, which only a prefill node computes.
    if message.num_held_tokens > num_computed or (
        message.num_held_tokens == num_computed and message.scores is None
    ):
        return (
            f"num_held_tokens {message.num_held_tokens} of {num_tokens} prompt tokens: nothing is left to "
            "compute before the last token, which is the decode node's; no Bootstrap is needed"
        )
    return None
