"""Options of how a node runs, which ``tools.bench.decode_step`` and ``tools.bench.whole_node`` share."""

from __future__ import annotations

import argparse

import torch

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.core.model.spec import ModelSpec, load_spec
from tools.bench.step_bench import MODES
from tools.bench.step_prompt import PAGE_SIZE


class _Settings(DecodeSettings):
    """Settings of a decode node that captures only the graph of the measured batch."""

    @property
    def graph_batches(self) -> list[int]:
        return [] if self.cuda_graph_max_bs == 0 else [self.max_running_requests]


def make_settings(arguments: argparse.Namespace, batch: int, num_drafts: int = 0) -> DecodeSettings:
    names = ("model_path", "device", "dtype", "kv_cache_dtype", "indexer_cache_dtype", "attention_backend")
    more = ("attention_split_tile_size", "micro_batch_min_bs", "load_format")
    return _Settings(
        **{name: getattr(arguments, name) for name in (*names, *more)},
        device_buffer_size=arguments.buffer,
        page_size=PAGE_SIZE,
        max_running_requests=batch,
        cuda_graph_max_bs=0 if arguments.no_graphs else None,
        speculative_num_steps=num_drafts,
    )


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of how a node runs, whatever its model and prompts."""
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["dense", "hisparse"])
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a prefill forward")
    parser.add_argument("--buffer", type=int, default=4096, help="entries of a hot buffer")
    parser.add_argument(
        "--micro-batch-min-bs",
        type=int,
        help="hisparse requests from which on a step is split in two, as the decode node's option; 0: never",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--indexer-cache-dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument(
        "--attention-split-tile-size",
        type=int,
        help="positions in one split of a query's attention, as the decode node's option",
    )
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument(
        "--verify-rows",
        action="store_true",
        help="check each row against its row check, as nodes do by default",
    )


def load_shared_spec(arguments: argparse.Namespace, num_drafts: int) -> ModelSpec:
    """Load the spec by the options that this benchmark and ``whole_node`` share (``add_node_options``)."""
    return load_spec(
        arguments.model_path,
        arguments.dtype,
        arguments.kv_cache_dtype,
        device=arguments.device,
        indexer_cache_dtype=arguments.indexer_cache_dtype,
        num_draft_layers=int(num_drafts > 0),
        load_format=arguments.load_format,
        has_row_checks=arguments.verify_rows,
    )
