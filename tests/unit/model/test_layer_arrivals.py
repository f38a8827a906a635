"""Every layer is in one part, and a forward waits once for each part, before its first layer."""

from __future__ import annotations

import pytest

from hisparse_pd.core.model.layer_arrivals import MOST_PARTS, layers_of_part, part_that_begins


@pytest.mark.parametrize("num_parts", range(1, MOST_PARTS + 1))
@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 7, 8, 9, 16, 24, 61, 62])
def test_parts_have_all_layers_in_order(num_layers: int, num_parts: int) -> None:
    parts = [layers_of_part(part, num_parts, num_layers) for part in range(num_parts)]
    assert [layer for layers in parts for layer in layers] == list(range(num_layers))
    begins = {layers[0]: part for part, layers in enumerate(parts) if layers}
    for layer in range(num_layers):
        assert part_that_begins(layer, num_parts, num_layers) == begins.get(layer)
