"""Uses of this machine's Triton, which comes with torch for CUDA, that need no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, version(package).split(".")[:2]))
    except PackageNotFoundError:
        return ()


needs_triton = pytest.mark.skipif(not _version("triton"), reason="triton is not installed")
interprets_loops = pytest.mark.skipif(
    _version("triton") < (3, 7) and _version("numpy") >= (2, 4),
    reason="triton is not installed, or its interpreter (before 3.7) reads no loop bounds with numpy 2.4",
)


def output_of(function: Callable[[], None], **environment: str) -> str:
    """Run ``function`` of a test module in its own process, because Triton reads its environment when it is
    imported. Returns the output; the test fails if the function raises."""
    command = [sys.executable, "-c", f"import {function.__module__} as m; m.{function.__name__}()"]
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=ROOT, env=others | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreted(function: Callable[[], None]) -> None:
    """Run ``function`` with kernels that Triton interprets."""
    output_of(function, TRITON_INTERPRET="1")


def compiled_for_hopper(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], aligned: list[str], **options: int
) -> dict[str, Any]:
    """Compile a Triton kernel for an H200, which this machine need not have. Returns its PTX and shared
    memory.

    ``types``: types of its arguments, i32 by default; ``aligned``: arguments that are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    names = kernel.arg_names
    source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"ptx": result.asm["ptx"], "shared_bytes": result.metadata.shared}


_TYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
}


@contextmanager
def compiles_launches() -> Iterator[set[str]]:
    """Make launches of Triton kernels compile them for an H200 and run nothing, so that tensors need no
    memory. Yields the names of the kernels."""
    from triton.runtime.jit import JITFunction

    from hisparse_pd.kernels import triton_launch

    compiled: set[str] = set()
    seen: set[str] = set()

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        is_constant = {param.name: param.is_constexpr for param in self.params}
        values = dict(zip(self.arg_names, args, strict=False))
        values |= {name: given.pop(name) for name in self.arg_names if name in given}
        types: dict[str, str] = {}
        aligned = []
        constants = {name: value for name, value in values.items() if is_constant[name] or value is None}
        for name in values.keys() - constants.keys():
            value = values[name]
            if hasattr(value, "block_shape"):
                element = _TYPES[str(value.base.dtype).removeprefix("torch.")]
                types[name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
            elif hasattr(value, "dtype"):
                types[name] = "*" + _TYPES[str(value.dtype).removeprefix("torch.")]
                aligned.append(name)
            else:
                types[name] = "fp32" if isinstance(value, float) else "i32"
        key = f"{self.__name__} {sorted(types.items())} {sorted(constants.items())} {sorted(given.items())}"
        if key not in seen:
            seen.add(key)
            compiled_for_hopper(self, types, constants, aligned, **given)
        compiled.add(self.__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_launch)
        patch.setattr(triton_launch, "overlaps", lambda device: True)
        yield compiled
