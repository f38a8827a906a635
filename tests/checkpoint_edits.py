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


def drop_layer(checkpoint: Path, dropped: int) -> None:
    """Leave out a layer of a checkpoint without lists of layers. Later ones, an MTP layer too, move up."""

    def move_up(tensors: dict[str, Tensor]) -> None:
        for name in sorted(name for name in tensors if name.startswith("model.layers.")):
            _, _, number, rest = name.split(".", 3)
            if int(number) >= dropped:
                tensor = tensors.pop(name)
                if int(number) > dropped:
                    tensors[f"model.layers.{int(number) - 1}.{rest}"] = tensor

    edit_weights(checkpoint, move_up)
    config = json.loads((checkpoint / "config.json").read_text())
    edit_config(checkpoint, num_hidden_layers=config["num_hidden_layers"] - 1)


def edit_weights(checkpoint: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Let ``edit`` change the tensors of the checkpoint's one file, by name."""
    from safetensors.torch import load_file, save_file

    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
