"""The facts that a benchmark's numbers depend on: commit, machine, versions, date and command.

``report.write_report`` puts ``run_facts`` at the head of every file. ``gpus`` and ``spread`` are for
benchmarks that name their cards or measure several times.
"""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out"


def run_facts() -> dict[str, Any]:
    """Return the facts, JSON-able; ``mooncake_env`` has the variables that change how Mooncake works.

    The environment variable SOURCE_COMMIT, if set, names the commit: for machines that have the files without
    git. Without git, ``uncommitted_changes`` is None: unknown.
    """
    commit = _git("rev-parse", "HEAD")
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None if the file was run by its path
    module = f"tools.bench.{Path(sys.argv[0]).stem}" if spec is None else spec.name
    return {
        "command": shlex.join(["python", "-m", module.removesuffix(".__main__"), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("SOURCE_COMMIT") or commit or "none",
        "uncommitted_changes": bool(_git("status", "--porcelain")) if commit else None,
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in ("numpy", "torch") if (version := _version(name))},
        "mooncake": next((found for name in _MOONCAKE_PACKAGES if (found := _version(name))), "none"),
        "mooncake_env": {name: value for name, value in os.environ.items() if name.startswith("MC_")},
    }


def gpus() -> list[str]:
    """Return name and driver of this machine's GPUs; none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median with the smallest, the largest and all values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


_MOONCAKE_PACKAGES = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=10
        )
    except FileNotFoundError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
