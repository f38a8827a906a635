"""What a batch in parts asks of matrix products."""

from __future__ import annotations

import pytest
import torch

from decode_node.micro_batches import matmuls_without


def test_matrix_products_leave_room_for_as_long_as_they_are_asked_to() -> None:
    carveout = torch._C._get_sm_carveout_experimental
    with matmuls_without(16):
        assert carveout() == 16
    assert carveout() is None
    with pytest.raises(ZeroDivisionError), matmuls_without(16):
        raise ZeroDivisionError
    assert carveout() is None


def test_a_torch_without_that_setting_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with matmuls_without(16):
        assert torch._C._get_sm_carveout_experimental() is None
