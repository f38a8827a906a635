"""The top-k kernel compiles for every architecture that we support, on machines without a GPU too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels import topk
from tests.unit.kernels.cuda_here import ARCHITECTURES, compile_cuda


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles(arch: int, tmp_path: Path) -> None:
    log = compile_cuda(topk.source(), arch, topk.compile_options(), tmp_path, {"topk"})
    if log is not None:
        assert int(re.findall(r"Used (\d+) registers", log)[0]) <= 64, "1024 threads share 65536 registers"
        assert " 0 bytes spill stores" in log


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
