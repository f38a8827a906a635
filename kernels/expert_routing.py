"""The plan of a layer of routed experts, and the matrices of the experts that one rank has.

``hisparse_pd.core.model.experts`` keeps ``ExpertMatrices`` and makes a ``Routing`` in every layer, which
``kernels.experts`` carries out. ``Routing`` sorts the pairs of a token and one of its experts, so that each
expert's rows are adjacent and make one matrix product.

For example, three tokens with two experts each, ``[[1, 0], [1, 2], [0, 1]]``, have six rows. Sorted by expert
they are rows 1 and 4 of expert 0, rows 0, 2 and 5 of expert 1, row 3 of expert 2: ``order`` is [1, 4, 0, 2,
5, 3], and ``starts`` is [0, 2, 5, 6]. With tiles of 2 rows expert 1 has two tiles: ``tile_starts`` is [0, 1,
3, 4], and ``tile_experts`` is [0, 1, 1, 2], then 3, for no tile, up to ``most_tiles`` entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import dequantize
from hisparse_pd.kernels.int4 import Int4Matrices
from hisparse_pd.kernels.routing_tables import RoutingTables

TILE_ROWS: Final = (16, 32, 64)
"""Sizes of a tile for products that are neither fp8 with fp8 nor bfloat16."""
FEW_TILE_ROWS: Final = 64
"""Rows of a tile in products of fp8 with fp8 or in bfloat16: Hopper's tensor cores take 64 rows. Empty rows
cost next to nothing beside reading the weights, and a row is added up in the same order in any tile."""
MANY_TILE_ROWS: Final = 128
"""Rows of a tile in these products if an expert has twice as many rows or more on average."""
INT4_TILE_ROWS: Final = (16, 32, 64, 128)
"""Sizes of a tile for products with weights in four bits. Tokens are the operand of which tensor cores take
as few as 8 rows; at 64 they take as long as the weights' bytes need."""
FEW_ROWS: Final = 2048
"""Most rows that a GPU plans in one launch; larger plans take several."""


@dataclass(frozen=True)
class ExpertMatrices:
    """One or more matrices of the same shape for each of several consecutive experts.

    ``values``: [num_experts, num_matrices, rows, columns], in the model's dtype, or in fp8 with ``scales`` of
    its blocks, float32 [num_experts, num_matrices, blocks down, blocks across] (``kernels.block_fp8``).
    ``ue8m0``: activations that are rounded for these matrices have scales that are powers of two
    (``kernels.fp8_rows``).
    """

    values: Tensor
    scales: Tensor | None
    ue8m0: bool = False

    @property
    def takes_rounded(self) -> bool:
        """Whether activations are rounded to fp8 where the device does so (``rounds``)."""
        return self.scales is not None

    @property
    def num_outputs(self) -> int:
        """The rows of all of an expert's matrices."""
        return self.values.shape[1] * self.values.shape[2]

    def of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the matrices of one expert in ``dtype``, [num_matrices, rows, columns]."""
        if self.scales is None:
            return self.values[expert].to(dtype)
        return dequantize(self.values[expert], self.scales[expert], dtype)


def rounds(hidden: Tensor, matrices: ExpertMatrices | Int4Matrices) -> bool:
    """Return whether activations are rounded to fp8 before products with ``matrices``.

    They are if they are bfloat16 on a GPU, and the matrices are fp8 or of a checkpoint that says so. float32
    and CPUs are used for exact products (``hisparse_pd.core.model.loader.keeps_fp8``).
    """
    return matrices.takes_rounded and hidden.dtype == torch.bfloat16 and hidden.device.type == "cuda"


@dataclass(frozen=True)
class Routing:
    """The plan of one layer for all experts, the same on all ranks; each computes the tiles of its experts.

    A row is a token and one of its experts. A tile is up to ``tile_rows`` rows of one expert; one program of
    a kernel takes it. ``order`` [num_rows], ``starts`` and ``tile_starts`` [num_experts + 1] and
    ``tile_experts`` [most_tiles(...)] are int32, those of ``RoutingTables``; the example above has all four.
    """

    order: Tensor
    starts: Tensor
    tile_starts: Tensor
    tile_experts: Tensor
    weights: Tensor
    """float32 [num_rows]: the factor for each row's result, by ``token * top_k + choice``."""
    top_k: int
    tile_rows: int
    is_rounded: bool = False
    """Whether activations are rounded to fp8 before each product (``rounds``)."""

    @classmethod
    def plan(
        cls,
        expert_ids: Tensor,
        weights: Tensor,
        num_experts: int,
        *,
        is_rounded: bool = False,
        in_bfloat16: bool = False,
        in_int4: bool = False,
    ) -> Routing:
        """Return the plan for ``expert_ids``, int [num_tokens, top_k], and ``weights``. Never waits for a
        device.

        ``is_rounded``: the result of ``rounds`` for the tokens and the experts' matrices. ``in_bfloat16``:
        both are bfloat16. ``in_int4``: the matrices are in four bits. Padding has the id ``num_experts``: its
        rows come after those of all experts.
        """
        num_rows, top_k = expert_ids.numel(), expert_ids.shape[1]
        if in_int4:
            tile_rows = _tile_rows(num_rows, num_experts, INT4_TILE_ROWS)
        elif is_rounded or in_bfloat16:
            has_many = num_rows >= 2 * MANY_TILE_ROWS * num_experts
            tile_rows = MANY_TILE_ROWS if has_many else FEW_TILE_ROWS
        else:
            tile_rows = _tile_rows(num_rows, num_experts, TILE_ROWS)
        num_tiles = most_tiles(num_rows, num_experts, tile_rows)
        if expert_ids.device.type == "cuda" and 0 < num_rows <= FEW_ROWS:
            from hisparse_pd.kernels.triton_routing import plan_triton

            tables = plan_triton(expert_ids.contiguous(), num_experts, tile_rows, num_tiles)
        else:
            tables = _sorted_tables(expert_ids, num_experts, tile_rows, num_tiles)
        return cls(*tables, weights.float().flatten(), top_k, tile_rows, is_rounded)


def _tile_rows(num_rows: int, num_experts: int, sizes: tuple[int, ...]) -> int:
    """Return the rows of a tile, one of ``sizes``, which ascend."""
    # An expert's weights are read once for each of its tiles, so a tile has at least twice the rows of an
    # average expert: most experts then have one tile. Larger tiles would only have more padding.
    large_enough = [rows for rows in sizes if rows * num_experts >= 2 * num_rows]
    return min(large_enough, default=sizes[-1])


def _sorted_tables(expert_ids: Tensor, num_experts: int, tile_rows: int, num_tiles: int) -> RoutingTables:
    """Do ``plan_triton`` on any device, in several launches."""
    device = expert_ids.device
    sorted_ids, order = torch.sort(expert_ids.flatten(), stable=True)
    starts = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, device=device), out_int32=True)
    num_tiles_each = (starts.diff() + (tile_rows - 1)) // tile_rows
    tile_starts = torch.nn.functional.pad(num_tiles_each.cumsum(0, dtype=torch.int32), (1, 0))
    tiles = torch.arange(num_tiles, device=device, dtype=torch.int32)
    tile_experts = torch.searchsorted(tile_starts[1:], tiles, right=True, out_int32=True)
    return RoutingTables(order.to(torch.int32), starts, tile_starts, tile_experts)


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Return the most tiles that ``num_rows`` rows of up to ``num_experts`` experts can make."""
    return num_rows // tile_rows + min(num_experts, num_rows)
