"""Writes the model that both engines run: five layers of DeepSeek-V3.2's width with 32 experts.

    python -m tools.bench.beside_sglang.model --out DIR [--device cuda] [--config-only]

Our engine reads its weights, whose locality sets the hit rate of hot buffers (``--jitter``). SGLang reads the
shapes in config.json and draws its own weights (``guest.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tools.checkpoints.make_synthetic import SyntheticShape, write_synthetic, write_synthetic_config

SGLANG_FIELDS: Final[dict[str, Any]] = {
    "ep_size": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "routed_scaling_factor": 2.5,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
"""Fields of DeepSeek-V3.2's config.json that SGLang reads and a synthetic checkpoint lacks, or has with a
value that changes no shape."""


def shape(
    num_layers: int,
    num_dense_layers: int,
    num_experts: int,
    experts_per_token: int,
    jitter: float,
    draft_agreement: float | None = None,
) -> SyntheticShape:
    return SyntheticShape(
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        num_experts=num_experts,
        hidden_size=7168,
        expert_size=2048,
        experts_per_token=experts_per_token,
        context_length=163840,
        jitter=jitter,
        draft_agreement=draft_agreement,
    )


def tokens_of_step(num_drafts: int, draft_agreement: float | None) -> float:
    """Return the mean number of tokens that a step makes of a request. ``draft_agreement``: the probability
    that a draft behind right ones is right; None: no draft is ever right."""
    return sum((draft_agreement or 0.0) ** number for number in range(num_drafts + 1))


def write_model(directory: Path, of: SyntheticShape, device: str, *, with_weights: bool = True) -> None:
    """Write configuration, tokenizer and weights in fp8 to ``directory``, made when missing."""
    if with_weights:
        write_synthetic(directory, of, device=device, in_fp8=True)
    else:
        write_synthetic_config(directory, of, in_fp8=True)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | SGLANG_FIELDS
    config["num_nextn_predict_layers"] = int(of.draft_agreement is not None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``shape``, which the whole comparison (``__main__.py``) passes on to this module."""
    parser.add_argument("--layers", type=int, default=5, help="layers of the model")
    parser.add_argument("--dense-layers", type=int, default=1, help="first layers, which have no experts")
    parser.add_argument("--experts", type=int, default=32, help="routed experts of a layer")
    parser.add_argument("--experts-per-token", type=int, default=1, help="routed experts of a token")
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.10,
        help="share of the index scores' variance that changes with every token; sets our hit rate",
    )
    parser.add_argument(
        "--draft-agreement",
        type=float,
        help="share of the MTP layer's guesses that are right; default: no layer",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, made when missing")
    parser.add_argument("--device", default="cuda", help="where weights are drawn")
    parser.add_argument("--config-only", action="store_true", help="write no weights")
    add_shape_options(parser)
    options = parser.parse_args(argv)
    of = shape(
        options.layers,
        options.dense_layers,
        options.experts,
        options.experts_per_token,
        options.jitter,
        options.draft_agreement,
    )
    started = time.perf_counter()
    write_model(options.out, of, options.device, with_weights=not options.config_only)
    print(f"wrote {options.out} in {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
