"""The curves of a training run.

python -m tools.training.plot LOG_JSONL PNG
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any


def plot(log: Path, png: Path) -> None:
    """Draw answer loss and accuracy by width, indexer loss and kept attention by layer. Without matplotlib,
    nothing is drawn.
    """
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed; draw later with: python -m tools.training.plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    entries = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [entry for entry in entries if "step" in entry]
    figure, axes = plt.subplots(2, 2, figsize=(12, 7), sharex=True, layout="constrained")
    for width in sorted({entry["width"] for entry in steps}):
        some = [entry for entry in steps if entry["width"] == width]
        secs = [entry["secs"] for entry in some]
        axes[0][0].plot(secs, [entry["answer_loss"] for entry in some], lw=0.8, label=f"{width} tokens")
        axes[0][1].plot(secs, [1 - entry["answer_accuracy"] for entry in some], lw=0.8)
    indexed = [entry for entry in steps if entry["index_losses"]]
    for layer in range(len(indexed[0]["index_losses"]) if indexed else 0):
        secs = [entry["secs"] for entry in indexed]
        axes[1][0].plot(secs, [e["index_losses"][layer] for e in indexed], lw=0.8, label=f"layer {layer}")
        axes[1][1].plot(secs, [1 - e["coverages"][layer] for e in indexed], lw=0.8)
    titles = (
        ("answer loss (nats a token)", "wrong answer tokens (share)"),
        ("indexer divergence from attention (nats)", "attention outside the top-k (share)"),
    )
    for row in range(2):
        for column in range(2):
            ax = axes[row][column]
            ax.set_title(titles[row][column], fontsize=10)
            ax.set_yscale("log")
            ax.grid(alpha=0.3)
            for start in _stage_starts(steps):
                ax.axvline(start, color="grey", lw=0.8, ls="--")
    axes[0][0].legend(fontsize=8)
    if indexed:
        axes[1][0].legend(fontsize=8)
    for ax in axes[1]:
        ax.set_xlabel("seconds of training; dashed: next stage")
    figure.savefig(png, dpi=110)
    plt.close(figure)


def _stage_starts(steps: list[dict[str, Any]]) -> list[float]:
    return [after["secs"] for before, after in pairwise(steps) if before["stage"] != after["stage"]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.training.plot", description="Draw a run's curves.")
    parser.add_argument("log", type=Path)
    parser.add_argument("png", type=Path)
    arguments = parser.parse_args()
    plot(arguments.log, arguments.png)


if __name__ == "__main__":
    main()
