"""What images are built from without a registry: a base image of packages, and a folder of wheels.

Both use this machine's configuration: its package mirror, proxies, certificates and package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.compose.engine import CommandFailed, Engine, EngineMissing, run

PUBLIC_BASE = "python:3.11-slim"
PULL_TIMEOUT_SECS = 300.0
BUILD_TIMEOUT_SECS = 3600.0
_SUITE = "bookworm"
_SUITE_PYTHON = (3, 11)
_CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
_APT_SETTINGS = re.compile(r'^(?:Acquire::(?:https?::[Pp]roxy|Check-Valid-Until|Check-Date)\S* ".+";)$', re.M)


def base_image(engine: Engine, work_dir: Path, tag: str) -> str:
    """Return the base of our images: BASE_IMAGE, the public one, or ``tag``, made of Debian's packages."""
    if given := os.environ.get("BASE_IMAGE"):
        return given
    try:
        engine.docker("pull", "-q", PUBLIC_BASE, timeout_secs=PULL_TIMEOUT_SECS)
        return PUBLIC_BASE
    except (CommandFailed, subprocess.TimeoutExpired):
        return _debian_image(engine, work_dir, tag)


def _debian_image(engine: Engine, work_dir: Path, tag: str) -> str:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise EngineMissing(
            "no image can be pulled; root with debootstrap can make one: apt-get install debootstrap"
        )
    root = work_dir / "debian"
    mirror = [os.environ["DEBIAN_MIRROR"]] if "DEBIAN_MIRROR" in os.environ else []
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", _SUITE, str(root), *mirror]
    run(command, timeout_secs=BUILD_TIMEOUT_SECS)
    settings = "\n".join(_APT_SETTINGS.findall(run(["apt-config", "dump"])))
    (root / "etc/apt/apt.conf.d/90build-host").write_text(settings + "\n")
    certificates = Path(os.environ.get("SSL_CERT_FILE", ""))
    if certificates.is_file():
        shutil.copyfile(certificates, root / _CERTIFICATES)
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    archive = work_dir / "debian.tar"
    run(["tar", "-C", str(root), "-cf", str(archive), "."])
    engine.docker("import", str(archive), tag, timeout_secs=BUILD_TIMEOUT_SECS)
    archive.unlink()
    shutil.rmtree(root)
    return tag


def collect_wheels(repo: Path, directory: Path) -> bool:
    """Download the wheels that the CPU images need into ``directory``, by this machine's pip.

    Returns False, and does nothing, when this interpreter has another version than the base images': the
    build then asks the package index.
    """
    if sys.version_info[:2] != _SUITE_PYTHON:
        return False
    pyproject = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    wanted = [
        *pyproject["build-system"]["requires"],
        *project["dependencies"],
        *project["optional-dependencies"]["cpu"],
        "sglang-router",
    ]
    download = [sys.executable, "-m", "pip", "download", "-q", "-d", str(directory)]
    torch = re.findall(r"(?m)^torch==.*$", (repo / "constraints-cpu.txt").read_text())
    arguments = os.environ.get("TORCH_PIP_ARGS", "").split()
    run([*download, *arguments, *torch], timeout_secs=BUILD_TIMEOUT_SECS)
    found = ["--find-links", str(directory)]
    pins = [word for name in ("", "-cpu") for word in ("-c", str(repo / f"constraints{name}.txt"))]
    run([*download, *found, *pins, *wanted], timeout_secs=BUILD_TIMEOUT_SECS)
    return True
