"""What a process computes first has the bits of what it computes later."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
NUM_PROCESSES = 16
"""Without its one call in one thread, a third of them compute other tables of positions first."""
PROGRAM = """
import sys
from pathlib import Path
import torch
from hisparse_pd.kernels.row_math import fix_arithmetic
fix_arithmetic()
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import load_spec

checkpoint = Path(sys.argv[1])
spec = load_spec(checkpoint)
model = load_model(checkpoint, spec)
token_ids = torch.arange(300) % 97

def computed():
    kv = torch.zeros((spec.num_layers, 320, spec.item_bytes), dtype=torch.uint8)
    index_keys = torch.zeros((spec.num_index_layers, 320, spec.index_item_bytes), dtype=torch.uint8)
    access = PagedKv(spec, kv, index_keys, 32, [PagedRequest(torch.arange(10), 0, 300)])
    logits = model.forward(token_ids, access.positions, access, access.last_rows)
    return kv, index_keys, logits

if not all(torch.equal(first, later) for first, later in zip(computed(), computed())):
    sys.exit("the first forward differs from the second")
"""


@pytest.mark.slow
@pytest.mark.I5
def test_the_first_forward_of_a_process_is_as_any_later_one(tiny_checkpoint: Callable[[str], Path]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", PROGRAM, str(tiny_checkpoint("v32"))]
    for _ in range(NUM_PROCESSES):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
