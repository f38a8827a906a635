"""``csrc/rank_exchange.cu`` compiled by this machine's C++ compiler: each thread of a block is a thread.

The code runs as it is written, except that each line of PTX is replaced by C++ here, and that blocks and
pieces are small.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hisparse_pd.kernels import rank_exchange

NUM_THREADS = 4
MAX_PIECE_BYTES = 96
"""A small value, so that short rows already take several rounds."""
MAX_BLOCKS = 3

IN_CPP = {
    "st.release.sys": "__atomic_store_n(to, value, __ATOMIC_RELEASE);",
    "ld.acquire.sys": "value = __atomic_load_n(from, __ATOMIC_ACQUIRE); std::this_thread::yield();",
    "globaltimer": "now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);",
    "cvt.rn.bf16.f32": "to = bfloat16_of(value);",
}
BEFORE = """
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(num)
struct uint4 { unsigned x, y, z, w; };
struct Place { int x; };
static thread_local Place threadIdx, blockIdx, gridDim;
static thread_local std::barrier<>* of_block;
inline void __syncthreads() { of_block->arrive_and_wait(); }
template <typename T> T __ldcg(const T* from) { return *from; }
template <typename T> T __ldg(const T* from) { return *from; }
inline int atomicOr(int* to, int value) { return __atomic_fetch_or(to, value, __ATOMIC_RELAXED); }
template <typename T> T __shfl_up_sync(unsigned, T value, int) { return value; }
inline unsigned long long __cvta_generic_to_shared(const void*) { return 0; }
inline void __trap() { std::abort(); }
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline unsigned short bfloat16_of(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
"""
AFTER = """
extern "C" void run(const char* name, const ExchangeParams* params, int num_blocks) {
    const auto kernel = KERNEL_OF(name);
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<std::barrier<>>> blocks;
    for (int block = 0; block < num_blocks; block++) {
        blocks.push_back(std::make_unique<std::barrier<>>(NUM_THREADS));
        for (int thread = 0; thread < NUM_THREADS; thread++)
            threads.emplace_back([=, meeting = blocks.back().get()] {
                threadIdx = {thread}, blockIdx = {block}, gridDim = {num_blocks}, of_block = meeting;
                kernel(*params);
            });
    }
    for (auto& thread : threads) thread.join();
}
"""


def host_source(num_banks: int) -> str:
    def in_cpp(match: re.Match[str]) -> str:
        return next((words for ptx, words in IN_CPP.items() if ptx in match[0]), ";")

    text, sizes = rank_exchange.source(), {"NUM_THREADS": NUM_THREADS, "MAX_PIECE_BYTES": MAX_PIECE_BYTES}
    for name, value in {**sizes, "NUM_BANKS": num_banks}.items():
        text, count = re.subn(rf"constexpr int {name} = \d+;", f"constexpr int {name} = {value};", text)
        assert count == 1, name
    text = re.sub(r"asm(?: volatile)?\(.*?\);", in_cpp, text, flags=re.DOTALL)
    kernels = " ".join(
        f'if (!std::strcmp(name, "{name}")) return {name};' for name in rank_exchange.kernels()
    )
    table = (
        f"\nstatic void (*KERNEL_OF(const char* name))(const ExchangeParams) {{ {kernels} std::abort(); }}\n"
    )
    return BEFORE + "#include <memory>\n" + text + table + AFTER


class HostKernels:
    """A stand-in for ``launch`` and for the kernels that it launches."""

    def __init__(self, directory: Path, num_banks: int) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler is here")
        source, library = directory / "unit.cc", directory / "unit.so"
        source.write_text(host_source(num_banks))
        command = [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-o", str(library)]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._run = ctypes.CDLL(str(library)).run

    def launch(self, name: str, device: Any, num_blocks: int, num_threads: int, parameters: Any) -> None:
        assert num_threads == rank_exchange.NUM_THREADS
        self._run(name.encode(), ctypes.c_void_p(parameters.ctypes.data), ctypes.c_int(num_blocks))


class HostRuntime:
    """A stand-in for CUDA's runtime, in which a handle of memory is its address."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def malloc(self, num_bytes: int) -> int:
        self._kept.append(np.full(num_bytes + 16, 0xA5, np.uint8))
        return int(-(-self._kept[-1].ctypes.data // 16) * 16)

    def ipcGetMemHandle(self, addr: int) -> bytes:
        return addr.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        return int.from_bytes(handle, "little")

    def deviceGetPCIBusId(self, device: int) -> str:
        return "0000:1B:00.0"

    def deviceGetByPCIBusId(self, name: str) -> int:
        return 1

    def deviceCanAccessPeer(self, here: int, there: int) -> bool:
        return True

    def memcpy(self, to: int, source: int, num_bytes: int, kind: int) -> None:
        ctypes.memmove(to, source, num_bytes)
