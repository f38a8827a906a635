"""Weights that are drawn instead of read (``--load-format dummy``): a model of any shape runs from its
configuration alone.

The loader calls ``draw`` for each tensor. The output of such a model is meaningless, but takes as long to
compute as with the checkpoint. A tensor depends on its name alone, so that two nodes on the same kind of
device, and the ranks of a node, have the same model.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK

INT4_VALUES, INT4_SCALES = ".weight_packed", ".weight_scale"
"""Ends of the names of a matrix's packed numbers of four bits, and of their scales."""
_INT4_SQUARE = 56 / 3
"""The mean square of a number that is uniform from -7 to 7."""
_PIECE_ROWS = 4096
"""Rows of a matrix that are drawn at once, in float32."""


def draw(name: str, target: Tensor) -> None:
    """Fill a model's tensor, on its device.

    Matrices are normal and keep the variance of their input; in fp8 their values have variance 1, and their
    scales, [blocks down, blocks across], do the rest. Packed numbers of four bits, int32, are uniform
    from -7 to 7, and their scales, [groups, rows], make the variance of a sum over one column of each group
    1. With a mean other than 0, each layer would make all tokens' hidden states more alike, and so their
    choice of experts. Norms' weights are 1. All else in one dimension is 0, but the bias of
    Mistral-Large-4's factor of queries (``ssmax_scaling.b``) is 1: the factor then is 1.
    """
    if target.ndim < 2:
        target.fill_(float(name.endswith(("weight", "ssmax_scaling.b"))))
    elif name.endswith("_scale_inv"):
        target.fill_((BLOCK * target.shape[1]) ** -0.5)
    elif name.endswith(INT4_SCALES):
        target.fill_((_INT4_SQUARE * target.shape[0]) ** -0.5)
    elif target.dtype == torch.int32:
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(name.encode()))
        pairs = target.view(torch.uint8).random_(0, 15 * 15, generator=generator)
        pairs.copy_(pairs // 15 * 16 + pairs % 15 + 0x11)  # 8 stands for 0
    else:
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(name.encode()))
        scale = 1.0 if target.dtype == torch.float8_e4m3fn else target.shape[1] ** -0.5
        for piece in target.split(_PIECE_ROWS):
            piece.copy_(torch.randn(piece.shape, device=target.device, generator=generator) * scale)
