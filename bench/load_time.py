"""How fast a checkpoint gets from files to a device: GB/s by number of reading threads.

Each number of threads loads the whole model twice: first with its files out of the page cache, then with as
much of them in it as memory holds. A directory without a checkpoint gets a synthetic one of DeepSeek-V3.2's
attention and width (16 layers of 16 experts: 14 GB); give another directory for a checkpoint of your own,
in fp8 for one (``python -m checkpoints.quantize_fp8 DIR OUT``).

    python bench/load_time.py --model-path DIR [--device cuda] [--threads 1 8]

With ``--device meta`` it reads and throws away, which is the rate of files and page cache alone. Prints what
it measures, and writes JSON to --out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, run_facts
from checkpoints.make_synthetic import SyntheticShape, write_synthetic
from model.loader import load_model
from model.spec import load_spec, weight_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16, help="of the synthetic checkpoint")
    parser.add_argument("--experts", type=int, default=16, help="of a layer of it")
    parser.add_argument("--hidden", type=int, default=7168, help="its width")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--out", type=Path, default=OUT / "load_time.json")
    arguments = parser.parse_args()
    path: Path = arguments.model_path
    if not (path / "config.json").exists():
        shape = SyntheticShape(arguments.layers, arguments.experts, arguments.hidden)
        write_synthetic(path, shape, device=arguments.device)
    num_bytes = sum(file.stat().st_size for file in weight_files(path))
    rows = []
    for num_threads in arguments.threads:
        forget(path)
        row: dict[str, Any] = {"threads": num_threads}
        for cache in ("cold", "warm"):
            secs = load_secs(arguments, num_threads)
            row[cache] = {"secs": round(secs, 3), "gb_per_sec": round(num_bytes / 1e9 / secs, 3)}
        rows.append(row)
        print(
            f"{num_threads:3} threads: cold {row['cold']['gb_per_sec']:.2f} GB/s, "
            f"warm {row['warm']['gb_per_sec']:.2f} GB/s",
            flush=True,
        )
    gpu = torch.cuda.get_device_name(arguments.device) if "cuda" in arguments.device else "none"
    result = {"facts": run_facts() | {"gpu": gpu}, "weights_gb": num_bytes / 1e9, "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def load_secs(arguments: argparse.Namespace, num_threads: int) -> float:
    spec = load_spec(arguments.model_path, arguments.dtype)
    started = time.monotonic()
    model = load_model(arguments.model_path, spec, arguments.device, num_threads=num_threads)
    secs = time.monotonic() - started
    del model
    gc.collect()
    return secs


def forget(path: Path) -> None:
    """Out of the page cache with the files; needs no privilege, but that nobody else maps them."""
    for file in weight_files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    main()
