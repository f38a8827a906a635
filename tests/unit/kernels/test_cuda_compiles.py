"""The CUDA code compiles for every architecture that we support, on machines without a GPU too."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels import cuda

ARCHITECTURES = (80, 90, 100, 120)
ENTRIES = {"swap_in", "copy_planned", "fill_row", "backup_newest", "newest_slots"}


def compile_with_nvcc(arch: int, options: tuple[str, ...], directory: Path) -> str:
    """What the assembler says about the compiled kernels."""
    path = directory / "unit.cu"
    path.write_text(cuda.source())
    command = ["nvcc", *options, f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", "-o", f"{path}bin", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def compile_with_nvrtc(arch: int, options: tuple[str, ...]) -> str:
    """The PTX, whose entries name the kernels."""
    from cupy.cuda import compiler

    result = compiler.compile_using_nvrtc(cuda.source(), options, str(arch), "unit.cu")
    text = result[0] if isinstance(result, tuple) else result
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


VARIANTS = [(1, True, 64, 1), (2, True, 1, 1), (8, False, 48, 2), (32, True, 64, 8)]
"""Positions of a thread, only wide items, page size, new positions at most."""
SAMPLE = list(zip(ARCHITECTURES, VARIANTS, strict=True))
"""Of the default run: each variant and each architecture once."""


@pytest.mark.parametrize(
    ("arch", "variant"),
    [
        pytest.param(arch, variant, marks=[pytest.mark.slow] if (arch, variant) not in SAMPLE else [])
        for arch in ARCHITECTURES
        for variant in VARIANTS
    ],
)
def test_compiles(arch: int, variant: tuple[int, bool, int, int], tmp_path: Path) -> None:
    options = cuda.compile_options(*variant)
    if shutil.which("nvcc"):
        log = compile_with_nvcc(arch, options, tmp_path)
        assert set(re.findall(r"Compiling entry function '(\w+)'", log)) == ENTRIES
    elif importlib.util.find_spec("cupy"):
        compiled = compile_with_nvrtc(arch, options)
        assert all(entry in compiled for entry in ENTRIES)
    else:
        pytest.skip("neither nvcc nor cupy (NVRTC) is here")


def test_source_is_one_unit() -> None:
    source = cuda.source()
    assert '#include "' not in source
    assert source.count("struct SwapInParams") == 1
