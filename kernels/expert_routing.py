"""Who computes what of a layer of routed experts, and the matrices of those that one rank holds.

``Routing`` sorts the pairs of a token and an expert, so that an expert's rows stand together and are one
product of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import dequantize

TILE_ROWS: Final = (16, 32, 64)
FEW_TILE_ROWS: Final = 64
"""Of products of fp8 with fp8 or of bfloat16: Hopper's tensor cores take 64 rows. Empty rows of a tile cost
nothing beside reading the weights, and every row is added up in the same order."""
MANY_TILE_ROWS: Final = 128
"""Of products of bfloat16 where experts have so many rows twice."""
FEW_ROWS: Final = 2048
"""Up to so many on a GPU one launch makes the plan."""


@dataclass(frozen=True)
class ExpertMatrices:
    """One or more matrices of the same shape of each of consecutive experts.

    ``values``: [num_experts, num_matrices, rows, columns], in the model's dtype, or in fp8 with ``scales`` of
    its blocks, float32 [num_experts, num_matrices, blocks down, blocks across] (``kernels.block_fp8``).
    ``ue8m0``: activations that are rounded to meet them have scales that are powers of two
    (``kernels.fp8_rows``).
    """

    values: Tensor
    scales: Tensor | None
    ue8m0: bool = False

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[num_matrices, rows, columns]."""
        if self.scales is None:
            return self.values[expert].to(dtype)
        return dequantize(self.values[expert], self.scales[expert], dtype)


def rounds(hidden: Tensor, matrices: ExpertMatrices) -> bool:
    """Whether activations are rounded to fp8: bfloat16 ones on a GPU are, where weights are in fp8.

    float32 and a CPU are for exact products (``hisparse_pd.core.model.loader.keeps_fp8``).
    """
    return matrices.scales is not None and hidden.dtype == torch.bfloat16 and hidden.device.type == "cuda"


@dataclass(frozen=True)
class Routing:
    """Who computes what of one layer, the same for all ranks. A row is a token and one of its experts.

    A tile is up to ``tile_rows`` rows of one expert, what one program of a kernel takes.
    """

    order: Tensor
    """int32 [num_rows]: the rows, ``token * top_k + choice``, sorted by expert."""
    starts: Tensor
    """int32 [num_experts + 1]: where an expert's rows begin in ``order``."""
    tile_starts: Tensor
    """int32 [num_experts + 1]: an expert's first tile."""
    tile_experts: Tensor
    """int32 [most tiles that there can be]: a tile's expert."""
    weights: Tensor
    """float32 [num_rows], by row: what its result is multiplied by."""
    top_k: int
    tile_rows: int
    is_rounded: bool = False
    """Activations are rounded to fp8 before each product (``rounds``)."""

    @classmethod
    def plan(
        cls,
        expert_ids: Tensor,
        weights: Tensor,
        num_experts: int,
        *,
        is_rounded: bool = False,
        in_bfloat16: bool = False,
    ) -> Routing:
        """For ``expert_ids``, int [num_tokens, top_k], and their ``weights``. Never waits for a device.

        ``is_rounded``: what ``rounds`` says of the tokens and the experts' matrices; ``in_bfloat16``: both
        are so. Padding has the id ``num_experts``: its rows are behind those of all experts.
        """
        num_tokens, top_k = expert_ids.shape
        num_rows = num_tokens * top_k
        tile_rows = FEW_TILE_ROWS
        if in_bfloat16 and num_rows >= 2 * MANY_TILE_ROWS * num_experts:
            tile_rows = MANY_TILE_ROWS
        elif not (is_rounded or in_bfloat16):
            # Most experts in one tile, so that their weights are read once; no larger, since it is padded.
            enough = [rows for rows in TILE_ROWS if rows * num_experts >= 2 * num_rows]
            tile_rows = min(enough, default=TILE_ROWS[-1])
        num_tiles = most_tiles(num_rows, num_experts, tile_rows)
        of_rows = weights.float().flatten()
        if expert_ids.device.type == "cuda" and 0 < num_rows <= FEW_ROWS:
            from hisparse_pd.kernels.triton_routing import plan_triton

            tables = plan_triton(expert_ids.contiguous(), num_experts, tile_rows, num_tiles)
            return cls(*tables, of_rows, top_k, tile_rows, is_rounded)
        sorted_ids, order = torch.sort(expert_ids.flatten(), stable=True)
        device = expert_ids.device
        starts = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=device), out_int32=True)
        tiles_of_each = (starts.diff() + (tile_rows - 1)) // tile_rows
        tile_starts = torch.nn.functional.pad(tiles_of_each.cumsum(0, dtype=torch.int32), (1, 0))
        tiles = torch.arange(num_tiles, device=device, dtype=torch.int32)
        tile_experts = torch.searchsorted(tile_starts[1:], tiles, right=True, out_int32=True)
        return cls(
            order.to(torch.int32),
            starts,
            tile_starts,
            tile_experts,
            of_rows,
            top_k,
            tile_rows,
            is_rounded,
        )


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """That ``num_rows`` rows of up to ``num_experts`` experts can make."""
    return num_rows // tile_rows + min(num_experts, num_rows)
