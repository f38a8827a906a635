"""The model families that are served, and what differs between them beside sizes.

All have latent attention over positions that a lightning indexer selects. What a module of transformers shows
by its parts (a gate behind a norm, a gate of the heads' values) is not said here again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Family:
    interleaves_index_rope: bool = False
    """Whether the indexer's rotation pairs neighbours, as attention's does, and not the two halves."""
    has_configured_latent_eps: bool = False
    """Whether both latents' norms have the configuration's epsilon, where transformers has a constant."""
    score_outside_groups: float = float("-inf")
    """What stands for an expert's score outside the groups that a token chose."""
    stored_names: tuple[tuple[str, str], ...] = ()
    """Parts of the names of transformers' modules, and what a checkpoint says instead."""


FAMILIES: Final = {
    "deepseek_v32": Family(),
    "glm_moe_dsa": Family(interleaves_index_rope=True, has_configured_latent_eps=True),
    "axk2": Family(
        score_outside_groups=0.0,
        stored_names=(
            (".self_attn.q_gate_proj.", ".self_attn.q_b_proj."),
            ("norm.mlp.fc1.", "norm.W_down."),
            ("norm.mlp.fc2.", "norm.W_up."),
        ),
    ),
}
"""By the ``model_type`` of a configuration."""
