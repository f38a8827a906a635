"""Says under which names and in which formats a checkpoint has the weights of transformers' modules.

The loader asks a ``StoredFormats`` of each module. What a routed expert is follows from the configuration
alone (``int4_config.py``), what another matrix is from its tensors.
"""

from __future__ import annotations

import torch

from hisparse_pd.core.model.int4_config import FP8 as IN_FP8
from hisparse_pd.core.model.int4_config import INT4, scales_name
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.weight_reader import WeightFiles
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.int4 import Int4Form

WEIGHT = ".weight"
SCALES = "_scale_inv"
"""Suffix of the name of an fp8 matrix's scales; the rest of the name is the matrix's."""
COMPRESSED_SCALES = "_scale"
"""The same in checkpoints of compressed-tensors, which have fp8 beside four bits."""


class StoredFormats:
    """The names and formats of one checkpoint."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def name(self, name: str) -> str:
        """Return the stored name of a tensor of transformers' modules or of a ``BlockLinear`` among them."""
        if name.endswith(SCALES):
            return self.scales_of(self._spec.family.stored_name(name.removesuffix(SCALES)))
        return self._spec.family.stored_name(name)

    def scales_of(self, name: str) -> str:
        """Return the stored name of the scales of the fp8 matrix ``name``; dummy weights have only names."""
        int4 = self._spec.int4
        is_compressed = int4 is not None and int4.has_fp8 and not self._spec.weights_are_dummy
        return name + (COMPRESSED_SCALES if is_compressed else SCALES)

    def is_declared_fp8(self, module: str) -> bool:
        """Whether the configuration says that a linear layer is in fp8."""
        return self._spec.weights_are_fp8 and (self._spec.int4 is None or self._format_of(module) == IN_FP8)

    def experts_dtype(self, files: WeightFiles, layer: int) -> torch.dtype | Int4Form:
        """Return the dtype of a layer's routed experts, or their form in four bits."""
        int4, module = self._spec.int4, f"model.layers.{layer}.mlp.experts.0.gate_proj"
        if int4 is None or self._format_of(module) != INT4:
            return FP8 if self.is_declared_fp8(module) else self._spec.dtype
        scales = files.get(scales_name(int4.method, self._module_name(module)))
        scale_dtype = torch.bfloat16 if scales is None else scales.dtype
        return Int4Form(int4.group_size, int4.has_zeros, scale_dtype, int4.rounds_tokens)

    def _format_of(self, module: str) -> str | None:
        int4 = self._spec.int4
        return None if int4 is None else int4.format_of(module, self._module_name(module))

    def _module_name(self, module: str) -> str:
        return self._spec.family.stored_name(f"{module}{WEIGHT}").removesuffix(WEIGHT)
