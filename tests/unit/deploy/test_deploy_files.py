"""The compose files without Docker: their variables are explained, and their commands are valid.

``make test-compose`` runs them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hisparse_pd.base.settings_sources import load_settings
from hisparse_pd.commands import pair
from tests.unit.settings_support import parsed

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
COMPOSE_FILES = sorted(DEPLOY.glob("*.yml"))
VARIABLE = re.compile(r"(?<!\$)\$\{([A-Z0-9_]+)(?::?-([^}]*))?\}")
OURS = [path.name for path in COMPOSE_FILES if path.name not in ("common.yml", "compose.sglang-router.yml")]


def explained() -> dict[str, str]:
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def services(name: str, values: dict[str, str]) -> dict[str, Any]:
    """The services of a file as compose sees them, after substitution."""
    text = (DEPLOY / name).read_text()
    document = yaml.safe_load(VARIABLE.sub(lambda match: values[match[1]], text))
    assert isinstance(document["services"], dict)
    return document["services"]


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_every_variable_has_the_default_that_the_example_tells(path: Path) -> None:
    values = explained()
    for name, default in VARIABLE.findall(path.read_text()):
        assert name in values, f"{path.name} uses {name}, of which .env.example does not know"
        assert default == values[name], f"{path.name}: the default of {name}"


def test_the_example_explains_nothing_that_is_not_used() -> None:
    used = {match[0] for path in COMPOSE_FILES for match in VARIABLE.findall(path.read_text())}
    assert set(explained()) == used


@pytest.mark.parametrize("name", OURS)
def test_commands_are_understood(name: str) -> None:
    """This version's command line takes every command, so a renamed option breaks here first."""
    num_commands = 0
    for service, definition in services(name, explained()).items():
        words = shlex.split(definition.get("command", ""))
        if not words or service in ("prometheus", "grafana", "store", "store-memory"):
            continue
        settings: Any = load_settings(pair.SECTIONS[words[0]], parsed(words[0], words[1:]))
        assert settings.exposure is None, "a service of the deployment has all its doors closed"
        num_commands += 1
    assert num_commands or name in ("compose.gpu.yml", "compose.monitoring.yml", "compose.store.yml")


def test_only_the_router_and_monitoring_are_published() -> None:
    values = explained()
    for path in COMPOSE_FILES:
        for service, definition in services(path.name, values).items():
            if ports := definition.get("ports"):
                assert service in ("router", "prometheus", "grafana")
                assert all(port.startswith("127.0.0.1:") for port in ports)


def test_docker_waits_longer_than_a_drain() -> None:
    values = explained()
    assert float(values["STOP_GRACE_PERIOD"].removesuffix("s")) >= float(values["DRAIN_TIMEOUT_SECS"]) + 20


KEYGEN = """#!/bin/sh
set -eu -o noclobber
test "$1" = keygen
echo "key ${3:---control}" > "$2"
"""


def test_setup_asks_for_each_key_that_is_not_there(tmp_path: Path) -> None:
    for name in ("setup.sh", ".env.example"):
        shutil.copy(DEPLOY / name, tmp_path)
    (tmp_path / "keygen").write_text(KEYGEN)
    (tmp_path / "keygen").chmod(0o755)
    environment = {**os.environ, "HISPARSE_PD": str(tmp_path / "keygen")}
    directory = tmp_path / "secrets"

    def set_up() -> dict[str, str]:
        subprocess.run(["sh", "setup.sh"], cwd=tmp_path, env=environment, check=True, timeout=60)
        return {path.name: path.read_text() for path in directory.iterdir()}

    written = set_up()
    mounted = re.findall(r"file: \./secrets/([\w.]+)", "".join(path.read_text() for path in COMPOSE_FILES))
    assert set(written) == set(mounted)
    assert {name for name, text in written.items() if text != "key --api\n"} == {"control.key"}
    assert (tmp_path / ".env").read_text() == (tmp_path / ".env.example").read_text()
    assert directory.stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes == {0o444}, "for the containers' user"
    (tmp_path / ".env").write_text("IMAGE=mine\n")
    (directory / "control.key").unlink()
    (directory / "api.key").chmod(0o644)
    (directory / "api.key").write_text("mine")
    assert set_up() == {**written, "api.key": "mine"}
    assert (tmp_path / ".env").read_text() == "IMAGE=mine\n"


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_what_goes_with_an_accelerator_is_pinned_and_no_pin_is_stated_twice(accelerator: str) -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (DEPLOY.parent / name).read_text().splitlines()
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    of_all, own, cpu = (pins(f"constraints{name}.txt") for name in ("", f"-{accelerator}", "-cpu"))
    assert not of_all.keys() & own.keys()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extra = {re.split(r"[>=<]", word)[0] for word in project["optional-dependencies"][accelerator]}
    assert extra | {"torch"} == set(own)
    of_mooncake = {pin for name, pin in (own | cpu).items() if name.startswith("mooncake-")}
    assert len(of_mooncake) == 1
    docker = (DEPLOY / "Dockerfile").read_text()
    for text in (docker, (DEPLOY.parent / "Makefile").read_text().replace("$(ACCELERATOR)", accelerator)):
        assert f"grep '^torch==' constraints-{accelerator}.txt" in text
        assert f"-c constraints.txt -c constraints-{accelerator}.txt" in text
    assert f"constraints-{accelerator}.txt" in re.findall(r"^COPY (.*) \./$", docker, re.M)[0].split()
    assert f"!constraints-{accelerator}.txt" in (DEPLOY.parent / ".dockerignore").read_text().splitlines()


def test_figures_and_the_cuda_build_are_of_one_release_of_torch() -> None:
    """Whoever pins another release measures again, or says which figures are of the other."""
    pinned = re.search(r"^torch==(\d+\.\d+)", (DEPLOY.parent / "constraints-cuda.txt").read_text(), re.M)
    measured = re.findall(
        r"H200s?\b[^|\n]*, torch (\d+\.\d+)", (DEPLOY.parent / "docs/measurements.md").read_text()
    )
    assert pinned is not None
    assert set(measured) == {pinned[1]}


def test_the_image_has_every_room_of_the_house() -> None:
    root = DEPLOY.parent
    links = {path.name for path in (root / "hisparse_pd").iterdir() if path.is_symlink()}
    rooms = {"hisparse_pd", *links}
    source = (DEPLOY / "Dockerfile").read_text().split(" AS source\n")[1].split("\nFROM ")[0]
    copied = {word for line in re.findall(r"^COPY (.*) /\w*$", source, re.MULTILINE) for word in line.split()}
    seen = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert rooms == copied
    assert rooms <= seen


@pytest.mark.parametrize("release", [(3, 10), (3, 14)])
def test_make_says_at_once_which_pythons_have_wheels(tmp_path: Path, release: tuple[int, int]) -> None:
    python = tmp_path / "python"
    of_release = f"import sys; sys.version_info = {(*release, 0)}; exec(sys.argv[2])"
    python.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo Python {release[0]}.{release[1]}.0 && exit\n")
    with python.open("a") as script:
        script.write(f'exec {sys.executable} -c "{of_release}" "$@"\n')
    python.chmod(0o755)
    command = ["make", "-C", str(DEPLOY.parent), f"VENV={tmp_path}/venv", f"PYTHON={python}", "setup"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "Python 3.11, 3.12 or 3.13 is needed, because Mooncake has wheels for no other" in done.stderr
    assert f"is: Python {release[0]}.{release[1]}.0" in done.stderr
    assert not (tmp_path / "venv").exists()
