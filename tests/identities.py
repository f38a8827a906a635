"""What tests give engines and control messages as the identity of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, PromptIdentity
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import DIGEST_BYTES

DIGEST = bytes(range(DIGEST_BYTES))
ANY = PromptIdentity(NO_ISOLATION, DIGEST)
"""Of both halves of a room, where a test is about something else."""


def identity_of(token_ids: Sequence[int], root: PageKey = NO_ISOLATION) -> PromptIdentity:
    return PromptIdentity.of(root, pack_token_ids(token_ids))
