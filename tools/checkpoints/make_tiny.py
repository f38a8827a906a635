"""Write the tiny checkpoints: whole DSA models of about half a million weights, for tests and benchmarks.

    python -m tools.checkpoints.make_tiny OUT_DIR [--variant v32|glm|axk2|mistral] [--draft [GAIN]]

Tests call ``write_checkpoint`` instead. The weights are not trained but constructed, so that the
generated text is a sharp test of a serving system:

- Text depends on the whole context: attention is peaked and positional, and the indexer scores by nearly the
  same directions as attention, so that a wrong selection or a wrong KV item changes tokens.
- Positions at the edge of the selection get little attention, so that tokens do not change where rounding
  makes two correct implementations select different ones of nearly equal score.
- Hidden channel 0 is a constant that no layer writes to. It serves as the bias that the architecture does not
  have: for head weights of a fixed sign, and for letters before other bytes in the output.
- Indexer heads come in pairs of opposite sign, so that their rectified sum has no flat part where scores tie.

All values are drawn from numpy's frozen legacy generator and rounded to eight bits of mantissa, so that the
files are the same everywhere.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse_pd.core.model.families import FAMILIES
from tools.checkpoints.files import NUM_BYTES, SPECIAL_TOKENS, byte_characters, save_tokenizer, write_config

Array = npt.NDArray[np.float64]

VARIANTS = ("v32", "glm", "axk2", "mistral")
CONTEXT_LENGTH = 8192
INDEX_TOPK = 64
LIKELY_DRAFTS = 0.3
"""A ``draft_gain`` at which about half of the drafts are right, and text still depends on all layers."""

PAD_ID, BOS_ID, EOS_ID = range(NUM_BYTES, NUM_BYTES + 3)
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)

# Sizes of all variants.
HIDDEN = 128
NUM_LAYERS = 3
"""Layers of V3.2 and A.X-K2: one dense and two with experts."""
NUM_HEADS = 4
Q_LORA = 64
KV_LORA = 64
NOPE = 32
ROPE = 16
V_DIM = 32
INDEX_SIGNS = (1, -1, 1, -1)
"""Signs of the indexer's heads, which come in pairs."""
INDEX_HEADS = len(INDEX_SIGNS)
INDEX_DIM = 32
SHARED = INDEX_DIM - ROPE
"""Key dimensions without rope that attention and indexer have in common."""
NUM_KEPT = HIDDEN * 3 // 8
"""The kept channels: the first hidden channels, which no layer of an index group but its last writes to. An
index group is a layer with an indexer and the layers behind it that share its selections; all layers of
Mistral count as one group."""
NUM_EXPERTS = 8
EXPERT_DIM = 32
DENSE_DIM = 192
NORM_RANK = 16
GLM_INDEXERS = ("full", "shared", "full", "shared")
MISTRAL_ROPE = (1, 0, 1, 1, 0, 0)
"""1 for each of Mistral's layers that has rope."""
MISTRAL_SOURCES = (0, 1, 0, 3, 1, 1)
"""The layer whose KV each of Mistral's layers attends to; of the three that attend to another's, one has an
indexer."""
MISTRAL_INDEXERS = ("full", "full", "shared", "full", "full", "shared")


# Gains of the generated weights, tuned so that transformers and this project choose the same tokens with a
# wide margin.
CONSTANT = 3.0
QUERY_GAIN = 6.0
HEAD_NOISE = 0.15
"""Size of each head's own part of the queries, relative to the part that all heads share."""
ATTENTION_OUT_GAIN = 1.5
EXPERT_OUT_GAIN = 0.25
MLP_OUT_GAIN = 0.5
LOGITS_GAIN = 4.0


def write_checkpoint(out_dir: Path, variant: str, draft_gain: float | None = None) -> None:
    """Write config, weights and tokenizer of ``variant``, one of VARIANTS, to ``out_dir``, made when missing.

    ``draft_gain``: add an MTP layer, which guesses what the first layer's attention alone would say, and
    scale by ``draft_gain`` what everything else adds to the hidden state. 1 leaves it as without an MTP
    layer.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}; expected one of {', '.join(VARIANTS)}")
    if variant not in ("v32", "glm") and draft_gain is not None:
        raise ValueError(
            f"variant is {variant!r}, of which no MTP layer is known here; draft_gain must be None"
        )
    draft = {} if draft_gain is None else {"num_nextn_predict_layers": 1}
    config = write_config(out_dir, _config(variant) | draft, OUTER_CONFIGS.get(variant))
    _write_weights(out_dir / "model.safetensors", variant, config, draft_gain)
    write_tokenizer(out_dir)


def _config(variant: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_DIM,
        "moe_intermediate_size": EXPERT_DIM,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "n_shared_experts": 2,
        "n_routed_experts": NUM_EXPERTS,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V_DIM,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": INDEX_TOPK,
        "max_position_embeddings": CONTEXT_LENGTH,
    }
    if variant == "glm":
        config |= {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "num_hidden_layers": len(GLM_INDEXERS),
            "indexer_types": GLM_INDEXERS,
        }
    if variant == "axk2":
        config |= {
            "architectures": ["AXK2ForCausalLM"],
            "model_type": "axk2",
            "gated_norm_rank": NORM_RANK,
            "n_group": None,
            "topk_group": None,
        }
    if variant == "mistral":
        config |= {
            "model_type": "mistral_large4_text",
            "num_hidden_layers": len(MISTRAL_ROPE),
            "no_rope_layers": MISTRAL_ROPE,
            "kv_source_layers": MISTRAL_SOURCES,
            "indexer_types": MISTRAL_INDEXERS,
            "final_logit_softcapping": 12.0,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "attention_factor": 1.0},
                **{"factor": 16.0, "original_max_position_embeddings": 512},
                **{"beta_fast": 32.0, "beta_slow": 1.0},
            },
        }
    return config


OUTER_CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {
        "architectures": ["MistralLarge4ForConditionalGeneration"],
        "model_type": "mistral_large4",
        "vision_config": {
            **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "head_dim": 8},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14, "image_size": 28},
        },
    }
}
"""Outer configurations of the variants that take images, around the text model's. No weights are written for
the image part."""


@dataclass(frozen=True)
class _Directions:
    """The projections by which attention and the indexer of one index group score. Keys and queries have a
    part with rope, and one without, of which SHARED dimensions are common to attention and indexer."""

    latent: Array
    """From the hidden state to the KV latent."""
    k_rope: Array
    """From the hidden state to the rope part of keys."""
    shared_key: Array
    """From the KV latent to the shared part of keys."""
    q_a: Array
    """From the hidden state to the query latent."""
    common_nope: Array
    """From the query latent to the shared part of queries, as all heads have it."""
    common_rope: Array
    """From the query latent to the rope part of queries, as all heads have it."""


class _Maker:
    """Draws the weights of one checkpoint: ``_write_weights`` and ``_layers`` call it in a fixed order, on
    which all values depend."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)
        self.keeps_channels = False
        """Whether the layer that is drawn next must not write to the kept channels, because it is not the
        last of its index group."""

    def matrix(self, num_out: int, num_in: int, gain: float = 1.0) -> Array:
        """Return a matrix that turns inputs of unit variance into outputs of standard deviation ``gain``."""
        drawn: Array = self._random.standard_normal((num_out, num_in)) * (gain / np.sqrt(num_in))
        return drawn

    def from_hidden(self, num_out: int, gain: float = 1.0) -> Array:
        """Return a ``matrix`` that does not read the constant channel."""
        drawn = self.matrix(num_out, HIDDEN, gain)
        drawn[:, 0] = 0
        return drawn

    def to_hidden(self, num_in: int, gain: float) -> Array:
        """Return a ``matrix`` that does not write to the constant channel, nor, if ``keeps_channels`` says
        so, to the kept ones; its other outputs are then scaled up to the same total variance."""
        drawn = self.matrix(HIDDEN, num_in, gain)
        drawn[0] = 0
        if self.keeps_channels:
            drawn[:NUM_KEPT] = 0
            drawn *= np.sqrt(HIDDEN / (HIDDEN - NUM_KEPT))
        return drawn

    def from_kept(self, num_out: int, num_rows: int) -> Array:
        """Return a ``from_hidden`` matrix whose first ``num_rows`` outputs read only the kept channels."""
        drawn = self.from_hidden(num_out)
        drawn[:num_rows, NUM_KEPT:] = 0
        drawn[:num_rows] *= np.sqrt(HIDDEN / NUM_KEPT)
        return drawn

    def ends(self) -> dict[str, Array]:
        """Return embedding, final norm and LM head."""
        embedding = self._random.standard_normal((VOCAB_SIZE, HIDDEN))
        embedding[:, 0] = CONSTANT
        head = self.from_hidden(VOCAB_SIZE, LOGITS_GAIN)
        head[:, 0] = _letter_preference() * LOGITS_GAIN / CONSTANT
        return {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": np.ones(HIDDEN),
            "lm_head.weight": head,
        }

    def draft_ends(self) -> dict[str, Array]:
        """Return the weights that join embedding and hidden state to an MTP layer's input, mostly the
        embedding."""
        join = np.zeros((HIDDEN, 2 * HIDDEN))
        join[:, :HIDDEN] = np.eye(HIDDEN)
        join[:, HIDDEN:] = self.to_hidden(HIDDEN, 0.1)
        ones = {f"{name}.weight": np.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
        return {"eh_proj.weight": join} | ones

    def directions(self, num_layers: int) -> _Directions:
        """Return the directions that the layers of an index group have in common.

        With several layers, each layer must attend by the very scores that selected its positions. So the
        directions read the kept channels alone: through the first half of each latent, which reads no others.
        """
        half_latent, half_query = (KV_LORA // 2, Q_LORA // 2) if num_layers > 1 else (0, 0)
        shared_key = self.matrix(SHARED, KV_LORA)
        common_query = self.matrix(SHARED + ROPE, Q_LORA, QUERY_GAIN)
        if num_layers > 1:
            shared_key[:, half_latent:] = 0
            common_query[:, half_query:] = 0
            shared_key *= np.sqrt(2)
            common_query *= np.sqrt(2)
        return _Directions(
            latent=self.from_kept(KV_LORA, half_latent),
            k_rope=self.from_kept(ROPE, ROPE if num_layers > 1 else 0),
            shared_key=shared_key,
            q_a=self.from_kept(Q_LORA, half_query),
            common_nope=common_query[:SHARED],
            common_rope=common_query[SHARED:],
        )

    def attention(self, variant: str, directions: _Directions, has_indexer: bool) -> dict[str, Array]:
        """Return a layer's attention, and its indexer if it has one. ``directions``: those of its group."""
        shared_key, common_nope = directions.shared_key, directions.common_nope
        common_rope = directions.common_rope
        q_b, kv_b = [], []
        for _ in range(NUM_HEADS):
            q_b += [
                common_nope + self.matrix(SHARED, Q_LORA, QUERY_GAIN * HEAD_NOISE),
                self.matrix(NOPE - SHARED, Q_LORA, QUERY_GAIN * HEAD_NOISE),
                common_rope + self.matrix(ROPE, Q_LORA, QUERY_GAIN * HEAD_NOISE),
            ]
            if variant == "axk2":  # the gate of each head's values follows its query
                q_b.append(self.matrix(V_DIM, Q_LORA))
            kv_b += [shared_key, self.matrix(NOPE - SHARED, KV_LORA), self.matrix(V_DIM, KV_LORA)]
        queries = np.concatenate(q_b)
        if variant == "axk2":  # its queries also read the raw latent, behind the normed one
            queries = np.concatenate((queries, 0.02 * self.matrix(*queries.shape)), axis=1)
        weights = {
            "q_a_proj.weight": directions.q_a,
            "q_a_layernorm.weight": np.ones(Q_LORA),
            "q_b_proj.weight": queries,
            "kv_a_proj_with_mqa.weight": np.concatenate((directions.latent, directions.k_rope)),
            "kv_a_layernorm.weight": np.ones(KV_LORA),
            "kv_b_proj.weight": np.concatenate(kv_b),
            "o_proj.weight": self.to_hidden(NUM_HEADS * V_DIM, ATTENTION_OUT_GAIN),
        }
        if has_indexer:
            # DeepSeek's indexer pairs RoPE element i with i + half, attention and GLM's indexer i with i + 1.
            order = np.arange(ROPE) if variant == "glm" else np.arange(ROPE).reshape(-1, 2).T.ravel()
            query, noise = np.concatenate((common_rope[order], common_nope)), QUERY_GAIN * HEAD_NOISE / 2
            heads = [sign * (query + self.matrix(INDEX_DIM, Q_LORA, noise)) for sign in INDEX_SIGNS]
            weights |= {
                "indexer.wq_b.weight": np.concatenate(heads),
                **self._indexer_keys(directions, directions.k_rope[order]),
            }
        return {f"self_attn.{name}": value for name, value in weights.items()}

    def _indexer_keys(self, directions: _Directions, k_rope: Array) -> dict[str, Array]:
        """Return the indexer's key projection, and the heads' weights, each with a fixed sign."""
        head_weights = self.from_hidden(INDEX_HEADS, 0.1)
        head_weights[:, 0] = np.array(INDEX_SIGNS) / CONSTANT
        shared = directions.shared_key @ directions.latent
        return {
            "indexer.wk.weight": np.concatenate((k_rope, shared)),
            "indexer.k_norm.weight": np.ones(INDEX_DIM),
            "indexer.k_norm.bias": np.zeros(INDEX_DIM),
            "indexer.weights_proj.weight": head_weights,
        }

    def direct_query(self) -> Array:
        """Return the part that the queries of all heads and layers share in a model without a query latent:
        SHARED rows, then ROPE."""
        return self.from_kept(SHARED + ROPE, SHARED + ROPE) * QUERY_GAIN

    def direct_attention(
        self, directions: _Directions, query: Array, *, has_rope: bool, has_kv: bool, has_indexer: bool
    ) -> dict[str, Array]:
        """Return attention as Mistral-Large-4 has it: queries come from the hidden state, and a layer without
        rope has NOPE + ROPE dimensions that are all like the other layers' NOPE ones. ``query``: from
        ``direct_query``."""
        num_own = NOPE - SHARED + (0 if has_rope else ROPE)
        noise = QUERY_GAIN * HEAD_NOISE
        queries, kv_b = [], []
        for _ in range(NUM_HEADS):
            queries += [query[:SHARED] + self.from_hidden(SHARED, noise), self.from_hidden(num_own, noise)]
            if has_rope:
                queries.append(query[SHARED:] + self.from_hidden(ROPE, noise))
            kv_b += [directions.shared_key, self.matrix(num_own, KV_LORA), self.matrix(V_DIM, KV_LORA)]
        weights = {
            "q_proj.weight": np.concatenate(queries),
            "kv_b_proj.weight": np.concatenate(kv_b),
            "o_proj.weight": self.to_hidden(NUM_HEADS * V_DIM, ATTENTION_OUT_GAIN),
            **self._position_scaling("softmax_scaling", NUM_HEADS),
        }
        if has_kv:
            kv_a = [directions.latent, *([directions.k_rope] if has_rope else [])]
            weights["kv_a_proj_with_mqa.weight"] = np.concatenate(kv_a)
            weights["kv_a_layernorm.weight"] = np.ones(KV_LORA)
        if has_indexer:
            # Without rope, a token would score the same at any position. So in place of the rope part, keys
            # have one that reads all channels, to which earlier layers add the token's context.
            keys = directions.k_rope if has_rope else self.from_hidden(ROPE)
            common = np.concatenate((query[SHARED:] * has_rope, query[:SHARED]))
            heads = [sign * (common + self.from_hidden(INDEX_DIM, noise / 2)) for sign in INDEX_SIGNS]
            weights |= {
                "indexer.q_input_norm.weight": np.ones(HIDDEN),
                "indexer.q_input_norm.bias": np.zeros(HIDDEN),
                "indexer.wq_b.weight": np.concatenate(heads),
                **self._indexer_keys(directions, keys),
                **self._position_scaling("indexer.softmax_scaling", INDEX_HEADS),
            }
        return {f"self_attn.{name}": value for name, value in weights.items()}

    def _position_scaling(self, name: str, num_heads: int) -> dict[str, Array]:
        """Return what scales each head's queries by bias + scale * log(position + 1): about 0.8 at the first
        position, and 1.4 at the 2000th."""
        slopes = 0.08 + 0.02 * self._random.standard_normal(num_heads)
        return {f"{name}.scale": slopes, f"{name}.bias": np.full(num_heads, 0.8)}

    def norm(self, name: str, is_gated: bool) -> dict[str, Array]:
        """Return a norm of the hidden state. A gate scales its output by about a half, and by exactly a half
        in the constant channel, so a gated norm has weights of 2."""
        if not is_gated:
            return {f"{name}.weight": np.ones(HIDDEN)}
        return {
            f"{name}.norm.weight": np.full(HIDDEN, 2.0),
            f"{name}.W_down.weight": self.from_hidden(NORM_RANK),
            f"{name}.W_up.weight": self.to_hidden(NORM_RANK, 1.0),
        }

    def mlp(self, prefix: str, width: int, gain: float) -> dict[str, Array]:
        return {
            f"{prefix}.gate_proj.weight": self.from_hidden(width),
            f"{prefix}.up_proj.weight": self.from_hidden(width),
            f"{prefix}.down_proj.weight": self.to_hidden(width, gain),
        }

    def moe(self) -> dict[str, Array]:
        weights: dict[str, Array] = {
            "mlp.gate.weight": self.from_hidden(NUM_EXPERTS, 2.0),
            "mlp.gate.e_score_correction_bias": np.zeros(NUM_EXPERTS),
        }
        for expert in range(NUM_EXPERTS):
            weights |= self.mlp(f"mlp.experts.{expert}", EXPERT_DIM, EXPERT_OUT_GAIN)
        return weights | self.mlp("mlp.shared_experts", 2 * EXPERT_DIM, MLP_OUT_GAIN)


_SEEDS = {"v32": 16, "glm": 27, "axk2": 17, "mistral": 15}
"""The seeds, of those tried, with the most varied text and the clearest choices between tokens."""


def _write_weights(file: Path, variant: str, config: dict[str, Any], draft_gain: float | None) -> None:
    """Draw all weights in order, scale them for an MTP layer if there is one, and write them rounded."""
    from safetensors.numpy import save_file

    maker = _Maker(_SEEDS[variant])
    weights = maker.ends()
    weights |= _layers(maker, variant, config)
    if draft_gain is not None:
        num_layers = config["num_hidden_layers"]
        weights |= _draft_layer(maker, weights, num_layers)
        # What the first layer's attention says is all that the draft layer knows, so it keeps its gain.
        kept = tuple(f"model.layers.{number}.self_attn.o_proj.weight" for number in (0, num_layers))
        for name in weights:
            if name.endswith(("o_proj.weight", "down_proj.weight")) and name not in kept:
                weights[name] = weights[name] * draft_gain
    if variant == "mistral":
        stored_name = FAMILIES["mistral_large4"].stored_name  # transformers' loader knows these names, too
        weights = {  # its router chooses by softmax, without the correction that ``moe`` draws
            stored_name(name): value for name, value in weights.items() if "correction_bias" not in name
        }
    save_file({name: _rounded(value) for name, value in weights.items()}, file, metadata={"format": "pt"})


def _layers(maker: _Maker, variant: str, config: dict[str, Any]) -> dict[str, Array]:
    """Return the weights of all layers, and of what they share."""
    weights: dict[str, Array] = {}
    num_layers = config["num_hidden_layers"]
    has_indexer = [kind == "full" for kind in config.get("indexer_types", ["full"] * num_layers)]
    # Mistral's layers share KV, whatever their indexers do, and so have the same directions.
    starts = [0] if variant == "mistral" else [n for n in range(num_layers) if has_indexer[n]]
    group_ends = dict(zip(starts, [*starts[1:], num_layers], strict=True))
    for number in range(num_layers):
        if number in group_ends:
            group_end = group_ends[number]
            directions = maker.directions(group_end - number)
            if variant == "mistral":
                query = maker.direct_query()
                weights["model.rotary_emb.alpha"] = maker.matrix(1, ROPE // 2, 0.2)[0]
        maker.keeps_channels = number + 1 < group_end
        if variant == "mistral":
            layer = maker.direct_attention(
                directions,
                query,
                has_rope=config["no_rope_layers"][number] == 1,
                has_kv=config["kv_source_layers"][number] == number,
                has_indexer=has_indexer[number],
            )
        else:
            layer = maker.attention(variant, directions, has_indexer[number])
        is_dense = number < config["first_k_dense_replace"]
        layer |= maker.mlp("mlp", DENSE_DIM, MLP_OUT_GAIN) if is_dense else maker.moe()
        has_gates = variant == "axk2"
        layer |= maker.norm("input_layernorm", has_gates)
        layer |= maker.norm("post_attention_layernorm", has_gates and not is_dense)
        weights |= {f"model.layers.{number}.{name}": value for name, value in layer.items()}
    return weights


def _draft_layer(maker: _Maker, weights: dict[str, Array], number: int) -> dict[str, Array]:
    """Return an MTP layer with the attention of the first layer."""
    first, copied = "model.layers.0.", ("self_attn", "input_layernorm", "post_attention_layernorm")
    of_first = {name.removeprefix(first): value for name, value in weights.items() if name.startswith(first)}
    layer = {name: value for name, value in of_first.items() if name.startswith(copied)}
    layer |= maker.moe() | maker.draft_ends()
    return {f"model.layers.{number}.{name}": value for name, value in layer.items()}


def _rounded(values: Array) -> npt.NDArray[np.float32]:
    """Round to float32 with eight bits of mantissa: exact in bfloat16, and the same on every machine."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(np.float32)


def _letter_preference() -> Array:
    """Return each token's preference in standard deviations of the logits: text over other bytes, EOS
    seldom."""
    preference = np.full(VOCAB_SIZE, -10.0)
    preference[32:127] = 0.0
    preference[ord("a") : ord("z") + 1] = 0.5
    preference[[ord(" "), ord("e"), ord("t"), ord("a"), ord("o"), ord("n")]] = 1.0
    preference[ord("\n")] = 0.0
    preference[NUM_BYTES:] = -20.0
    preference[EOS_ID] = -2.5
    return preference


def write_tokenizer(out_dir: Path) -> None:
    """Write a byte-level tokenizer, in which token ``i`` below 256 is byte ``i``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    save_tokenizer(tokenizer, out_dir, CONTEXT_LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoints.make_tiny", description="Write a tiny DSA checkpoint."
    )
    parser.add_argument("out_dir", type=Path, help="directory to write, made when missing")
    parser.add_argument(
        "--variant",
        choices=VARIANTS,
        default="v32",
        help="DeepSeek-V3.2 (default), GLM-5, A.X-K2 or Mistral-Large-4",
    )
    parser.add_argument(
        "--draft",
        type=float,
        nargs="?",
        const=LIKELY_DRAFTS,
        metavar="GAIN",
        help="add an MTP layer; GAIN scales what it cannot know: 1 leaves the model as it is, with %(const)s "
        "about half of its guesses are right",
    )
    arguments = parser.parse_args()
    write_checkpoint(arguments.out_dir, arguments.variant, arguments.draft)
    print(f"wrote the {arguments.variant} tiny checkpoint to {arguments.out_dir}")


if __name__ == "__main__":
    main()
