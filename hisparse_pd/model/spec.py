"""What the rest of the service needs to know about a checkpoint, read without loading its weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hisparse_pd.model.families import FAMILIES, Family
from hisparse_pd.vocabulary import CheckpointError
from kernels.block_fp8 import BLOCK
from kernels.hadamard import takes_dim
from kernels.kv_format import FORMAT_NAMES, FP8_E4M3, IndexKeyFormat, KvFormat
from protocol.messages import ROW_CHECK_BYTES, Geometry

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

HADAMARD = "hadamard"
"""An ``index_rotation``."""
DUMMY = "dummy"
"""A ``load_format``."""
UE8M0 = "ue8m0"
"""A ``scale_fmt``: scales have an exponent and no more, so they are powers of two."""

_SAMPLE_BYTES = 64 << 10
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version")


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
    """Whether weights are drawn instead of read (``hisparse_pd.model.dummy_weights``)."""
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

    def geometry(self, page_size: int, sampling_defaults: str = "") -> Geometry:
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
            sampling_defaults=sampling_defaults,
            num_draft_layers=self.num_draft_layers,
            index_rotation=self.index_rotation,
            has_row_checks=self.has_row_checks,
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
    config = _read_config(path)
    is_dummy = load_format == DUMMY
    files = [] if is_dummy else weight_files(path)
    num_layers = _integer(config, path, "num_hidden_layers")
    model_context = _integer(config, path, "max_position_embeddings")
    if context_length > model_context:
        raise CheckpointError(
            f"context_length {context_length}: the model in {path} has {model_context} at most"
        )
    compute_dtype = _compute_dtype(config, dtype, device)
    kv_format = _cache_format("kv_cache_dtype", kv_cache_dtype, str(compute_dtype).removeprefix("torch."))
    index_format = _cache_format("indexer_cache_dtype", indexer_cache_dtype, kv_format)
    index_head_dim = _integer(config, path, "index_head_dim")
    if index_format == FP8_E4M3 and not takes_dim(index_head_dim):
        raise CheckpointError(
            f"{path / 'config.json'}: index_head_dim is {index_head_dim}; indexer keys in fp8_e4m3 are "
            "rotated by a Hadamard matrix, which takes powers of two; give --indexer-cache-dtype bfloat16"
        )
    num_draft_layers = _num_draft_layers(config, path, None if is_dummy else files, num_draft_layers)
    sources = _kv_source_layers(config, path, num_layers)
    groups = _index_groups(config, path, num_layers)
    return ModelSpec(
        model_type=config["model_type"],
        num_layers=num_layers,
        index_group_of_layer=groups + (groups[-1] + 1,) * num_draft_layers,
        num_heads=_integer(config, path, "num_attention_heads"),
        kv_lora_rank=_integer(config, path, "kv_lora_rank"),
        qk_rope_head_dim=_integer(config, path, "qk_rope_head_dim"),
        index_num_heads=_integer(config, path, "index_n_heads"),
        index_head_dim=index_head_dim,
        index_topk=_integer(config, path, "index_topk"),
        context_length=context_length or model_context,
        hidden_size=_integer(config, path, "hidden_size"),
        vocab_size=_integer(config, path, "vocab_size"),
        eos_token_ids=_eos_token_ids(config, path),
        dtype=compute_dtype,
        kv_format=kv_format,
        index_format=index_format,
        weights_are_fp8=bool(config.get("quantization_config")),
        fingerprint=_fingerprint(config | ({"load_format": DUMMY} if is_dummy else {}), files),
        kv_source_layers=() if sources == tuple(range(num_layers)) else sources,
        num_draft_layers=num_draft_layers,
        shares_draft_selection=bool(config.get("index_share_for_mtp_iteration")),
        scales_are_ue8m0=(config.get("quantization_config") or {}).get("scale_fmt") == UE8M0,
        weights_are_dummy=is_dummy,
        has_row_checks=has_row_checks,
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"model_path {path}: no such directory; give a local Hugging Face checkpoint")
    config_file = path / "config.json"
    try:
        config = json.loads(config_file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"model_path {path}: there is no config.json in it") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config_file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_file}: expected a JSON object, got {type(config).__name__}")
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise CheckpointError(f"{config_file}: model_type is {model_type!r}; supported are {supported}")
    _check_quantization(config, config_file)
    # The defaults of the configuration class count too: a checkpoint may leave them out.
    from transformers import AutoConfig

    try:
        resolved = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{config_file}: transformers refuses it: {error}") from error
    # A model that also sees images has what is of the text in a part of its own.
    of_text = {key: value for key, value in resolved.get_text_config().to_dict().items() if value is not None}
    return {**resolved.to_dict(), **of_text, "model_type": model_type}


def _check_quantization(config: dict[str, Any], config_file: Path) -> None:
    """Raises CheckpointError for weights in other formats than the model's dtype and fp8 in blocks."""
    quantization = config.get("quantization_config")
    if not quantization:
        return
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{config_file}: quantization_config is {quantization!r}; expected an object")
    expected: dict[str, tuple[object, ...]] = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", None),
        "weight_block_size": ([BLOCK, BLOCK],),
        "scale_fmt": (UE8M0, None),
    }
    for key, allowed in expected.items():
        if quantization.get(key) not in allowed:
            raise CheckpointError(
                f"{config_file}: quantization_config: {key} is {quantization.get(key)!r}; supported is "
                f"{allowed[0]!r}; convert the checkpoint to bfloat16"
            )


def weight_files(path: Path) -> list[Path]:
    """The files of a checkpoint's weights. Raises CheckpointError when some are missing."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"model_path {path}: there is no *.safetensors file in it")
    index_file = path / "model.safetensors.index.json"
    if index_file.exists():
        try:
            wanted = set(json.loads(index_file.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_file}: cannot be read: {error!r}") from error
        if missing := sorted(wanted - {file.name for file in files}):
            raise CheckpointError(
                f"model_path {path}: {len(missing)} weight files are missing, first {missing[0]}"
            )
    return files


def _integer(config: dict[str, Any], path: Path, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path / 'config.json'}: {key} is {value!r}; expected a positive integer")
    return value


def _index_groups(config: dict[str, Any], path: Path, num_layers: int) -> tuple[int, ...]:
    types = config.get("indexer_types") or ["full"] * num_layers
    where = f"{path / 'config.json'}: indexer_types"
    if len(types) != num_layers:
        raise CheckpointError(
            f"{where} has {len(types)} entries; expected one of each of {num_layers} layers"
        )
    if unknown := sorted(set(types) - {"full", "shared"}):
        raise CheckpointError(f"{where} has {unknown[0]!r}; expected 'full' or 'shared'")
    if types[0] != "full":
        raise CheckpointError(f"{where}: the first layer is 'shared'; it has no selection to share")
    groups: list[int] = []
    for kind in types:
        last_group = groups[-1] if groups else -1
        groups.append(last_group + (kind == "full"))
    return tuple(groups)


def _kv_source_layers(config: dict[str, Any], path: Path, num_layers: int) -> tuple[int, ...]:
    """transformers has checked that each is an earlier layer with KV of its own."""
    sources = tuple(config.get("kv_source_layers") or range(num_layers))
    with_rope = config.get("no_rope_layers") or [1] * num_layers  # 1 where there is rope
    for layer, source in enumerate(sources):
        if bool(with_rope[layer]) != bool(with_rope[source]):
            raise CheckpointError(
                f"{path / 'config.json'}: kv_source_layers: layer {layer} attends to the KV of layer "
                f"{source}, but only one of them has rope in no_rope_layers; expected both or none"
            )
    return sources


def _num_draft_layers(
    config: dict[str, Any], path: Path, files: list[Path] | None, wanted: int | None
) -> int:
    """``wanted``, or what there is. An export may have left the weights out and not what declares them.

    ``files``: None where weights are drawn.
    """
    if wanted not in (None, 0, 1):
        raise CheckpointError(f"num_draft_layers is {wanted}; expected 0 or 1")
    if wanted == 0:
        return 0
    declared = config.get("num_nextn_predict_layers") or 0
    name = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    is_there = declared > 0 and (
        files is None or any(f'"{name}"'.encode() in _header(file) for file in files)
    )
    if wanted and not is_there:
        raise CheckpointError(
            f"model_path {path}: no MTP layer to draft tokens with (num_nextn_predict_layers is {declared}"
            f"{', but there is no ' + name if declared else ''}); use --speculative-num-steps 0"
        )
    return int(is_there)


def _eos_token_ids(config: dict[str, Any], path: Path) -> tuple[int, ...]:
    """Of generation_config.json when it names them, as transformers' generate does, else of config.json."""
    generation_file = path / "generation_config.json"
    eos = config.get("eos_token_id")
    if generation_file.exists():
        try:
            eos = json.loads(generation_file.read_bytes()).get("eos_token_id", eos)
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{generation_file}: cannot be read: {error}") from error
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _compute_dtype(config: dict[str, Any], dtype: str, device: str) -> torch.dtype:
    if dtype != "auto":
        return _named_dtype("dtype", dtype)
    if torch.device(device).type == "cpu":
        return torch.float32
    own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return _named_dtype("dtype of the checkpoint", own)


def _named_dtype(name: str, value: str) -> torch.dtype:
    if value not in DTYPES:
        raise CheckpointError(f"{name} is {value!r}; supported are {', '.join(DTYPES)}")
    return DTYPES[value]


def _cache_format(name: str, value: str, auto: str) -> str:
    """``value``, or what ``auto`` says."""
    if value not in ("auto", *FORMAT_NAMES):
        raise CheckpointError(f"{name} is {value!r}; supported are auto, {', '.join(FORMAT_NAMES)}")
    return auto if value == "auto" else value


def _fingerprint(config: dict[str, Any], weight_files: list[Path]) -> str:
    """Hash of the configuration and, for each weight file, its name, size, header and two samples of its
    data.

    Samples, because a real checkpoint is hundreds of gigabytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    lasting = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    digest.update(json.dumps(lasting, sort_keys=True, default=str).encode())
    for file in weight_files:
        num_bytes = file.stat().st_size
        digest.update(f"{file.name}:{num_bytes}".encode())
        header = _header(file)
        digest.update(header)
        with file.open("rb") as stream:
            stream.seek(8 + len(header))
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(8 + len(header), num_bytes - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _header(file: Path) -> bytes:
    """What a safetensors file says of its tensors, JSON."""
    num_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > num_bytes - 8:
            raise CheckpointError(
                f"{file}: header of {header_bytes} bytes in a file of {num_bytes}; truncated?"
            )
        return stream.read(header_bytes)
