"""What ``make`` installs for the tests in containers, with an apt-get that only says what it was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
SBIN = "/usr/sbin:/sbin"
HERE = [name for name in ("dockerd", "docker-compose", "debootstrap") if shutil.which(name, path=SBIN)]

pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="no make"),
    pytest.mark.skipif(bool(HERE), reason=f"{HERE} would be found"),
]


def make(directory: Path, **commands: str) -> subprocess.CompletedProcess[str]:
    """``compose-packages``, where ``commands`` are all that there is besides the shell's."""
    plain = {"sh", "make", "true", "false", "sed", "grep", "cat"}
    for name in plain:
        (directory / name).symlink_to(shutil.which(name) or "/bin/false")
    for name, script in {"apt-get": 'echo "apt-get $*"', **commands}.items():
        (directory / name.replace("_", "-")).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name.replace("_", "-")).chmod(0o755)
    command = ["make", "--no-print-directory", "compose-packages", "DOCKER_CLIENT=docker-client"]
    environment = {**os.environ, "PATH": str(directory)}
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120)


def test_root_gets_what_is_missing(tmp_path: Path) -> None:
    done = make(tmp_path, id="echo 0")
    assert done.returncode == 0, done.stderr
    installed = "docker.io docker-client docker-compose debootstrap"
    assert f"apt-get install -y -qq --no-install-recommends {installed}\n" in done.stdout


def test_what_is_there_is_not_installed(tmp_path: Path) -> None:
    """A client without an engine that answers."""
    done = make(tmp_path, id="echo 0", docker="exit 1", debootstrap="")
    assert done.returncode == 0, done.stderr
    assert "--no-install-recommends docker.io docker-compose\n" in done.stdout


def test_others_are_told_the_line_to_run(tmp_path: Path) -> None:
    done = make(tmp_path, id="echo 1000", docker="exit 1")
    assert done.returncode != 0
    assert "sudo apt-get install -y docker.io docker-compose debootstrap\n" in done.stderr
    assert "apt-get install" not in done.stdout


def test_nothing_is_needed_where_an_engine_answers(tmp_path: Path) -> None:
    done = make(tmp_path, id="echo 0", docker="exit 0")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
