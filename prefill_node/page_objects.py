"""The objects of the cluster's store: which bytes in main memory are one, under which key, and their seal.

An object is a page: its seal, then its KV, indexer keys and row checks, layer by layer (docs/kv-layout.md).
It is read and written where it lies in ``HostPages``. Row checks protect the KV; the seal names the page and
protects the indexer keys, which have no checks. ``PageObjects`` owns the seals.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from hisparse_pd.core.paging.prompt_keys import KEY_BYTES, PageKey
from hisparse_pd.kernels.row_check import void_row_checks
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.protocol.messages import Geometry
from hisparse_pd.transfer.page_store import Pieces

LAYOUT: Final = 1
"""Number of the object's layout; another one has other keys."""
_CRC_BYTES: Final = 4


def namespace_of(geometry: Geometry, arithmetic: Sequence[str]) -> str:
    """Return the beginning of all keys of nodes that compute the same bits and lay them out alike.

    ``geometry``: that of the node's pools, with the model's fingerprint. ``arithmetic``: all else that the
    bits depend on, such as the device.
    """
    facts = msgspec.msgpack.encode((LAYOUT, geometry, list(arithmetic)))
    return f"hisparse-pd/{hashlib.sha256(facts).hexdigest()[:32]}"


class PageObjects:
    """The objects of the pages of ``pages``, each ``page_size`` token slots, with keys of ``namespace``."""

    def __init__(self, pages: HostPages, page_size: int, namespace: str) -> None:
        num_pages = pages.num_slots // page_size
        self._namespace = namespace
        self._page_size = page_size
        self._index = pages.index.numpy()
        self._row_checks = pages.row_checks
        self._seals = torch.zeros(num_pages, KEY_BYTES + _CRC_BYTES, dtype=torch.uint8)
        self._seal_rows = self._seals.numpy()
        self.memory: tuple[Tensor, ...] = (self._seals, *pages.tensors)
        """All memory that objects are in."""
        starts, sizes = [self._seals.data_ptr()], [self._seals.shape[1]]
        for tensor in pages.tensors:
            layer_bytes = tensor.nbytes // tensor.shape[0]
            starts += [tensor.data_ptr() + layer * layer_bytes for layer in range(tensor.shape[0])]
            sizes += [layer_bytes // pages.num_slots * page_size] * tensor.shape[0]
        self._starts, self._sizes = np.array(starts, np.int64), np.array(sizes, np.int64)
        """Address of page 0 and bytes of a page, of each piece."""
        self._piece_sizes = sizes

    @property
    def object_bytes(self) -> int:
        return sum(self._piece_sizes)

    def name(self, key: PageKey) -> str:
        return f"{self._namespace}/{key.hex()}"

    def pieces(self, page_id: int) -> Pieces:
        addrs: list[int] = (self._starts + page_id * self._sizes).tolist()
        return Pieces(addrs, self._piece_sizes)

    def seal(self, page_id: int, key: PageKey) -> None:
        self._seal_rows[page_id] = np.frombuffer(self._seal_of(page_id, key), np.uint8)

    def void(self, page_ids: Sequence[int]) -> None:
        self._seal_rows[list(page_ids)] = 0
        if self._row_checks is not None:
            void_row_checks(self._row_checks, torch.tensor(page_ids), self._page_size)

    def why_wrong(self, page_id: int, key: PageKey) -> str:
        found = self._seal_rows[page_id].tobytes()
        if found[:KEY_BYTES] != key:
            return f"it is the page {found[:KEY_BYTES].hex()}"
        if found != self._seal_of(page_id, key):
            return "its indexer keys are not what was written"
        return ""

    def _seal_of(self, page_id: int, key: PageKey) -> bytes:
        crc, slots = 0, slice(page_id * self._page_size, (page_id + 1) * self._page_size)
        for layer in self._index:
            crc = zlib.crc32(layer[slots], crc)
        return key + crc.to_bytes(_CRC_BYTES, "little")
