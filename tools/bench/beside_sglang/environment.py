"""The folder and the environment variables of the guest: SGLang and the packages that it needs.

SGLang is no dependency of this project, so it is unpacked in a folder of its own, ``site``. That folder comes
first on the import path of the guest's processes, which ``__main__.py``, ``run.py`` and ``prewarm.py`` start
with ``guest_command``. Other processes see nothing of it but its folder ``_ours``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.bench.facts import ROOT

NEEDED: Final = ("sglang", "sgl_kernel", "deep_gemm", "flashinfer", "tvm_ffi", "xgrammar")
"""Packages that the guest's folder must have; ``carry.py`` packs them with what they need."""
HOST_BYTES: Final = "BESIDE_SGLANG_HOST_BYTES"
"""Environment variable with the bytes of main memory that the guest is told are free (``guest.py``)."""


class GuestMissing(Exception):
    """The guest's folder, a part of it, or the compiler that it needs is not there."""


def check_guest(site: Path) -> None:
    """Raise GuestMissing, with the names of what is absent, unless all that the guest needs is there."""
    missing = [name for name in NEEDED if not (site / name).is_dir()]
    if missing:
        raise GuestMissing(
            f"--guest {site}: without {', '.join(missing)}; pack it with python -m "
            "tools.bench.beside_sglang.carry --out FILE on a machine with pip's index, and unpack FILE there"
        )
    if shutil.which("nvcc", path=_cuda_path()) is None:
        raise GuestMissing("nvcc: not found under CUDA_HOME or on PATH; SGLang compiles kernels with it")


def guest_environment(site: Path, cache: Path) -> dict[str, str]:
    """Return the environment variables of a guest's process, whose compiled kernels go to ``cache``."""
    folders = {
        "TVM_FFI_CACHE_DIR": "tvm_ffi",
        "SGLANG_DG_CACHE_DIR": "deep_gemm",
        "DG_JIT_CACHE_DIR": "deep_gemm",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "SGLANG_CACHE_DIR": "sglang",
    }
    own = {
        **{name: str(cache / folder) for name, folder in folders.items()},
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": _cuda_path(),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_MODULE_LOADING": "LAZY",
        # Kernels are compiled beforehand by prewarm.py, for the shapes of the cells alone.
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "FLASHINFER_USE_CUDA_NORM": "1",
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        # Every prompt is prefilled by sparse attention, as ours is.
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
        # /health tells whether the server is up, without a request of its own.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_HOST_IP": "127.0.0.1",
        "HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # NVLink multicast can leave GPUs of a shared host unusable.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    if cuda_home := _cuda_home():
        own["CUDA_HOME"] = cuda_home
    return {**os.environ, **own}


def accepting(num_tokens: float) -> dict[str, str]:
    """Return the variables by which each step of SGLang makes ``num_tokens`` tokens of a request on average,
    whatever its dummy MTP layer guesses."""
    return {"SGLANG_SIMULATE_ACC_LEN": str(num_tokens), "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}


def versions(site: Path) -> dict[str, str]:
    """Return the versions of the packages in the guest's folder."""
    found = (path.name.removesuffix(".dist-info").rpartition("-") for path in site.glob("*.dist-info"))
    return dict(sorted((name, version) for name, _, version in found))


def guest_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module beside this one; the caller gives it the guest's variables."""
    return [sys.executable, "-m", f"tools.bench.beside_sglang.{module}", *arguments]


def has_free_gpu(most_mib: int) -> bool:
    """Return whether the GPU of the comparison has at most ``most_mib`` MiB in use, or cannot be asked."""
    query = [
        "nvidia-smi",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        "-i",
        str(gpu_number()),
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return True
    return int(answer.stdout.split()[0]) <= most_mib


def gpu_number() -> int:
    """Return the driver's number of the first GPU that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return int(seen) if seen.isdecimal() else 0


def _cuda_home() -> str:
    if home := os.environ.get("CUDA_HOME"):
        return home
    if nvcc := shutil.which("nvcc"):
        return str(Path(nvcc).resolve().parents[1])
    return "/usr/local/cuda" if Path("/usr/local/cuda/bin/nvcc").exists() else ""


def _cuda_path() -> str:
    """Return PATH with CUDA's programs in front."""
    path = os.environ.get("PATH", "")
    home = _cuda_home()
    return os.pathsep.join((f"{home}/bin", path)) if home else path
