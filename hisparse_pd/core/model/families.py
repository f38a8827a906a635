"""The model families that are served, and how they differ apart from sizes.

All have latent attention over positions that a lightning indexer selects. The loader and the model read the
differences from ``ModelSpec.family``. A difference that is a submodule in transformers has no field here: the
model looks for the submodule, as for ``q_gate_proj`` in attention with gated heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Family:
    """The differences of one family; the defaults are DeepSeek-V3.2's."""

    interleaves_index_rope: bool = False
    """Whether the indexer's rotation pairs neighbours, as attention's does, instead of the two halves."""
    has_configured_latent_eps: bool = False
    """Whether both latents' norms have the configuration's epsilon instead of transformers' constant."""
    chooses_experts_by_softmax: bool = False
    """Whether experts' scores are the softmax of all logits instead of each logit's sigmoid."""
    score_outside_groups: float = float("-inf")
    """The score of experts outside the groups that a token chose."""
    stored_names: tuple[tuple[str, str], ...] = ()
    """Parts of transformers' names and the checkpoint's replacements, applied in this order."""

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of transformers' modules."""
        for ours, theirs in self.stored_names:
            name = name.replace(ours, theirs)
        return name


FAMILIES: Final = {
    "deepseek_v32": Family(),
    "glm_moe_dsa": Family(interleaves_index_rope=True, has_configured_latent_eps=True),
    "axk2": Family(
        score_outside_groups=0.0,
        stored_names=(
            # This matrix makes gates, too. The checkpoint keeps DeepSeek's name for it.
            (".self_attn.q_gate_proj.", ".self_attn.q_b_proj."),
            ("norm.mlp.fc1.", "norm.W_down."),
            ("norm.mlp.fc2.", "norm.W_up."),
        ),
    ),
    "mistral_large4": Family(
        interleaves_index_rope=True,
        chooses_experts_by_softmax=True,
        score_outside_groups=0.0,
        stored_names=(
            ("model.embed_tokens.", "tok_embeddings."),
            ("model.rotary_emb.", "lerope."),
            ("model.", ""),
            ("lm_head.", "output."),
            (".self_attn.", ".attention."),
            (".softmax_scaling.scale", ".ssmax_scaling.s"),
            (".softmax_scaling.bias", ".ssmax_scaling.b"),
            (".q_proj.", ".wq."),
            (".kv_a_proj_with_mqa.", ".wkv_a_with_mqa."),
            (".kv_a_layernorm.", ".kv_a_norm."),
            (".kv_b_proj.", ".wkv_b."),
            (".o_proj.", ".wo."),
            (".input_layernorm.", ".attention_norm."),
            (".post_attention_layernorm.", ".ffn_norm."),
            (".mlp.gate.", ".gate."),
            (".mlp.experts.", ".experts."),
            (".mlp.shared_experts.", ".shared_experts."),
            (".mlp.", ".feed_forward."),
            (".gate_proj.", ".w1."),
            (".down_proj.", ".w2."),
            (".up_proj.", ".w3."),
        ),
    ),
}
"""Families by the ``model_type`` of a configuration."""
