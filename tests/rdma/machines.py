"""Two machines with software RDMA devices, for as long as a test session.

Each is a QEMU process that boots ``image.py``'s kernel and sees this machine's files; what it writes stays in
its own memory. Each has two networks, as servers do: ``eth0`` (10.77.0.0/24) joins the machines and carries
RDMA; ``eth1`` has the default route and the same address in both, so a node that advertised that address
would send its peer to itself. Some ports of eth1 are forwarded from this machine's loopback address.

Nothing outlives the session: there is no bridge or tap (but QEMU's user network, and a socket pair between
the two) and no disk, and the kernel kills QEMU when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hisparse_pd.base.ports import free_port
from tests.rdma.command import Command, CommandError, start_command
from tests.rdma.image import REPO, BootImage, boot_image

DEVICE = "rxe0"
NETDEV = "eth0"
AGENT_PORT = 4000
NODE_PORT = 30000
ROUTER_PORT = 30001
MEMORY_MIB = 3072
BOOT_TIMEOUT_SECS = 300.0

_QEMU = "qemu-system-x86_64"


class MachineError(Exception):
    """A machine did not start; the message has the end of its console."""


@dataclass
class Machine:
    """One machine. ``address``: on eth0. ``forwarded``: this machine's port for each port of that one."""

    name: str
    address: str
    forwarded: Mapping[int, int]
    console: Path
    key: str
    process: subprocess.Popen[bytes]

    def start(self, *command: str) -> Command:
        """Run a command as root in the checkout's directory; the caller closes it."""
        name = f"{self.name}: {shlex.join(command)}"
        return start_command(self.forwarded[AGENT_PORT], self.key, name, list(command), REPO)

    def run(self, *command: str) -> Command:
        """Run a command to its end. Raises CommandError when it is not done in time or does not succeed."""
        done = self.start(*command)
        try:
            status = done.wait()
        finally:
            done.close()
        if status != 0:
            raise CommandError(
                f"{self.name}: {shlex.join(command)}: status {status}\n"
                f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            )
        return done

    def url(self, port: int) -> str:
        """Return the URL at which this machine reaches an HTTP service on ``port`` of that one."""
        return f"http://127.0.0.1:{self.forwarded[port]}"

    def add_device(self) -> None:
        self.run("rdma", "link", "add", DEVICE, "type", "rxe", "netdev", NETDEV)
        self.wait_device()

    def wait_device(self) -> None:
        """Wait until the device is active and has the GID of the machine's address, which comes later."""
        port = f"/sys/class/infiniband/{DEVICE}/ports/1"
        gid = "ffff:{:02x}{:02x}:{:02x}{:02x}".format(*map(int, self.address.split(".")))
        is_ready = f"grep -q ACTIVE {port}/state && cat {port}/gids/* | grep -q {gid}"
        self.run("sh", "-c", f"until {is_ready}; do sleep 0.1; done")

    def remove_device(self) -> None:
        self.run("rdma", "link", "delete", DEVICE)

    def counters(self, device: str = DEVICE) -> dict[str, int]:
        """Return an RDMA device's counters since it was made, such as ``sent_pkts``."""
        directory = f"/sys/class/infiniband/{device}/ports/1/hw_counters"
        lines = self.run("grep", "-r", ".", directory).stdout.splitlines()
        return {Path(name).name: int(value) for name, value in (line.split(":") for line in lines)}

    def wait_booted(self) -> None:
        """Wait until the agent answers. Raises MachineError when it does not in time."""
        deadline = time.monotonic() + BOOT_TIMEOUT_SECS
        while True:
            try:
                self.run("true")
            except OSError as error:
                if self.process.poll() is not None:
                    why = f"QEMU ended with status {self.process.returncode}"
                elif time.monotonic() > deadline:
                    why = f"no agent within {BOOT_TIMEOUT_SECS:g} s ({error})"
                else:
                    time.sleep(0.1)
                    continue
                raise MachineError(f"{self.name}: {why}\n{self.console_tail()}") from error
            return

    def console_tail(self) -> str:
        return self.console.read_bytes()[-4000:].decode(errors="replace")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Boot both, without RDMA devices. Raises ImageMissing, MachineError."""
    image = boot_image()
    with (
        tempfile.TemporaryDirectory(prefix="hisparse-pd-machines-") as directory,
        contextlib.ExitStack() as ends,
    ):
        wires = socket.socketpair()
        machines = []
        try:
            for number, wire in enumerate(wires):
                machine = _boot(image, Path(directory), number, wire)
                machines.append(machine)
                ends.callback(_end, machine)
        finally:
            for wire in wires:
                wire.close()
        for machine in machines:
            machine.wait_booted()
        yield machines[0], machines[1]


def _processor() -> list[str]:
    """QEMU's options for the processor: hardware virtualization where it works, else an interpreter.

    A kernel can offer /dev/kvm on a processor without virtualization, for guests that are made for it; a
    stock kernel never starts there. With the interpreter a second CPU costs more, by interrupts between the
    two, than it gains, and fused products of wide registers take ten times as long as plain ones.
    """
    flags = re.search(r"(?m)^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text())
    has_hardware = flags is not None and not {"vmx", "svm"}.isdisjoint(flags[1].split())
    if has_hardware and os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ["-accel", "kvm", "-cpu", "max", "-smp", "2"]
    return ["-accel", "tcg,tb-size=512", "-cpu", "max,-avx,-avx2,-fma", "-smp", "1"]


def _boot(image: BootImage, directory: Path, number: int, wire: socket.socket) -> Machine:
    """Start QEMU. ``wire``: the machine's end of the network between the two."""
    name, address = f"machine-{number}", f"10.77.0.{number + 1}"
    console, start, key = directory / f"{name}.console", directory / f"{name}.start", secrets.token_hex(16)
    start.write_text(_start_script(key))
    start.chmod(0o600)
    console.touch()
    forwarded = {port: free_port() for port in (AGENT_PORT, NODE_PORT, ROUTER_PORT)}
    forwards = "".join(f",hostfwd=tcp:127.0.0.1:{ours}-:{theirs}" for theirs, ours in forwarded.items())
    arguments = [
        *_processor(),
        *("-m", f"{MEMORY_MIB}", "-nodefaults", "-no-reboot", "-display", "none"),
        *("-serial", f"file:{console}", "-kernel", f"{image.kernel}", "-initrd", f"{image.initrd}"),
        "-append",
        f"console=ttyS0 quiet panic=-1 machine_address={address} machine_start={start}",
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *("-netdev", f"socket,id=wire,fd={wire.fileno()}"),
        *("-device", f"virtio-net-pci,netdev=wire,mac=52:54:00:77:00:{number + 1:02x}"),
        *("-netdev", f"user,id=front,restrict=on{forwards}"),
        *("-device", f"virtio-net-pci,netdev=front,mac=52:54:00:77:01:{number + 1:02x}"),
    ]
    with console.open("ab") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", _QEMU, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[wire.fileno()],
        )
    return Machine(name, address, forwarded, console, key, process)


def _start_script(key: str) -> str:
    """Script that starts the agent, the last step of a machine's start."""
    environment = {
        "AGENT_KEY": key,
        "HOME": "/tmp",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(REPO),
        "PYTHONUNBUFFERED": "1",
    }
    assignments = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    agent: Sequence[str] = (sys.executable, str(Path(__file__).with_name("agent.py")), str(AGENT_PORT))
    return f"{assignments}exec {shlex.join(agent)}\n"


def _end(machine: Machine) -> None:
    machine.process.kill()
    machine.process.wait()
