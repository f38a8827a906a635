"""The attention kernels of one node's forwards: formats, backends, and the indexer's scratch memory.

A node calls ``check`` before it loads its model and ``choose`` afterwards. Forwards take the result as one
argument; a decode node ``split``s it for steps whose parts run at once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.loader import keeps_fp8
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.unpacked import UnpackedMemory
from hisparse_pd.kernels.attention import AttentionBackend, TorchAttention
from hisparse_pd.kernels.attention_backends import attention_beside, choose_backend, choose_prompt_backend
from hisparse_pd.kernels.gpu_sizes import check_indexer_sizes
from hisparse_pd.kernels.inventory import kernels_in_use
from hisparse_pd.kernels.kv_format import IndexKeyFormat, KvFormat
from hisparse_pd.kernels.paged_indexer import IndexerScratch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionKernels:
    """Kernels that are chosen once, for all forwards. ``indexer_scratch``: None on the CPU, which needs
    none."""

    kv_format: KvFormat
    index_format: IndexKeyFormat
    attention: AttentionBackend
    """Attention of a prompt's queries, which are not split. Its own ``kv_format`` differs from the one above
    where it reads items that were unpacked for it."""
    step_attention: AttentionBackend
    """Attention of decode steps' queries, in splits. A prefill node uses it for the last positions of a
    prompt, which get the bits of steps (``first_stepped``)."""
    indexer_scratch: IndexerScratch | None = None
    unpacked: UnpackedMemory | None = None
    """None where prompts read items and keys in the pools."""

    @property
    def has_own_step_attention(self) -> bool:
        """Whether steps attend differently from prompts, and so may round differently."""
        return self.attention != self.step_attention

    @classmethod
    def reference(cls, spec: ModelSpec) -> AttentionKernels:
        """Return the torch reference, which works on any device."""
        attention = TorchAttention(spec.item_format)
        return cls(spec.item_format, spec.index_key_format, attention, attention)

    @staticmethod
    def check(spec: ModelSpec, device: torch.device, backend: str) -> None:
        """Raise StartError for a backend or sizes that ``choose`` or the first steps would refuse."""
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
        cls,
        model: DsaModel,
        backend: str,
        *,
        scratch_tokens: int,
        split_slots: int | None = None,
        page_size: int = 0,
    ) -> AttentionKernels:
        """Choose kernels for the model's device.

        ``scratch_tokens``: queries that the indexer scores at a time on a GPU. ``split_slots``: slots in one
        split of a step's query; 0: steps do not split, like prompts; None: the backend's own value.
        ``page_size``: the pool's on a node that computes prompts, else 0. Raises AttentionBackendError when
        ``backend`` cannot work there.
        """
        spec, device = model.spec, model.device
        attention = _choose_attention(spec, device, backend)
        # Where steps do not split, prompts keep the kernel of steps, so that both have the same bits.
        if page_size and split_slots != 0:
            attention = choose_prompt_backend(
                backend,
                device=device,
                kv_format=spec.item_format,
                num_heads=spec.num_heads,
                top_k=spec.index_topk,
            )
        step_attention = _choose_attention(spec, device, backend, split_slots)
        log.info(
            "kernels for %s items: %s",
            spec.kv_format,
            kernels_in_use(
                device,
                attention,
                has_fp8_matrices=keeps_fp8(spec, device),
                has_int4_experts=spec.int4 is not None,
            ),
        )
        scratch = None
        if device.type == "cuda":
            scratch = IndexerScratch.create(scratch_tokens, spec.context_length, device)
        unpacked = None
        if page_size and attention.kv_format != spec.item_format:
            unpacked = UnpackedMemory.create(spec, device, page_size)
        return cls(spec.item_format, spec.index_key_format, attention, step_attention, scratch, unpacked)

    def split(self, num_parts: int, taken_sms: int) -> list[AttentionKernels]:
        """Return kernels for each of ``num_parts`` steps that run at once in streams of their own.

        ``taken_sms``: multiprocessors that other work than these steps takes meanwhile.
        """
        if self.indexer_scratch is None:
            return [self] * num_parts
        attention = attention_beside(self.step_attention, taken_sms)
        return [
            replace(self, step_attention=attention, indexer_scratch=scratch)
            for scratch in self.indexer_scratch.beside(taken_sms).split(num_parts)
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
