"""A Docker engine for the tests: the one that runs, else one of their own that leaves nothing behind.

A running engine is what the docker command finds, so ``DOCKER_HOST`` can name another. An own engine has a
private socket and a private data directory. What it changes outside of them (``Surroundings``) is put back
when it ends.
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
ROOT_PREFIX = "hisparse-pd-docker-"
_FORWARDING = tuple(Path("/proc/sys/net", name) for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"))
_INTERFACES = Path("/sys/class/net")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_DIRECTORIES = tuple(map(Path, ("/etc/docker", "/opt/containerd", "/run/containerd", "/run/docker")))
"""Directories where dockerd and containerd put a key, sockets and the like, whatever their options."""

_PACKET_FILTERS = ("iptables", "ip6tables")
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
        """Return ``docker compose`` where it is installed, else ``docker-compose``."""
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
    """Run a command; return its output. Raises CommandFailed with all output, subprocess.TimeoutExpired."""
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_secs, cwd=directory
    )
    if done.returncode != 0:
        output = (done.stdout + done.stderr)[-6000:]
        raise CommandFailed(f"{' '.join(command)}: status {done.returncode}\n{output}")
    return done.stdout


@contextlib.contextmanager
def docker_engine() -> Iterator[Engine]:
    """Yield the running engine, or one that is started here. Raises EngineMissing."""
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
    before = Surroundings.now()
    root = Path(tempfile.mkdtemp(prefix=ROOT_PREFIX))
    try:
        with _dockerd(root) as host:
            yield Engine({**environment, "DOCKER_HOST": host}, is_own=True)
    finally:
        before.restore()
        _remove(root)
        left = Surroundings.now().differences(before)
        assert not left, f"the engine left {left}"


@contextlib.contextmanager
def _dockerd(root: Path) -> Iterator[str]:
    """Run an engine of our own; yield its DOCKER_HOST."""
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


@dataclass(frozen=True)
class Surroundings:
    """What an engine changes outside of its own directory."""

    mounts: frozenset[str]
    interfaces: frozenset[str]
    directories: frozenset[Path]
    control_groups: frozenset[Path]
    forwarding: dict[Path, str]
    rules: dict[tuple[str, str], str]
    """Rules by packet filter and table, as its ``-restore`` takes them, without counters."""

    @classmethod
    def now(cls) -> Surroundings:
        return cls(
            mounts=frozenset(line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()),
            interfaces=frozenset(path.name for path in _INTERFACES.iterdir()),
            directories=frozenset(path for path in _DIRECTORIES if path.exists()),
            control_groups=frozenset((*_CONTROL_GROUPS.glob("docker"), *_CONTROL_GROUPS.glob("*/docker"))),
            forwarding={path: path.read_text() for path in _FORWARDING if path.exists()},
            rules=_packet_filter_rules(),
        )

    def differences(self, before: Surroundings) -> list[str]:
        """Return what is new, or not as it was ``before``."""
        new = (self.mounts - before.mounts, self.interfaces - before.interfaces)
        paths = (self.directories - before.directories, self.control_groups - before.control_groups)
        changed = [path for path in self.forwarding if self.forwarding[path] != before.forwarding.get(path)]
        return [
            *(f"{each}" for kind in (*new, *paths) for each in sorted(kind)),
            *map(str, changed),
            *(
                rules
                for table, rules in self.rules.items()
                if rules != before.rules.get(table, _empty(rules))
            ),
        ]

    def restore(self) -> None:
        """Put everything back as it was here. Raises CalledProcessError, OSError."""
        now = Surroundings.now()
        for filter_and_table, rules in now.rules.items():
            text = self.rules.get(filter_and_table, _empty(rules))
            if text != rules:
                command = [f"{filter_and_table[0]}-restore"]
                subprocess.run(command, input=text, text=True, check=True)
        for name in now.interfaces - self.interfaces:
            if name == "docker0":
                subprocess.run(["ip", "link", "delete", name], check=True)
        for path, text in self.forwarding.items():
            path.write_text(text)
        for path in now.directories - self.directories:
            shutil.rmtree(path)
        for path in now.control_groups - self.control_groups:
            path.rmdir()


def _packet_filter_rules() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for name in filter(shutil.which, _PACKET_FILTERS):
        text = subprocess.run([f"{name}-save"], capture_output=True, text=True, check=True).stdout
        text = re.sub(r"\[\d+:\d+\]", "[0:0]", text)
        found |= {(name, table): rules for rules, table in re.findall(r"(?ms)^(\*(\w+)\n.*?^COMMIT\n)", text)}
    return found


def _empty(rules: str) -> str:
    """The table without rules and chains of its own, which accepts everything."""
    chains = re.findall(r"(?m)^:(\S+) (?:ACCEPT|DROP) ", rules)
    return "\n".join([rules.splitlines()[0], *(f":{chain} ACCEPT [0:0]" for chain in chains), "COMMIT\n"])


def _remove(root: Path) -> None:
    """Unmount what is mounted below ``root``, and remove it. Raises OSError when something stays."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((path for path in mounts if path.startswith(f"{root}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True)
    shutil.rmtree(root)
