"""What the rest of the service needs to know about a checkpoint, read without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model.checkpoint_config import (
    UE8M0,
    cache_format_of,
    compute_dtype_of,
    eos_token_ids_of,
    index_groups_of,
    kv_source_layers_of,
    lasting,
    num_draft_layers_of,
    positive_integer,
    read_config,
)
from hisparse_pd.core.model.families import FAMILIES, Family
from hisparse_pd.core.model.stored_weights import fingerprint_of, weight_files
from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hadamard import takes_dim
from hisparse_pd.kernels.kv_format import FP8_E4M3, IndexKeyFormat, KvFormat
from hisparse_pd.protocol.messages import ROW_CHECK_BYTES, Geometry

HADAMARD = "hadamard"
"""An ``index_rotation``."""
DUMMY = "dummy"
"""A ``load_format``."""


@dataclass(frozen=True)
class ModelSpec:
    """Shapes, dtypes and identity of one checkpoint as this node runs it."""

    model_type: str
    num_layers: int
    index_group_of_layer: tuple[int, ...]
    """Index group of each layer, the draft layer among them: the same number for a layer with an indexer and
    the shared layers behind it. The draft layer has the last group to itself.
    """
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    context_length: int
    """Prompt plus output of a request at most, in tokens."""
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    """Of weights and activations."""
    kv_format: str
    """Of KV items in the pools: a name of ``kernels.kv_format``."""
    index_format: str
    """Of indexer keys in the pools: a name of ``kernels.kv_format``."""
    weights_are_fp8: bool
    """Whether the checkpoint's matrices are in fp8 with scales of blocks (``kernels.block_fp8``)."""
    fingerprint: str
    """Identity of configuration and weights: equal on two nodes exactly when they run the same model."""
    kv_source_layers: tuple[int, ...] = ()
    """For each of ``num_layers``, the layer whose KV it attends to; empty: each one to KV of its own."""
    num_draft_layers: int = 0
    """1 when this node runs the model's MTP layer, as layer ``num_layers``; else 0."""
    shares_draft_selection: bool = False
    """Whether the MTP layer was trained to make a request's later drafts with the first one's selection."""
    scales_are_ue8m0: bool = False
    """Whether activations that are rounded to meet fp8 matrices have scales that are powers of two."""
    weights_are_dummy: bool = False
    """Whether weights are drawn instead of read (``hisparse_pd.core.model.dummy_weights``)."""
    has_row_checks: bool = False
    """Whether this node keeps a check of each KV item (``kernels.row_check``)."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @cached_property
    def kv_layer_of_layer(self) -> tuple[int, ...]:
        """The layer of the KV pools that each layer attends to, the draft layer among them. A layer that
        attends to another one's KV has none in the pools."""
        sources = self.kv_source_layers or tuple(range(self.num_layers))
        owners = sorted(set(sources))
        drafts = range(len(owners), len(owners) + self.num_draft_layers)
        return (*(owners.index(source) for source in sources), *drafts)

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pools: those of the model that have KV, and the draft layer behind them."""
        return max(self.kv_layer_of_layer) + 1

    @property
    def num_index_layers(self) -> int:
        """Layers of the model with an indexer of their own, which is also the number of its index groups."""
        return self.index_group_of_layer[self.num_layers - 1] + 1

    @property
    def num_index_groups(self) -> int:
        """Index groups that the pools hold keys of: the model's, and the draft layer's."""
        return self.index_group_of_layer[-1] + 1

    @cached_property
    def layers_of_group(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each index group; the first one has the indexer."""
        return tuple(
            tuple(layer for layer, of in enumerate(self.index_group_of_layer) if of == group)
            for group in range(self.num_index_groups)
        )

    @cached_property
    def hot_group_of_index_group(self) -> tuple[int, ...]:
        """Which tables of hot buffers serve each index group: those that attend to KV in common share them.

        An entry is one slot in all of a hot group's KV layers, so that each of its index groups finds there
        what another one brought.
        """
        labels = list(range(self.num_index_groups))
        readers: dict[int, int] = {}
        for kv_layer, group in zip(self.kv_layer_of_layer, self.index_group_of_layer, strict=True):
            merged = {labels[group], labels[readers.setdefault(kv_layer, group)]}
            labels = [min(merged) if label in merged else label for label in labels]
        numbers = sorted(set(labels))
        return tuple(numbers.index(label) for label in labels)

    @property
    def num_hot_groups(self) -> int:
        return max(self.hot_group_of_index_group) + 1

    @cached_property
    def kv_layers_of_hot_group(self) -> tuple[tuple[int, ...], ...]:
        """The layers of the KV pools that each hot group's entries are slots of."""
        layers: list[set[int]] = [set() for _ in range(self.num_hot_groups)]
        for kv_layer, group in zip(self.kv_layer_of_layer, self.index_group_of_layer, strict=True):
            layers[self.hot_group_of_index_group[group]].add(kv_layer)
        return tuple(tuple(sorted(of_group)) for of_group in layers)

    @cached_property
    def kv_layers_filled_at(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the KV layers that get the misses of its index group's selection before it attends.

        Each KV layer of the hot group gets them once: where a layer of the index group first attends to it,
        and at the group's first layer where none does.
        """
        filled: list[tuple[int, ...]] = []
        for group, layers in enumerate(self.layers_of_group):
            read = [self.kv_layer_of_layer[layer] for layer in layers]
            of_hot_group = self.kv_layers_of_hot_group[self.hot_group_of_index_group[group]]
            unread = tuple(kv_layer for kv_layer in of_hot_group if kv_layer not in read)
            filled.append((read[0], *unread))
            filled += [(own,) if own not in read[:at] else () for at, own in enumerate(read) if at]
        return tuple(filled)

    @property
    def item_dim(self) -> int:
        """Elements of one token's KV in one layer: the latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @cached_property
    def item_format(self) -> KvFormat:
        """How a KV item becomes bytes in the pools."""
        return KvFormat(self.kv_format, self.kv_lora_rank, self.qk_rope_head_dim)

    @cached_property
    def index_key_format(self) -> IndexKeyFormat:
        """How an indexer key becomes bytes in the pools."""
        return IndexKeyFormat(self.index_format, self.index_head_dim)

    @property
    def item_bytes(self) -> int:
        """Of one token's KV in one layer."""
        return self.item_format.item_bytes

    @property
    def index_item_bytes(self) -> int:
        """Of one token's indexer key in one index layer."""
        return self.index_key_format.item_bytes

    @property
    def row_check_bytes(self) -> int:
        """Of one token's checks in all layers."""
        return ROW_CHECK_BYTES * self.num_kv_layers if self.has_row_checks else 0

    @property
    def index_rotation(self) -> str:
        """What indexer keys in the pools are rotated by: "" or HADAMARD."""
        return HADAMARD if self.index_format == FP8_E4M3 else ""

    def geometry(self, page_size: int, attention_split_tile_size: int | None = None) -> Geometry:
        """What a peer must agree on. Formats of indexer keys differ in their ``index_item_bytes``."""
        return Geometry(
            model_fingerprint=self.fingerprint,
            dtype=self.kv_format,
            num_layers=self.num_kv_layers - self.num_draft_layers,
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
    ``dtype``. ``indexer_cache_dtype``: "auto" is ``kv_cache_dtype``. ``context_length``: 0 is the model's
    own, and it cannot be more. ``num_draft_layers``: 0 or 1; None is 1 for a checkpoint with an MTP layer, of
    which several may be in it: the first is used. ``load_format``: "auto", or DUMMY for a configuration whose
    weights are drawn, of which no file is needed. ``has_row_checks``: as the spec's. Raises CheckpointError.
    """
    path = Path(model_path)
    config = read_config(path)
    is_dummy = load_format == DUMMY
    files = [] if is_dummy else weight_files(path)
    num_layers = positive_integer(config, path, "num_hidden_layers")
    model_context = positive_integer(config, path, "max_position_embeddings")
    if context_length > model_context:
        raise CheckpointError(
            f"context_length {context_length}: the model in {path} has {model_context} at most"
        )
    compute_dtype = compute_dtype_of(config, dtype, device)
    kv_format = cache_format_of("kv_cache_dtype", kv_cache_dtype, str(compute_dtype).removeprefix("torch."))
    index_format = cache_format_of("indexer_cache_dtype", indexer_cache_dtype, kv_format)
    index_head_dim = positive_integer(config, path, "index_head_dim")
    kv_lora_rank = positive_integer(config, path, "kv_lora_rank")
    rope_head_dim = positive_integer(config, path, "qk_rope_head_dim")
    try:
        KvFormat(kv_format, kv_lora_rank, rope_head_dim)
    except KernelArgumentError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}; give --kv-cache-dtype bfloat16") from None
    if index_format == FP8_E4M3 and not (takes_dim(index_head_dim) and index_head_dim >= 4):
        raise CheckpointError(
            f"{path / 'config.json'}: index_head_dim is {index_head_dim}; indexer keys in fp8_e4m3 are "
            "rotated by a Hadamard matrix, which takes powers of two from 4 on; give "
            "--indexer-cache-dtype bfloat16"
        )
    num_draft_layers = num_draft_layers_of(config, path, None if is_dummy else files, num_draft_layers)
    sources = kv_source_layers_of(config, path, num_layers)
    groups = index_groups_of(config, path, num_layers)
    return ModelSpec(
        model_type=config["model_type"],
        num_layers=num_layers,
        index_group_of_layer=groups + (groups[-1] + 1,) * num_draft_layers,
        num_heads=positive_integer(config, path, "num_attention_heads"),
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=rope_head_dim,
        index_num_heads=positive_integer(config, path, "index_n_heads"),
        index_head_dim=index_head_dim,
        index_topk=positive_integer(config, path, "index_topk"),
        context_length=context_length or model_context,
        hidden_size=positive_integer(config, path, "hidden_size"),
        vocab_size=positive_integer(config, path, "vocab_size"),
        eos_token_ids=eos_token_ids_of(config, path),
        dtype=compute_dtype,
        kv_format=kv_format,
        index_format=index_format,
        weights_are_fp8=bool(config.get("quantization_config")),
        fingerprint=fingerprint_of(lasting(config) | ({"load_format": DUMMY} if is_dummy else {}), files),
        kv_source_layers=() if sources == tuple(range(num_layers)) else sources,
        num_draft_layers=num_draft_layers,
        shares_draft_selection=bool(config.get("index_share_for_mtp_iteration")),
        scales_are_ue8m0=(config.get("quantization_config") or {}).get("scale_fmt") == UE8M0,
        weights_are_dummy=is_dummy,
        has_row_checks=has_row_checks,
    )
