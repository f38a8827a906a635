"""Packs SGLang, and those packages it needs that a GPU machine lacks, into one archive.

    python -m tools.bench.beside_sglang.carry --out sglang-site.tar.xz [--work FOLDER] [--cache FOLDER]

With the archive the GPU machine needs no network. Wheels for CPython 3.12 on x86-64 come from pip's index,
are unpacked into one folder, lose what decoding on a Hopper GPU does not call (``DROPPED``), and are packed.
The GPU machine has torch 2.11 for CUDA 13, triton, nvcc, and the usual packages around them: see
``README.md``. ``--cache`` adds the kernels that an earlier run of the benchmark compiled.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

PYTHON: Final = "3.12"
MOST_MIB: Final = 52
"""Largest archive that a transfer to the GPU machine takes."""
CACHE: Final = "_cache"
"""Folder of the archive with compiled kernels."""
PACKAGES: Final = (
    "sglang==0.5.17",
    "sglang-kernel==0.4.5",
    "sgl-deep-gemm==0.1.5.post1",
    "flashinfer-python==0.6.15.post1",
    "apache-tvm-ffi==0.1.11",
    "transformers==5.12.1",
    "tokenizers==0.22.2",
    "xgrammar==0.2.1",
    "openai==2.6.1",
    "compressed-tensors==0.18.0",
    "fastapi==0.121.0",
    "starlette==0.49.1",
    "uvicorn==0.54.0",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "annotated-types==0.8.0",
    "typing-inspection==0.4.5",
    "pyzmq==27.3.0",
    "msgspec==0.22.0",
    "orjson==3.13.0",
    "python-multipart==0.0.34",
    "partial-json-parser==0.2.1.1.post7",
    "interegular==0.3.3",
    "gguf==0.19.0",
    "loguru==0.7.3",
    "setproctitle==1.3.8",
    "pybase64==1.5.1",
    "dill==0.4.1",
    "watchfiles==1.3.0",
    "zstandard==0.25.0",
    "jiter==0.19.0",
    "distro==1.9.0",
    "sniffio==1.3.1",
    "easydict==1.14",
    "llguidance==1.9.1",
)
"""Versions that start together; SGLang 0.5.17 is the newest for torch 2.11."""
OURS: Final = "_ours"
"""Folder of the archive with what our own benchmark needs: OUR_WHEELS, and links to OUR_PACKAGES. It alone is
in the PYTHONPATH of our processes, so that they see nothing else of the archive."""
OUR_PACKAGES: Final = (
    *("annotated_types", "llguidance", "llguidance-1.9.1.dist-info", "msgspec", "pydantic"),
    *("pydantic_core", "typing_inspection", "uvicorn", "zmq", "pyzmq.libs"),
    *("sgl_kernel", "sglang_kernel-0.4.5.dist-info"),
)
"""Files and folders of PACKAGES that our processes import, too, and that a machine with PyTorch lacks."""
OUR_WHEELS: Final = ("starlette==1.10.0",)
"""Packages that our processes need in another version than SGLang."""
DROPPED: Final = {
    "sgl_kernel/flash_ops*": "FlashAttention 3: fp8 KV is attended by FlashMLA",
    "sgl_kernel/sm100": "kernels of Blackwell GPUs",
    "sgl_kernel/infllm_ops*": "kernels of other models",
    "xgrammar/lib": "a static library; grammars are off",
    "flashinfer/data/cutlass": "headers of kernels that are not compiled",
    "sglang/multimodal_gen": "models of images and videos",
    "sglang/test": "SGLang's tests",
    "sglang/srt/server/_core*": "a server in Rust that is not started",
    "sglang/srt/grpc/_core*": "a server in Rust that is not started",
    "zstandard/_cffi*": "a second backend of one library",
    "tools": "a script of one wheel, under the name of our folder",
}
"""Patterns of files and folders that are left out, with the reasons."""
STANDING_IN: Final = {
    "IPython/__init__.py": "",
    "IPython/display.py": "HTML = display = None\n",
    "jsonschema/__init__.py": "Draft202012Validator = SchemaError = None\n",
    "soundfile.py": "",
}
"""Files of packages that the GPU machine lacks, and that SGLang imports but does not use here: they are for
notebooks, tools and audio."""
_GLIBC: Final = (17, 24, 26, 27, 28, 31, 34, 35, 39)
"""Minor versions of glibc 2 whose manylinux wheels run on the GPU machine."""


class CarryError(Exception):
    """The archive could not be made, or is too large."""


def download(packages: Sequence[str], folder: Path) -> list[Path]:
    """Download the packages' wheels to ``folder``, and return them. Raises CarryError."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    words += [f"--abi={abi}" for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none")]
    words += [f"--platform={platform}" for platform in platforms]
    if subprocess.run([*words, *packages], check=False).returncode:
        raise CarryError("pip could not download the wheels")
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Sequence[Path], site: Path) -> None:
    """Unpack the wheels into the folder ``site``, which becomes the archive."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def remove_dropped(site: Path) -> Iterator[tuple[str, int]]:
    """Remove what DROPPED names from ``site``, then write the files of STANDING_IN.

    Yields each pattern with the bytes that it removed. The work is done when the iterator is exhausted.
    Raises CarryError where a pattern finds nothing: another release has another layout.
    """
    for pattern in DROPPED:
        found = sorted(site.glob(pattern))
        if not found:
            raise CarryError(f"{pattern}: not in these wheels; look at what DROPPED leaves out")
        num_bytes = 0
        for path in found:
            files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            num_bytes += sum(each.stat().st_size for each in files)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        yield pattern, num_bytes
    for name, text in STANDING_IN.items():
        path = site / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def link_ours(site: Path) -> None:
    """Add links to OUR_PACKAGES to the folder OURS. Raises CarryError where one is absent."""
    (site / OURS).mkdir(exist_ok=True)
    for name in OUR_PACKAGES:
        if not (site / name).exists():
            raise CarryError(f"{name}: not in these wheels; look at OUR_PACKAGES")
        (site / OURS / name).symlink_to(Path("..", name))


def strip_symbols(site: Path) -> None:
    """Remove the symbols of xgrammar's library, which are most of its bytes."""
    library = site / "xgrammar" / "libxgrammar_bindings.so"
    if shutil.which("strip") is None:
        raise CarryError("strip: not found; install binutils")
    subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)


def pack(site: Path, out: Path) -> int:
    """Pack the files of ``site`` by xz, the same files to the same bytes. Returns the archive's bytes."""
    if shutil.which("xz") is None:
        raise CarryError("xz: not found; install xz-utils")
    with out.open("wb") as file:
        process = subprocess.Popen(["xz", "-6", "--threads=0"], stdin=subprocess.PIPE, stdout=file)
        with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            archive.add(site, ".", filter=_plain)
        assert process.stdin is not None
        process.stdin.close()
        if process.wait():
            raise CarryError(f"xz ended with status {process.returncode}")
    return out.stat().st_size


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if "__pycache__" in entry.name:
        return None
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    return entry


def carry(out: Path, work: Path, cache: Path | None) -> int:
    """Make the archive ``out``, with ``work`` for wheels and files. Returns its bytes. Raises CarryError."""
    wheels, site = work / "wheels", work / "site"
    if site.exists():
        raise CarryError(f"{site} exists already; give an empty --work, or remove it")
    unpack(download(PACKAGES, wheels), site)
    for pattern, num_bytes in remove_dropped(site):
        print(f"without {pattern} ({DROPPED[pattern]}): {num_bytes / 2**20:.1f} MiB")
    strip_symbols(site)
    unpack(download(OUR_WHEELS, work / "our-wheels"), site / OURS)
    link_ours(site)
    if cache is not None:
        shutil.copytree(cache, site / CACHE)
    return pack(site, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the archive. Returns 1 if there is none, or if it is larger than a transfer takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="archive to write")
    parser.add_argument("--work", type=Path, help="folder for wheels and files; default: a temporary one")
    parser.add_argument("--cache", type=Path, help="kernels of a run before, its --cache")
    parser.add_argument("--most-mib", type=float, default=MOST_MIB, help="largest archive")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="beside-sglang-") as temporary:
            num_bytes = carry(options.out, options.work or Path(temporary), options.cache)
    except CarryError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out}: {num_bytes / 2**20:.1f} MiB")
    if num_bytes > options.most_mib * 2**20:
        print(f"larger than {options.most_mib} MiB; leave more out", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
