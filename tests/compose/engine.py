"""A Docker engine for the tests: the one that runs, else one of their own that leaves nothing behind.

An own engine has a private socket and a private data directory. What it changes outside of them (its bridge,
packet filter rules, forwarding, control groups) is put back when it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_SECS = 60.0
STOP_TIMEOUT_SECS = 60.0
_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_BRIDGE = Path("/sys/class/net/docker0")
_PASSED = re.compile(r"(?i)(https?|no)_proxy|PATH|HOME|LANG|DOCKER_.*")


class CommandFailed(Exception):
    """A command ended with another status than 0; the message has its output."""


class EngineMissing(Exception):
    """There is no engine, and none can be started; the message says what to install."""


@dataclass(frozen=True)
class Engine:
    """How commands reach the engine: their environment, in which nothing overrides a deployment's .env."""

    environment: dict[str, str]
    is_own: bool

    def docker(self, *arguments: str, timeout_secs: float = 120.0) -> str:
        return run(["docker", *arguments], self.environment, timeout_secs)

    def compose_command(self) -> list[str]:
        """``docker compose`` where it is installed, else ``docker-compose``."""
        with contextlib.suppress(CommandFailed):
            self.docker("compose", "version")
            return ["docker", "compose"]
        if shutil.which("docker-compose") is None:
            raise EngineMissing("neither `docker compose` nor docker-compose is installed")
        return ["docker-compose"]


def run(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    timeout_secs: float = 120.0,
    directory: Path | None = None,
) -> str:
    """Standard output. Raises CommandFailed with all output, subprocess.TimeoutExpired."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_secs, cwd=directory
    )
    if done.returncode != 0:
        output = (done.stdout + done.stderr)[-6000:]
        raise CommandFailed(f"{' '.join(command)}: status {done.returncode}\n{output}")
    return done.stdout


@contextlib.contextmanager
def docker_engine() -> Iterator[Engine]:
    """Raises EngineMissing."""
    if shutil.which("docker") is None:
        raise EngineMissing(
            "no docker command; on Debian: apt-get install docker.io docker-compose debootstrap"
        )
    environment = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    running = Engine(environment, is_own=False)
    try:
        running.docker("info")
    except CommandFailed as error:
        if shutil.which("dockerd") is None or os.geteuid() != 0:
            raise EngineMissing(
                f"no engine answers, and only root with dockerd can start one: {error}"
            ) from None
    else:
        yield running
        return
    root = Path(tempfile.mkdtemp(prefix="hisparse-pd-docker-"))
    try:
        with _surroundings_restored(), _dockerd(root) as host:
            yield Engine({**environment, "DOCKER_HOST": host}, is_own=True)
    finally:
        _remove(root)


@contextlib.contextmanager
def _dockerd(root: Path) -> Iterator[str]:
    """An engine of our own; yields its DOCKER_HOST."""
    host = f"unix://{root}/docker.sock"
    command = ["dockerd", "--host", host, "--data-root", f"{root}/data", "--exec-root", f"{root}/run"]
    with (root / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--pidfile", f"{root}/docker.pid"], stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_SECS
        while True:
            try:
                run(["docker", "info"], {**os.environ, "DOCKER_HOST": host})
                break
            except CommandFailed as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    log_text = (root / "dockerd.log").read_text(errors="replace")[-4000:]
                    raise EngineMissing(f"dockerd does not start: {error}\n{log_text}") from None
            time.sleep(0.2)
        yield host
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_SECS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _surroundings_restored() -> Iterator[None]:
    """Forwarding, the packet filter and the bridge are afterwards as they were."""
    had_bridge, forwarding, rules = _BRIDGE.exists(), _IP_FORWARD.read_text(), _packet_filter()
    try:
        yield
    finally:
        new = [_built_in_chains(text) for table, text in _packet_filter().items() if table not in rules]
        for text in (*rules.values(), *new):
            subprocess.run(["iptables-restore"], input=text, text=True, check=True)
        if not had_bridge and _BRIDGE.exists():
            subprocess.run(["ip", "link", "delete", "docker0"], check=True)
        _IP_FORWARD.write_text(forwarding)
        for group in Path("/sys/fs/cgroup").glob("*/docker"):
            with contextlib.suppress(OSError):
                group.rmdir()


def _packet_filter() -> dict[str, str]:
    """The rules as `iptables-restore` takes them, by table."""
    text = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    tables = re.findall(r"(?ms)^(\*(\w+)\n.*?^COMMIT\n)", text)
    return {name: rules for rules, name in tables}


def _built_in_chains(table: str) -> str:
    """The table without rules and chains of its own, which accepts everything."""
    chains = re.findall(r"(?m)^:(\S+) (?:ACCEPT|DROP) ", table)
    return "\n".join([table.splitlines()[0], *(f":{chain} ACCEPT [0:0]" for chain in chains), "COMMIT\n"])


def _remove(root: Path) -> None:
    """Whatever is still mounted below goes first; raises OSError when something cannot be removed."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((path for path in mounts if path.startswith(f"{root}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True)
    shutil.rmtree(root)
