"""What the forwards of one node compute attention with: formats, a backend, the indexer's memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.loader import keeps_fp8
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.kernels.attention import AttentionBackend, TorchAttention
from hisparse_pd.kernels.attention_backends import attention_beside, choose_backend
from hisparse_pd.kernels.gpu_sizes import check_indexer_sizes
from hisparse_pd.kernels.inventory import kernels_in_use
from hisparse_pd.kernels.kv_format import IndexKeyFormat, KvFormat
from hisparse_pd.kernels.paged_indexer import IndexerScratch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionKernels:
    """Chosen once, for all forwards. ``indexer_scratch``: None on the CPU, which needs none."""

    kv_format: KvFormat
    index_format: IndexKeyFormat
    attention: AttentionBackend
    """Of a prompt's queries, which are whole."""
    step_attention: AttentionBackend
    """Of the queries of decode steps, in splits: also where a prefill node computes again what steps had."""
    indexer_scratch: IndexerScratch | None = None

    @classmethod
    def reference(cls, spec: ModelSpec) -> AttentionKernels:
        """The torch reference, for any device."""
        attention = TorchAttention(spec.item_format)
        return cls(spec.item_format, spec.index_key_format, attention, attention)

    @staticmethod
    def check(spec: ModelSpec, device: torch.device, backend: str) -> None:
        """Raise what ``choose`` and the first steps would, before the model is loaded: StartError, also for a
        size that a kernel of the device cannot take.
        """
        _choose_attention(spec, device, backend)
        if device.type == "cuda":
            check_indexer_sizes(
                num_heads=spec.index_num_heads,
                head_dim=spec.index_head_dim,
                top_k=spec.index_topk,
                context_length=spec.context_length,
            )

    @classmethod
    def choose(
        cls, model: DsaModel, backend: str, *, scratch_tokens: int, split_slots: int | None = None
    ) -> AttentionKernels:
        """For the model's device; ``scratch_tokens``: queries that the indexer scores at a time on a GPU;
        ``split_slots``: of steps, see ``choose_backend``.

        Raises AttentionBackendError when ``backend`` cannot work there.
        """
        spec, device = model.spec, model.device
        attention = _choose_attention(spec, device, backend)
        step_attention = _choose_attention(spec, device, backend, split_slots)
        log.info(
            "kernels for %s items: %s",
            spec.kv_format,
            kernels_in_use(device, attention, has_fp8_matrices=keeps_fp8(spec, device)),
        )
        scratch = None
        if device.type == "cuda":
            scratch = IndexerScratch.create(scratch_tokens, spec.context_length, device)
        return cls(spec.item_format, spec.index_key_format, attention, step_attention, scratch)

    def split(self, num_parts: int, taken_sms: int) -> list[AttentionKernels]:
        """The same for steps that run beside each other in streams of their own.

        ``taken_sms``: multiprocessors that something else than these steps holds meanwhile.
        """
        if self.indexer_scratch is None:
            return [self] * num_parts
        attention = attention_beside(self.step_attention, taken_sms)
        return [
            replace(self, step_attention=attention, indexer_scratch=scratch)
            for scratch in self.indexer_scratch.split(num_parts)
        ]


def _choose_attention(
    spec: ModelSpec, device: torch.device, backend: str, split_slots: int | None = 0
) -> AttentionBackend:
    return choose_backend(
        backend,
        device=device,
        kv_format=spec.item_format,
        num_heads=spec.num_heads,
        top_k=spec.index_topk,
        split_slots=split_slots,
    )
