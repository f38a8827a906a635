"""``hisparse-pd doctor``: checks a machine before a deployment, and measures how fast it writes to its peer.

``commands/cli.py`` calls ``run``. ``examine`` makes the checks of the modules beside this one and collects a
``Report``; ``run_server`` is the other end of a measurement. The exit status is 0 if nothing is missing that
the given settings need, else 1. Warnings do not count.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.process import say
from hisparse_pd.commands.doctor.bandwidth import (
    BUFFER_BYTES,
    MESSAGE_BYTES,
    Buffer,
    Rate,
    measure,
    serve,
)
from hisparse_pd.commands.doctor.channel import DoctorClient, DoctorError, DoctorServer
from hisparse_pd.commands.doctor.checks import (
    Check,
    Status,
    check_address,
    check_cuda,
    check_descriptors,
    check_devices,
    check_gpu_direct,
    check_memlock,
    check_memory,
    check_mooncake,
    check_pinned,
    check_transport,
    check_verbs,
    cuda_facts,
    failed,
    mooncake_version,
)
from hisparse_pd.commands.doctor.lane import check_lane, check_shared_pages
from hisparse_pd.commands.doctor.numa import check_numa
from hisparse_pd.commands.doctor.settings import DoctorSettings
from hisparse_pd.commands.doctor.store import check_store
from hisparse_pd.core.memory.machine import Machine, show_bytes
from hisparse_pd.serving.http import descriptors
from hisparse_pd.transfer.engine import TransferEngine, TransferError, quiet_mooncake_logs
from hisparse_pd.transfer.lane_host import LaneHost
from hisparse_pd.transfer.listeners import guarded_listeners
from hisparse_pd.transfer.rdma import wanted_devices
from hisparse_pd.transfer.transport import Transport, choose_transport, select_devices

SERVE_SECS = 3600.0
"""How long ``--serve`` serves."""
MEASURE_SECS = 1.0
"""Length of the measurement of one message size."""
_STYLES = {Status.OK: "green", Status.INFO: "dim", Status.WARN: "yellow", Status.FAIL: "bold red"}


@dataclass(frozen=True)
class Report:
    """The doctor's findings."""

    checks: tuple[Check, ...]
    transport: Transport | None
    """KV transport that a node would use; None if the node would not start."""
    rates: tuple[Rate, ...] = ()

    @property
    def is_ok(self) -> bool:
        return all(check.status is not Status.FAIL for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it."""
        return {
            "ok": self.is_ok,
            "transport": asdict(self.transport) if self.transport else None,
            "checks": [asdict(check) for check in self.checks],
            "bandwidth": [
                {
                    **asdict(rate),
                    "bytes_per_sec": rate.bytes_per_sec,
                    "secs_per_message": rate.secs_per_message,
                }
                for rate in self.rates
            ],
        }


def run(settings: DoctorSettings, *, as_json: bool) -> int:
    """Run the command. Returns the exit status of the process."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)  # the report has the rest
    quiet_mooncake_logs()
    if settings.serve:
        return run_server(settings, as_json=as_json)
    report = examine(settings, Machine())
    if as_json:
        say(json.dumps(report.to_dict(), indent=2))
    else:
        text = StringIO()
        print_report(report, Console(file=text, force_terminal=sys.stdout.isatty()))
        say(text.getvalue().rstrip())
    return 0 if report.is_ok else 1


def examine(settings: DoctorSettings, machine: Machine) -> Report:
    """Make all checks, and the measurement if there is a peer and nothing is missing for it."""
    asked, device, host = settings.transfer_protocol, settings.device, settings.reachable_host
    num_registered_bytes = settings.host_pool_bytes + (BUFFER_BYTES if settings.peer else 0)
    cuda = cuda_facts()
    numa_checks, near = check_numa(settings, machine)  # near: RDMA devices beside the first GPU
    named, _ = wanted_devices(settings.ib_device, machine)
    num_devices = len(named or select_devices("", host, machine, near).devices)
    transport_check, transport = check_transport(settings, num_registered_bytes, machine, near)
    mooncake_check = check_mooncake(host, mooncake_version)
    checks = [
        mooncake_check,
        check_verbs(host, machine),
        *check_devices(asked, settings.ib_device, host, machine),
        check_memlock(num_registered_bytes, num_devices, asked, machine),
        check_gpu_direct(device, asked, machine),
        check_cuda(device, cuda, machine),
        check_pinned(device, cuda),
        check_memory(settings.host_pool_bytes, machine),
        *numa_checks,
        check_lane(settings.same_host_dir),
        check_shared_pages(device, settings.host_pool_bytes, machine),
        check_descriptors(descriptors.attainable_limit()),
        check_address(host),
        transport_check,
    ]
    if settings.kv_store and transport is not None and mooncake_check.status is Status.OK:
        checks.append(check_store(settings, transport))
    rates: list[Rate] = []
    if settings.peer and transport is not None and mooncake_check.status is Status.OK:
        peer_check, rates = check_peer(settings, transport)
        checks.append(peer_check)
    return Report(tuple(checks), transport, tuple(rates))


def check_peer(settings: DoctorSettings, transport: Transport) -> tuple[Check, list[Rate]]:
    """Connect to the doctor at ``settings.peer`` and measure writes to it."""
    name = f"peer {settings.peer}"
    host, port = settings.peer_address
    try:
        with closing(DoctorClient(host, int(port), settings.peer_timeout_secs)) as client:
            allowed = PeerList.parse(settings.allowed_peers)
            is_asked_back = transport.protocol == "rdma"  # an RDMA peer connects back for the GID
            # The ports on which the engine begins to listen are open to the allowed peers alone.
            with guarded_listeners(settings.reachable_host, allowed, has_peers=is_asked_back):
                engine = TransferEngine(settings.reachable_host, transport)
            device, directory = settings.device, settings.same_host_dir
            with closing(engine):
                rates, lane = measure(client, engine, MESSAGE_BYTES, MEASURE_SECS, device, directory)
    except (DoctorError, TransferError) as error:
        return failed(name, error), []
    best: dict[str, float] = {}  # the highest rate over each lane, in bytes a second
    for rate in rates:
        best[rate.over] = max(rate.bytes_per_sec, best.get(rate.over, 0.0))
    found = " and ".join(f"{best[kind] / 1e9:.3g} GB/s over {kind}" for kind in sorted(best, reverse=True))
    if "shm" not in best:
        found += f"; no shared memory: {lane.reason}"
    return Check(name, Status.OK, f"up to {found}"), rates


def run_server(settings: DoctorSettings, *, as_json: bool) -> int:
    """Offer a buffer to other doctors, until SIGTERM, SIGINT or ``SERVE_SECS``. Returns the exit status."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    deadline_secs = time.monotonic() + SERVE_SECS
    try:
        num_host_bytes = BUFFER_BYTES if settings.device == "cpu" else 0  # a GPU's buffer is not main memory
        transport = choose_transport(settings, num_host_bytes)
        with guarded_listeners(settings.reachable_host, PeerList.parse(settings.allowed_peers)):
            engine = TransferEngine(settings.reachable_host, transport)
            server = DoctorServer(settings.host, settings.port)
        buffer = Buffer(engine, BUFFER_BYTES, settings.device, shared=True)
        memory, directory = buffer.shared_memory, settings.same_host_dir
        lane_host = LaneHost(memory, directory=directory) if memory else None
    except (DoctorError, TransferError) as error:
        print(f"hisparse-pd doctor: error: {error}", file=sys.stderr)
        return 1
    _announce(settings, server.port, engine, as_json=as_json)
    try:
        lane_offer = lane_host.offer if lane_host else None
        serve(server, engine, buffer, deadline_secs, stopped.is_set, lane_offer)
    finally:
        server.close()
        if lane_host is not None:
            lane_host.close()
        buffer.close()
        engine.close()
    return 0


def _announce(settings: DoctorSettings, port: int, engine: TransferEngine, *, as_json: bool) -> None:
    """Print where the buffer is served, and how to measure from another machine."""
    facts = {
        "host": settings.host,
        "port": port,
        "session": engine.session,
        "transport": asdict(engine.transport),
        "device": settings.device,
        "num_bytes": BUFFER_BYTES,
    }
    if as_json:
        say(json.dumps(facts))
        return
    say(
        f"serving {show_bytes(BUFFER_BYTES)} on {settings.device} over {engine.transport.protocol} for "
        f"{SERVE_SECS:g} s; measure from another machine, one at a time, with\n"
        f"    hisparse-pd doctor --transfer-protocol {engine.transport.protocol} "
        f"--advertise-host ITS_ADDRESS --peer {settings.reachable_host}:{port}"
    )


# --- the report as text -----------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    """Print the checks, the measured rates and a verdict."""
    table = Table(show_edge=False, pad_edge=False)
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        style = _STYLES[check.status]
        found = f"{check.found}\n-> {check.remedy}" if check.remedy else check.found
        table.add_row(check.name, f"[{style}]{check.status}[/]", _plain(found))
    console.print(table)
    if report.rates:
        console.print()
        console.print(_rates_table(report.rates))
    console.print()
    num_failed = sum(check.status is Status.FAIL for check in report.checks)
    num_warned = sum(check.status is Status.WARN for check in report.checks)
    verdict = "all good" if report.is_ok else f"{num_failed} failed"
    warnings = f", {num_warned} warning{'s' if num_warned > 1 else ''}" if num_warned else ""
    console.print(f"{verdict}{warnings}")


def _rates_table(rates: tuple[Rate, ...]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for column in ("over", "message bytes", "GB/s", "us a message", "messages"):
        table.add_column(column, justify="right")
    for rate in rates:
        table.add_row(
            rate.over,
            f"{rate.message_bytes}",
            f"{rate.bytes_per_sec / 1e9:.3f}",
            f"{rate.secs_per_message * 1e6:.1f}",
            f"{rate.num_messages}",
        )
    return table


def _plain(text: str) -> str:
    """Escape brackets, as in IPv6 addresses, which rich would take for markup."""
    return text.replace("[", r"\[")
