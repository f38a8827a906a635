"""The facts about a checkpoint that the service needs, read without loading its weights.

``load_spec`` reads a ``ModelSpec`` at the start of an engine, of a front and of the doctor. Everything that
depends on a model's shape, from pools to kernels, takes its numbers from it. A layer may share its indexer's
selection, its KV and its hot buffers with others; ``layer_sharing.py`` explains the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model.checkpoint_config import (
    UE8M0,
    cache_format_of,
    compute_dtype_of,
    eos_token_ids_of,
    fingerprinted,
    index_groups_of,
    int4_of,
    kv_source_layers_of,
    num_draft_layers_of,
    positive_integer,
    read_config,
)
from hisparse_pd.core.model.families import FAMILIES, Family
from hisparse_pd.core.model.int4_config import Int4Config
from hisparse_pd.core.model.layer_sharing import (
    fill_schedule,
    hot_groups,
    kv_layers_by_hot_group,
    layers_by_group,
    numbered,
)
from hisparse_pd.core.model.stored_weights import fingerprint_of, weight_files
from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hadamard import takes_dim
from hisparse_pd.kernels.kv_format import FP8_E4M3, IndexKeyFormat, KvFormat
from hisparse_pd.protocol.messages import ROW_CHECK_BYTES, Geometry

HADAMARD = "hadamard"
"""The ``index_rotation`` of fp8 indexer keys."""
DUMMY = "dummy"
"""The ``load_format`` for weights that are drawn instead of read."""


@dataclass(frozen=True)
class ModelSpec:
    """Shapes, dtypes and identity of one checkpoint as this node runs it."""

    model_type: str
    num_layers: int
    index_group_of_layer: tuple[int, ...]
    """Index group of each layer, the draft layer among them. A layer with an indexer and the layers behind it
    that share its selection are one group; the draft layer is a group of its own, the last one.
    """
    num_heads: int
    kv_lora_rank: int
    """Size of the latent, the first part of a KV item."""
    qk_rope_head_dim: int
    """Size of the rotated key, the other part."""
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    """Most positions that a token attends to in a layer."""
    context_length: int
    """Most tokens of a request's prompt and output together."""
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of weights and activations."""
    kv_format: str
    """Format of KV items in the pools: a name of ``kernels.kv_format``."""
    index_format: str
    """Format of indexer keys in the pools: a name of ``kernels.kv_format``."""
    weights_are_fp8: bool
    """Whether the checkpoint's matrices are in fp8 with a scale for each block (``kernels.block_fp8``); if it
    has ``int4``, whether some of them are."""
    fingerprint: str
    """Identity of configuration and weights: equal on two nodes exactly when they run the same model."""
    kv_source_layers: tuple[int, ...] = ()
    """The layer whose KV each of ``num_layers`` attends to; empty where each attends to its own."""
    num_draft_layers: int = 0
    """1 when this node runs the model's MTP layer, as layer ``num_layers``; else 0."""
    shares_draft_selection: bool = False
    """Whether the MTP layer was trained to reuse the first draft's selection for a request's later drafts."""
    scales_are_ue8m0: bool = False
    """Whether the scales of activations that are rounded to fp8 are powers of two."""
    int4: Int4Config | None = None
    """How weights in four bits are packed, and which modules have them; None where no weights are."""
    weights_are_dummy: bool = False
    """Whether weights are drawn instead of read (``hisparse_pd.core.model.dummy_weights``)."""
    has_row_checks: bool = False
    """Whether this node keeps a check of each KV item (``kernels.row_check``)."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @cached_property
    def kv_layer_of_layer(self) -> tuple[int, ...]:
        """The layer of the KV pools that each layer attends to, the draft layer among them."""
        owners = numbered(self.kv_source_layers or range(self.num_layers))
        num_owners = max(owners) + 1
        return (*owners, *range(num_owners, num_owners + self.num_draft_layers))

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pools: the layers with KV of their own, and the draft layer behind them."""
        return max(self.kv_layer_of_layer) + 1

    @property
    def num_index_layers(self) -> int:
        """Layers with an indexer of their own, the draft layer not counted."""
        return self.index_group_of_layer[self.num_layers - 1] + 1

    @property
    def num_index_groups(self) -> int:
        """Index groups that the pools hold keys of: one for each index layer, and the draft layer's."""
        return self.index_group_of_layer[-1] + 1

    @cached_property
    def layers_of_group(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each index group; the first one has the indexer."""
        return layers_by_group(self.index_group_of_layer)

    @cached_property
    def hot_group_of_index_group(self) -> tuple[int, ...]:
        """The hot group of each index group. Index groups of one hot group share tables of hot buffers."""
        return hot_groups(self.index_group_of_layer, self.kv_layer_of_layer)

    @property
    def num_hot_groups(self) -> int:
        return max(self.hot_group_of_index_group) + 1

    @cached_property
    def kv_layers_of_hot_group(self) -> tuple[tuple[int, ...], ...]:
        """The layers of the KV pools in which each hot group's entries have items."""
        return kv_layers_by_hot_group(
            self.index_group_of_layer, self.kv_layer_of_layer, self.hot_group_of_index_group
        )

    @cached_property
    def kv_layers_filled_at(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the KV layers into which its index group's misses are copied just before it
        attends."""
        return fill_schedule(
            self.layers_of_group,
            self.kv_layer_of_layer,
            [self.kv_layers_of_hot_group[group] for group in self.hot_group_of_index_group],
        )

    @property
    def item_dim(self) -> int:
        """Elements of one token's KV in one layer: the latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @cached_property
    def item_format(self) -> KvFormat:
        """The layout of a KV item's bytes in the pools."""
        return KvFormat(self.kv_format, self.kv_lora_rank, self.qk_rope_head_dim)

    @cached_property
    def index_key_format(self) -> IndexKeyFormat:
        """The layout of an indexer key's bytes in the pools."""
        return IndexKeyFormat(self.index_format, self.index_head_dim)

    @property
    def item_bytes(self) -> int:
        """Bytes of one token's KV in one layer."""
        return self.item_format.item_bytes

    @property
    def index_item_bytes(self) -> int:
        """Bytes of one token's indexer key in one index layer."""
        return self.index_key_format.item_bytes

    @property
    def row_check_bytes(self) -> int:
        """Bytes of one token's row checks in all layers."""
        return ROW_CHECK_BYTES * self.num_kv_layers if self.has_row_checks else 0

    @property
    def index_rotation(self) -> str:
        """The rotation of indexer keys in the pools: "" or HADAMARD."""
        return HADAMARD if self.index_format == FP8_E4M3 else ""

    def geometry(self, page_size: int, attention_split_tile_size: int | None = None) -> Geometry:
        """Return what two nodes must have in common. Formats of indexer keys show in ``index_item_bytes``."""
        return Geometry(
            model_fingerprint=self.fingerprint,
            dtype=self.kv_format,
            num_layers=self.num_kv_layers - self.num_draft_layers,  # with KV of their own
            num_index_layers=self.num_index_layers,
            item_bytes=self.item_bytes,
            index_item_bytes=self.index_item_bytes,
            index_topk=self.index_topk,
            page_size=page_size,
            num_draft_layers=self.num_draft_layers,
            index_rotation=self.index_rotation,
            has_row_checks=self.has_row_checks,
            attention_split_tile_size=attention_split_tile_size,
        )


def load_spec(
    model_path: Path | str,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    context_length: int = 0,
    *,
    device: str = "cpu",
    indexer_cache_dtype: str = "auto",
    num_draft_layers: int | None = None,
    load_format: str = "auto",
    has_row_checks: bool = True,
) -> ModelSpec:
    """Read the spec of the checkpoint in ``model_path``.

    ``dtype``: "auto" is float32 on the CPU and the checkpoint's own elsewhere. ``kv_cache_dtype``: "auto" is
    ``dtype``. ``indexer_cache_dtype``: "auto" is ``kv_cache_dtype``. ``context_length``: at most the model's;
    0 is the model's. ``num_draft_layers``: 0 or 1; None is 1 where the checkpoint has MTP layers, of which
    the first is used. ``load_format``: "auto", or DUMMY to draw the weights and need no file of them.
    ``has_row_checks``: as in the spec. Raises CheckpointError.
    """
    path = Path(model_path)
    config = read_config(path)
    is_dummy = load_format == DUMMY
    files = [] if is_dummy else weight_files(path)
    num_layers = positive_integer(config, path, "num_hidden_layers")
    num_draft_layers = num_draft_layers_of(config, path, None if is_dummy else files, num_draft_layers)
    groups = index_groups_of(config, path, num_layers)
    sources = kv_source_layers_of(config, path, num_layers)
    compute_dtype = compute_dtype_of(config, dtype, device)
    kv_format = cache_format_of("kv_cache_dtype", kv_cache_dtype, str(compute_dtype).removeprefix("torch."))
    quantization = config.get("quantization_config") or {}
    int4 = int4_of(config, path)
    spec = ModelSpec(
        model_type=config["model_type"],
        num_layers=num_layers,
        index_group_of_layer=groups + (groups[-1] + 1,) * num_draft_layers,
        num_heads=positive_integer(config, path, "num_attention_heads"),
        kv_lora_rank=positive_integer(config, path, "kv_lora_rank"),
        qk_rope_head_dim=positive_integer(config, path, "qk_rope_head_dim"),
        index_num_heads=positive_integer(config, path, "index_n_heads"),
        index_head_dim=positive_integer(config, path, "index_head_dim"),
        index_topk=positive_integer(config, path, "index_topk"),
        context_length=_context_length(config, path, context_length),
        hidden_size=positive_integer(config, path, "hidden_size"),
        vocab_size=positive_integer(config, path, "vocab_size"),
        eos_token_ids=eos_token_ids_of(config, path),
        dtype=compute_dtype,
        kv_format=kv_format,
        index_format=cache_format_of("indexer_cache_dtype", indexer_cache_dtype, kv_format),
        weights_are_fp8=bool(quantization) if int4 is None else int4.has_fp8,
        fingerprint=fingerprint_of(
            fingerprinted(config) | ({"load_format": DUMMY} if is_dummy else {}), files
        ),
        kv_source_layers=() if sources == tuple(range(num_layers)) else sources,
        num_draft_layers=num_draft_layers,
        shares_draft_selection=bool(config.get("index_share_for_mtp_iteration")),
        scales_are_ue8m0=quantization.get("scale_fmt") == UE8M0,
        int4=int4,
        weights_are_dummy=is_dummy,
        has_row_checks=has_row_checks,
    )
    _check_formats(spec, path)
    return spec


def _context_length(config: dict[str, Any], path: Path, wanted: int) -> int:
    model_context = positive_integer(config, path, "max_position_embeddings")
    if wanted > model_context:
        raise CheckpointError(f"--context-length {wanted}: the model in {path} has {model_context} at most")
    return wanted or model_context


def _check_formats(spec: ModelSpec, path: Path) -> None:
    """Raise CheckpointError for items or keys that their format in the pools cannot store."""
    try:
        _ = spec.item_format
    except KernelArgumentError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}; give --kv-cache-dtype bfloat16") from None
    dim = spec.index_head_dim
    if spec.index_format == FP8_E4M3 and not (takes_dim(dim) and dim >= 4):
        raise CheckpointError(
            f"{path / 'config.json'}: index_head_dim is {dim}; indexer keys in fp8_e4m3 are rotated by a "
            "Hadamard matrix, which takes powers of two from 4 on; give --indexer-cache-dtype bfloat16"
        )
