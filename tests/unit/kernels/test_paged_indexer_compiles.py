"""The top-k kernel compiles for every architecture that we support, on machines without a GPU too."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels import topk

ARCHITECTURES = (80, 90, 100, 120)


def compile_with_nvcc(arch: int, directory: Path) -> str:
    """What the assembler says about the compiled kernel."""
    path = directory / "unit.cu"
    path.write_text(topk.source())
    command = ["nvcc", *topk.compile_options(), f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-o", f"{path}bin", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def compile_with_nvrtc(arch: int) -> str:
    """The PTX, whose entries name the kernels."""
    from cupy.cuda import compiler

    result = compiler.compile_using_nvrtc(topk.source(), topk.compile_options(), str(arch), "unit.cu")
    text = result[0] if isinstance(result, tuple) else result
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: int, tmp_path: Path) -> None:
    if shutil.which("nvcc"):
        log = compile_with_nvcc(arch, tmp_path)
        assert re.findall(r"Compiling entry function '(\w+)'", log) == ["topk"]
        assert int(re.findall(r"Used (\d+) registers", log)[0]) <= 64, "1024 threads share 65536 registers"
        assert " 0 bytes spill stores" in log
    elif importlib.util.find_spec("cupy"):
        assert "topk" in compile_with_nvrtc(arch)
    else:
        pytest.skip("neither nvcc nor cupy (NVRTC) is here")


def test_source_is_one_unit() -> None:
    source = topk.source()
    assert '#include "' not in source
    assert source.count("struct TopkParams") == 1


def test_the_host_knows_the_kernels_parameters() -> None:
    struct = re.search(r"struct TopkParams \{(.*?)\};", topk.source(), re.DOTALL)
    assert struct
    fields = re.findall(r"^\s*(?:const )?(float\*|i64\*|int\*|i64|int) (\w+);", struct[1], re.MULTILINE)
    sizes = {"float*": 8, "i64*": 8, "int*": 8, "i64": 8, "int": 4}
    params = topk._PARAMS.fields
    assert params is not None
    assert [(name, sizes[kind]) for kind, name in fields] == [
        (name, params[name][0].itemsize) for name in topk._PARAMS.names or ()
    ]
    assert f"NUM_THREADS = {topk.NUM_THREADS};" in topk.source()
