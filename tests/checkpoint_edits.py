"""Changes to the files of a checkpoint that only one test uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor


def edit_config(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(checkpoint: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Let ``edit`` change the tensors of the checkpoint's one file, by name."""
    from safetensors.torch import load_file, save_file

    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
