"""Compiles CUDA code with this machine's nvcc or NVRTC, neither of which needs a GPU."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ARCHITECTURES = (80, 90, 100, 120)
EACH_ARCHITECTURE = pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch == 90 else pytest.mark.slow) for arch in ARCHITECTURES]
)
"""The default run has Hopper, which has what the oldest architecture lacks."""


def compile_cuda(
    source: str, arch: int | str, options: tuple[str, ...], directory: Path, entries: set[str]
) -> str | None:
    """Compile ``source`` with the kernels ``entries``. Returns what nvcc's assembler reports; None for
    NVRTC."""
    if shutil.which("nvcc"):
        path = directory / "unit.cu"
        path.write_text(source)
        command = ["nvcc", *options, f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", "-o", f"{path}bin"]
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert set(re.findall(r"Compiling entry function '(\w+)'", done.stderr)) == entries
        return done.stderr
    if not importlib.util.find_spec("cupy"):
        pytest.skip("neither nvcc nor cupy (NVRTC) is here")
    from cupy.cuda import compiler

    result = compiler.compile_using_nvrtc(source, options, str(arch), "unit.cu")
    text = result[0] if isinstance(result, tuple) else result
    compiled = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    assert all(entry in compiled for entry in entries)
    return None


def layout_checks(parameters: dict[str, np.dtype[Any]]) -> str:
    """Return assertions that the device and the host have each parameter at the same offset."""
    lines = [""]
    for name, dtype in parameters.items():
        lines.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");')
        lines += [
            f'static_assert(__builtin_offsetof({name}, {field}) == {place}, "{name}.{field}");'
            for field, (_, place, *_) in (dtype.fields or {}).items()
        ]
    return "\n".join(lines) + "\n"
