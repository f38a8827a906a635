"""What ``pip install`` of the wheel brings: one package, which stands beside others of its folders' names."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.checkout import REPO, copy_of_checkout, files_of_checkout

TIMEOUT_SECS = 240.0
SOURCES = ("hisparse_pd", "prefill_node", "decode_node", "router", "transfer", "kernels", "protocol")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command, which must succeed; return its output."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_SECS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git has, so that nothing is left in the checkout."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    copy_of_checkout(source, *SOURCES, "pyproject.toml", "README.md", "LICENSE")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source, cwd=source)
    (file,) = built.iterdir()
    return file


@pytest.mark.slow
def test_the_wheel_has_every_module_and_file_of_the_package_and_nothing_beside_it(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {
        name if name.startswith("hisparse_pd/") else f"hisparse_pd/{name}"
        for name in files_of_checkout(*SOURCES)
        if not (REPO / name).is_symlink()
    }
    assert names == files


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_beside_hugging_faces_kernels(wheel: Path, tmp_path: Path) -> None:
    """The demo's own environment sees this one's libraries, but not the checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    run(*PIP, "--python", python, "install", "--no-deps", "kernels", wheel, cwd=tmp_path)
    # A line of a .pth file is a folder whose own .pth files, such as an editable install's, are not read.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    installed = run(python, "-c", "import kernels; print(kernels.__file__)", cwd=tmp_path)
    assert Path(installed.strip()).parent == packages / "kernels"
    for name in {*SOURCES} - {"hisparse_pd", "kernels"}:
        find = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
        assert run(python, "-c", find, cwd=tmp_path).strip() == "None"
    version = run(tmp_path / "venv" / "bin" / "hisparse-pd", "--version", cwd=tmp_path)
    assert version.strip() == f"hisparse-pd {wheel.name.split('-')[1]}"

    (tmp_path / "tools").symlink_to(REPO / "tools")  # the demo, which is not in the wheel
    model = REPO / "tools" / "checkpoints" / "retrieval"
    shown = run(python, "-m", "tools.bench.demo", "--model-path", model, cwd=tmp_path)
    assert "All requests came back right" in " ".join(shown.split())
