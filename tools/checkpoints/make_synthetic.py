"""Write a synthetic checkpoint with DeepSeek-V3.2's attention and few layers, for measuring the service.

    python -m tools.checkpoints.make_synthetic --out DIR [--layers 4] [--experts 8] [--hidden 2048]
    python -m tools.checkpoints.make_synthetic --out DIR --layers 5 --experts 256 --hidden 7168 \
        --expert-size 2048 --experts-per-token 8 --fp8 --device cuda  # DeepSeek-V3.2's own layers, 12 GB each

KV, indexer keys, heads and top-k are DeepSeek-V3.2's own; depth, width, experts and vocabulary are small. The
text is random words and never ends. Hidden channel 0 is a constant that no layer writes to. It gives every
indexer query a part that all tokens share, so that selections have locality. A score has three parts:

- a *lasting* one, over key dimensions without RoPE: positions that score high whatever the newest token is;
- a *drifting* one, over the slow RoPE pairs: a fixed query against keys of random phase, so that a score
  follows the distance like a sum of cosines with periods of ``MIN_PERIOD`` tokens and more;
- *jitter*, which depends on the newest token alone. Its share of the variance is ``--jitter``; the other two
  parts have half of the rest each. 1 - jitter is thus the correlation of two consecutive steps' scores.

The default makes the overlap of 44% that was published for consecutive steps of DeepSeek-V3.2
(arXiv:2604.22312) in the first layer, at 32,768 tokens; ``--jitter 0.1`` makes 66%, 0.03 makes 80%. The hit
rate is a setting here and says nothing about a trained model's. Draw random prompts from the whole
vocabulary, because equal tokens have equal keys.

``--draft SHARE`` adds an MTP layer whose guesses are right in that share of cases. All words are put in a
circle. Behind that share of them the model says the circle's next word, whatever came before. The layer has
the model's embedding and head and says the same there; behind other words it hardly ever guesses right.

``--int4`` writes the routed experts in four bits, as compressed-tensors does, in groups of 128, with
``--fp8`` beside other matrices in fp8.

``--published MODEL_TYPE`` writes no weights, only what ``--load-format dummy`` needs: a whole model's
configuration, by transformers' defaults for that type (``axk2``: A.X-K2-Light), and a tokenizer of its size.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.core.model.families import FAMILIES
from tools.checkpoints import quantize_int4
from tools.checkpoints.files import NUM_BYTES, SPECIAL_TOKENS, byte_characters, save_tokenizer, write_config
from tools.checkpoints.quantize_fp8 import QUANTIZATION, is_quantized, quantized
from tools.checkpoints.quantize_int4 import StoredForm

MIN_PERIOD = 500
"""Period, in tokens, of the fastest RoPE pairs that take part in the drifting score."""
CONSTANT = 3.0
"""Value of hidden channel 0, where the others have unit variance."""
CIRCLE_GAIN = 80.0
"""Logit of the circle's next word where the last hidden state is the word's embedding alone. Layers add to
that state, so that the final norm shrinks the embedding's part, and the logit with it."""
SHARED_QUERY = 8.0
"""Element 0 of the query latent, where the others have unit variance. It is the part that all tokens
share, and only the indexer reads it."""
_ROPE_THETA = 10000.0
_NOT_IN_CONFIG = ("jitter", "expert_size", "draft_agreement")
"""Fields of SyntheticShape that config.json does not have, and that may be 0."""
_CONFIG_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_dense_layers": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_heads": "num_attention_heads",
    "experts_per_token": "num_experts_per_tok",
    "context_length": "max_position_embeddings",
}
"""The names that some sizes have in config.json, by their names here."""
_WORD_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -"


@dataclass(frozen=True)
class SyntheticShape:
    """Dimensions of the checkpoint; the defaults of attention are DeepSeek-V3.2's."""

    num_layers: int = 4
    num_experts: int = 8
    hidden_size: int = 2048
    vocab_size: int = 32768
    context_length: int = 131072
    jitter: float = 0.27
    num_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    expert_size: int = 0
    """Width inside an expert; 0: an eighth of ``hidden_size``."""
    experts_per_token: int = 2
    draft_agreement: float | None = None
    """Share of an MTP layer's guesses that are right; None: no MTP layer."""
    num_dense_layers: int = 1
    """First layers, whose feed-forward has no experts."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in _NOT_IN_CONFIG and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is {self.jitter}; expected a share of the variance, 0 to 1")
        if not 0 <= (self.draft_agreement or 0) <= 1:
            raise ValueError(f"draft_agreement is {self.draft_agreement}; expected a share, 0 to 1")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers is {self.num_dense_layers}; expected at most the {self.num_layers} of "
                "num_layers"
            )
        if self.num_experts < self.experts_per_token:
            raise ValueError(
                f"num_experts is {self.num_experts}; expected at least {self.experts_per_token}, which each "
                "token uses"
            )
        if self.vocab_size < (least := NUM_BYTES + len(SPECIAL_TOKENS)):
            raise ValueError(
                f"vocab_size is {self.vocab_size}; expected at least {least}: bytes and specials"
            )
        for name in ("index_n_heads", "qk_rope_head_dim"):
            if getattr(self, name) % 2:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected an even number: it comes in pairs"
                )
        if self.index_head_dim <= self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim is {self.index_head_dim}; expected more than the {self.qk_rope_head_dim} "
                "of qk_rope_head_dim"
            )

    @property
    def expert_dim(self) -> int:
        return self.expert_size or max(16, self.hidden_size // 8)


def write_synthetic(
    out_dir: Path,
    shape: SyntheticShape,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    in_fp8: bool = False,
    in_int4: bool = False,
) -> int:
    """Write config, bfloat16 weights (a file a layer) and tokenizer to ``out_dir``, made when missing.

    ``in_fp8``: write in fp8 what ``tools.checkpoints.quantize_fp8`` would; ``in_int4``: write routed experts
    in four bits. The same ``seed`` gives the same
    weights on the same device type. Returns the bytes of the weights. Raises ValueError where ``out_dir``
    already has weights, which would be loaded with the new ones.
    """
    from safetensors.torch import save_file

    if stale := sorted(out_dir.glob("*.safetensors")):
        raise ValueError(f"{stale[0]} exists already; give an empty directory, or remove the old checkpoint")
    write_synthetic_config(out_dir, shape, in_fp8=in_fp8, in_int4=in_int4)
    form = StoredForm(has_fp8=in_fp8)
    maker = _Maker(shape, seed, torch.device(device))
    weight_map: dict[str, str] = {}
    num_bytes = 0
    num_layers = shape.num_layers + (shape.draft_agreement is not None)
    for number in range(-1, num_layers):  # -1 stands for the weights outside layers
        file = f"model-{number + 2:05}-of-{num_layers + 1:05}.safetensors"
        weights: dict[str, Tensor] = {}
        drawn = maker.ends() if number < 0 else maker.layer(number)
        for name, value in drawn.items():
            if in_int4 and quantize_int4.is_quantized(name, value, form):
                weights |= quantize_int4.quantized(name, value, form)
            elif in_fp8 and is_quantized(name, value):
                weights |= quantized(name, value)
            else:
                weights[name] = value.to(torch.bfloat16).cpu().contiguous()
        save_file(weights, out_dir / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(weights, file)
        num_bytes += sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (out_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return num_bytes


def write_synthetic_config(
    out_dir: Path, shape: SyntheticShape, *, in_fp8: bool = False, in_int4: bool = False
) -> None:
    """Write only configuration and tokenizer to ``out_dir``, made when missing. Raises ValueError if a width
    is no multiple of an int4 group."""
    form = StoredForm(has_fp8=in_fp8)
    for name in ("hidden_size", "expert_dim"):
        if in_int4 and (size := getattr(shape, name)) % form.group_size:
            raise ValueError(f"{name} is {size}; experts in int4 need a multiple of {form.group_size}")
    write_config(out_dir, _config(shape) | _quantization(in_fp8=in_fp8, in_int4=in_int4))
    _write_tokenizer(out_dir, shape.vocab_size, shape.context_length)


def _quantization(*, in_fp8: bool, in_int4: bool, rounds_tokens: bool = False) -> dict[str, Any]:
    """Return what config.json has of the weights' format."""
    if in_int4:
        form = StoredForm(has_fp8=in_fp8, rounds_tokens=rounds_tokens)
        return {"quantization_config": quantize_int4.quantization_of(form)}
    return {"quantization_config": QUANTIZATION} if in_fp8 else {}


def write_published(
    out_dir: Path,
    model_type: str,
    *,
    in_fp8: bool = False,
    in_int4: bool = False,
    rounds_tokens: bool = False,
    **changes: Any,
) -> None:
    """Write the configuration of a published model and a tokenizer of its size to ``out_dir``, made when
    missing.

    The configuration is transformers' default for ``model_type``, in bfloat16, with ``changes`` of its text
    part. No weights are written. ``in_fp8``, ``in_int4``: declare the weights that ``write_synthetic`` would
    write so. ``rounds_tokens``: declare, with ``in_int4``, that experts' inputs are rounded to fp8.
    """
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[model_type]()
    text_type = type(whole.get_text_config())
    quantization = _quantization(in_fp8=in_fp8, in_int4=in_int4, rounds_tokens=rounds_tokens)
    format_of_all = {"dtype": "bfloat16", **quantization}
    text_part = text_type(**changes).to_dict() | format_of_all
    has_other_parts = not isinstance(whole, text_type)  # such as a model that takes images
    written = write_config(out_dir, text_part, whole.to_dict() | format_of_all if has_other_parts else None)
    _write_tokenizer(out_dir, written["vocab_size"], written["max_position_embeddings"])


def _config(shape: SyntheticShape) -> dict[str, Any]:
    """Return the values for ``write_config``, whose defaults are DeepSeek-V3.2's, with one dense layer."""
    draft = {} if shape.draft_agreement is None else {"num_nextn_predict_layers": 1}
    sizes = {name: value for name, value in asdict(shape).items() if name not in _NOT_IN_CONFIG}
    return {
        "dtype": "bfloat16",
        "intermediate_size": 2 * shape.hidden_size,
        "moe_intermediate_size": shape.expert_dim,
        "n_shared_experts": 1,
        **{_CONFIG_NAMES.get(name, name): value for name, value in sizes.items()},
        **draft,
    }


def shared_query(normal: Callable[[int], Tensor], head_dim: int, rope_dim: int, norm: float) -> Tensor:
    """Draw the part that all tokens' indexer queries have in common: [head_dim], with this ``norm``.

    RoPE comes first and pairs element i with i + half; pair i turns by theta ** (-i / half) a token.
    ``normal`` draws normal values.
    """
    half = rope_dim // 2
    drawn = normal(rope_dim)
    angles = _ROPE_THETA ** (-torch.arange(half, device=drawn.device) / half)
    drifting = drawn * (2 * math.pi / angles >= MIN_PERIOD).repeat(2)
    lasting = normal(head_dim - rope_dim)
    parts = [part / part.norm().clamp_min(1e-9) for part in (drifting, lasting)]
    shared = torch.cat(parts)
    return shared.mul_(norm / float(shared.norm()))


class _Maker:
    """Draws the weights in a fixed order, float32 on ``device``. Inputs of layers have unit variance."""

    def __init__(self, shape: SyntheticShape, seed: int, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        # The circle draws from its own, so that all other weights are those of a model without drafts.
        self._circle_generator = torch.Generator(device).manual_seed(seed)

    def ends(self) -> dict[str, Tensor]:
        """Return embedding, final norm and LM head."""
        shape = self._shape
        embedding = self._normal(shape.vocab_size, shape.hidden_size)
        embedding[:, 0] = CONSTANT
        head = self._from_hidden(shape.vocab_size, 4.0)
        # Words only: a single byte may show no text, and the end of the sequence would cut answers short.
        dislike = torch.zeros(shape.vocab_size, device=self._device)
        dislike[shape.vocab_size - len(SPECIAL_TOKENS) :] = -40.0
        if shape.vocab_size > NUM_BYTES + len(SPECIAL_TOKENS):
            dislike[:NUM_BYTES] = -40.0
        head[:, 0] = dislike / CONSTANT
        if shape.draft_agreement is not None:
            self._add_circle(embedding, head, shape.draft_agreement)
        return {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": torch.ones(shape.hidden_size),
            "lm_head.weight": head,
        }

    def _add_circle(self, embedding: Tensor, head: Tensor, share: float) -> None:
        """Arrange all words in a circle and let the head say the next one behind ``share`` of them."""
        first = NUM_BYTES if self._shape.vocab_size > NUM_BYTES + len(SPECIAL_TOKENS) else 0
        num_words = self._shape.vocab_size - len(SPECIAL_TOKENS) - first
        generator, device = self._circle_generator, self._device
        circle = first + torch.randperm(num_words, generator=generator, device=device)
        is_followed = torch.rand(num_words, generator=generator, device=device) < share
        # The head's row of a next word gets the embedding of the word before, but for the constant channel.
        before = embedding[circle[is_followed]] * (CIRCLE_GAIN / self._shape.hidden_size)
        before[:, 0] = 0
        head[circle.roll(-1)[is_followed]] += before

    def layer(self, number: int) -> dict[str, Tensor]:
        """Return the weights of a layer; the one behind all others is the MTP layer."""
        shape = self._shape
        weights = self._attention() | self._indexer()
        if number < shape.num_dense_layers:
            weights |= self._mlp("mlp", 2 * shape.hidden_size)
        else:
            weights |= {
                "mlp.gate.weight": self._from_hidden(shape.num_experts, 2.0),
                "mlp.gate.e_score_correction_bias": torch.zeros(shape.num_experts),
            }
            for name in (*(f"experts.{expert}" for expert in range(shape.num_experts)), "shared_experts"):
                weights |= self._mlp(f"mlp.{name}", shape.expert_dim)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if number == shape.num_layers:
            # The layer's input is the sum of the embedding, from which the head reads the guess, and of the
            # hidden state times a random matrix, which keeps its variance and in which no word can be read.
            mixed = self._to_hidden(shape.hidden_size, 1.0)
            mixed[:, 0] = 0
            weights["eh_proj.weight"] = torch.cat(
                (torch.eye(shape.hidden_size, device=self._device), mixed), 1
            )
            norms += ["enorm", "hnorm", "shared_head.norm"]
        for name in norms:
            weights[f"{name}.weight"] = torch.ones(shape.hidden_size)
        return {f"model.layers.{number}.{name}": value for name, value in weights.items()}

    def _attention(self) -> dict[str, Tensor]:
        shape = self._shape
        q_a = self._from_hidden(shape.q_lora_rank)
        q_a[0] = 0  # SHARED_QUERY takes the place of element 0
        q_a[0, 0] = SHARED_QUERY / CONSTANT
        # Logits with a standard deviation of 2 to 3 spread attention over some tens of the selected tokens.
        q_b = self._matrix(
            shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim), shape.q_lora_rank, 2.5
        )
        q_b[:, 0] = 0  # attention does not read SHARED_QUERY
        kv_b = self._matrix(shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank)
        weights = {
            "q_a_proj.weight": q_a,
            "q_a_layernorm.weight": torch.ones(shape.q_lora_rank),
            "q_b_proj.weight": q_b,
            "kv_a_proj_with_mqa.weight": self._from_hidden(shape.kv_lora_rank + shape.qk_rope_head_dim),
            "kv_a_layernorm.weight": torch.ones(shape.kv_lora_rank),
            "kv_b_proj.weight": kv_b,
            "o_proj.weight": self._to_hidden(shape.num_heads * shape.v_head_dim, 0.5),
        }
        return {f"self_attn.{name}": value for name, value in weights.items()}

    def _indexer(self) -> dict[str, Tensor]:
        """Return the indexer's weights.

        Heads come in pairs of opposite sign in query and weight: relu(a) - relu(-a) = a, so that the score is
        the mean of the pairs' dot products. Each pair's query is a random part, which depends on the token,
        and the part that all tokens share. The mean over pairs leaves the random part a variance of
        ``jitter``.
        """
        shape = self._shape
        num_pairs = shape.index_n_heads // 2
        random_gain = math.sqrt(shape.jitter * num_pairs / shape.index_head_dim)
        heads = self._matrix(num_pairs * shape.index_head_dim, shape.q_lora_rank, random_gain)
        heads = heads.view(num_pairs, shape.index_head_dim, shape.q_lora_rank)
        shared = shared_query(
            self._normal, shape.index_head_dim, shape.qk_rope_head_dim, math.sqrt(1 - shape.jitter)
        )
        heads[:, :, 0] = shared / SHARED_QUERY
        signs = torch.tensor([1.0, -1.0], device=self._device)
        wq_b = (heads[:, None] * signs[None, :, None, None]).reshape(-1, shape.q_lora_rank)
        head_weights = torch.zeros((shape.index_n_heads, shape.hidden_size), device=self._device)
        head_weights[:, 0] = signs.repeat(num_pairs) / CONSTANT
        weights = {
            "wq_b.weight": wq_b,
            "wk.weight": self._from_hidden(shape.index_head_dim),
            "k_norm.weight": torch.ones(shape.index_head_dim),
            "k_norm.bias": torch.zeros(shape.index_head_dim),
            "weights_proj.weight": head_weights,
        }
        return {f"self_attn.indexer.{name}": value for name, value in weights.items()}

    def _mlp(self, prefix: str, width: int) -> dict[str, Tensor]:
        return {
            f"{prefix}.gate_proj.weight": self._from_hidden(width),
            f"{prefix}.up_proj.weight": self._from_hidden(width),
            f"{prefix}.down_proj.weight": self._to_hidden(width, 0.5),
        }

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._generator, device=self._device)

    def _matrix(self, num_out: int, num_in: int, gain: float = 1.0) -> Tensor:
        """Return a matrix that turns inputs of unit variance into outputs of standard deviation ``gain``."""
        return self._normal(num_out, num_in).mul_(gain / math.sqrt(num_in))

    def _from_hidden(self, num_out: int, gain: float = 1.0) -> Tensor:
        """Return a ``_matrix`` that does not read the constant channel."""
        drawn = self._matrix(num_out, self._shape.hidden_size, gain)
        drawn[:, 0] = 0
        return drawn

    def _to_hidden(self, num_in: int, gain: float) -> Tensor:
        """Return a ``_matrix`` that does not write to the constant channel."""
        drawn = self._matrix(self._shape.hidden_size, num_in, gain)
        drawn[0] = 0
        return drawn


def _write_tokenizer(out_dir: Path, vocab_size: int, context_length: int) -> None:
    """Write a byte-level tokenizer: bytes, words of two or more printable characters, special tokens.

    Each word is a stem and one of the 64 characters behind it. Stems are first the characters, then the words
    in their order, so that a word's merge needs only tokens before it.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    shown = byte_characters()
    characters = [shown[ord(character)] for character in _WORD_CHARACTERS]
    num_words = vocab_size - NUM_BYTES - len(SPECIAL_TOKENS)
    words: list[str] = []
    merges: list[tuple[str, str]] = []
    for number in range(num_words):
        stem, last = divmod(number, len(characters))
        before = characters[stem] if stem < len(characters) else words[stem - len(characters)]
        words.append(before + characters[last])
        merges.append((before, characters[last]))
    vocab = {token: token_id for token_id, token in enumerate((*shown, *words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    save_tokenizer(tokenizer, out_dir, context_length)


OPTIONS = {
    "layers": ("num_layers", "number of layers, each with its indexer"),
    "dense-layers": ("num_dense_layers", "number of first layers without experts"),
    "experts": ("num_experts", "number of routed experts in a layer"),
    "hidden": ("hidden_size", "width of the hidden state"),
    "vocab": ("vocab_size", "tokens of the vocabulary"),
    "context": ("context_length", "most tokens of a request"),
    "jitter": (
        "jitter",
        "share of the indexer's scores that depends on the newest token alone: 1 has no locality",
    ),
    "expert-size": ("expert_size", "width inside an expert; 0: an eighth of --hidden"),
    "experts-per-token": ("experts_per_token", "routed experts of a layer that each token uses"),
    "draft": (
        "draft_agreement",
        "share of right guesses of an MTP layer, which is added; None: no MTP layer",
    ),
}
"""The command's options, each with its field of SyntheticShape and its help."""


def main(arguments: list[str] | None = None) -> None:
    default = SyntheticShape()
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoints.make_synthetic",
        description="Write a synthetic checkpoint with DeepSeek-V3.2's attention dimensions.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write, made when missing")
    for option, (field, about) in OPTIONS.items():
        value = getattr(default, field)
        kind = float if value is None else type(value)
        parser.add_argument(f"--{option}", dest=field, type=kind, help=f"{about} (default: {value})")
    parser.add_argument(
        "--published",
        choices=tuple(FAMILIES),
        default=None,
        help="write only configuration and tokenizer, with transformers' sizes for this model type",
    )
    parser.add_argument("--fp8", action="store_true", default=False, help="write matrices in fp8 with scales")
    parser.add_argument(
        "--int4",
        action="store_true",
        default=False,
        help="write routed experts in four bits, in groups of 128",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument(
        "--device", default="cpu", help="device that draws the weights, on which they depend (default: cpu)"
    )
    options = parser.parse_args(arguments)
    if options.published:
        layers = {"num_hidden_layers": options.num_layers} if "num_layers" in options else {}
        in_formats = {"in_fp8": options.fp8, "in_int4": options.int4}
        write_published(options.out, options.published, **in_formats, **layers)
        print(f"wrote configuration and tokenizer of {options.published} to {options.out}")
        return
    started = time.monotonic()
    try:
        given = vars(options)
        shape = SyntheticShape(**{field: given[field] for field, _ in OPTIONS.values() if field in given})
        num_bytes = write_synthetic(
            options.out, shape, options.seed, options.device, in_fp8=options.fp8, in_int4=options.int4
        )
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {num_bytes / 1e9:.2f} GB to {options.out} in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
