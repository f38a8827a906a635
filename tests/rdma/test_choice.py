"""The transport that is chosen with an RDMA device and without: RDMA, TCP, or an error that says what is
missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.rdma.conftest import without_device
from tests.rdma.endpoint import choose, endpoint
from tests.rdma.machines import DEVICE, Machine
from tests.rdma.patterns import PATTERNS

NUM_BYTES = 1 << 20
SECOND_DEVICE, SECOND_NETDEV, SECOND_ADDRESS = "rxe1", "eth1", "10.0.2.15"

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1800)]


@pytest.fixture
def machine(machines: tuple[Machine, Machine]) -> Machine:
    return machines[1]


@contextmanager
def second_device(machine: Machine) -> Iterator[None]:
    """A second RDMA device, on the network that does not join the machines."""
    machine.run("rdma", "link", "add", SECOND_DEVICE, "type", "rxe", "netdev", SECOND_NETDEV)
    try:
        yield
    finally:
        machine.run("rdma", "link", "delete", SECOND_DEVICE)


@pytest.mark.parametrize("protocol", ["rdma", "auto"])
def test_a_usable_device_is_used_and_shown(machine: Machine, protocol: str) -> None:
    chosen = choose(machine, protocol)
    assert (chosen["protocol"], chosen["devices"]) == ("rdma", [DEVICE])
    assert chosen["reason"] == f"RDMA devices usable: {DEVICE}"
    assert chosen["info_metric"] == (
        f'transfer_info{{protocol="rdma",devices="{DEVICE}",reason="RDMA devices usable: {DEVICE}"}}'
    )
    assert chosen["session"].startswith(f"{machine.address}:")


def test_without_the_device_rdma_is_refused_and_auto_says_why(machine: Machine) -> None:
    with without_device(machine):
        for named in ("", DEVICE):
            error = choose(machine, "rdma", named)["error"]
            assert "--transfer-protocol rdma: no RDMA device in /sys/class/infiniband" in error
            assert "--transfer-protocol tcp" in error, "the remedy"
        chosen = choose(machine, "auto")
        assert chosen["protocol"] == "tcp"
        assert chosen["reason"] == "no RDMA: no RDMA device in /sys/class/infiniband"
        # Even if the checks missed it, Mooncake must not fall back to TCP.
        assert "Mooncake cannot start" in choose(machine, "unchecked", DEVICE)["error"]


def test_an_interface_that_is_down_is_named(machine: Machine) -> None:
    # A device has GIDs from its interface's addresses, and its state from the link's.
    machine.run("ip", "link", "set", "eth0", "down")
    try:
        error = choose(machine, "rdma")["error"]
        assert f"{DEVICE} port 1 is in state '1: DOWN', not '4: ACTIVE'" in error
        assert "bring its interface up" in error
    finally:
        machine.run("ip", "link", "set", "eth0", "up")
        machine.wait_device()


def test_a_device_without_an_address_is_not_for_auto(machine: Machine) -> None:
    address = f"{machine.address}/24"
    machine.run("ip", "addr", "del", address, "dev", "eth0")
    try:
        chosen = choose(machine, "auto", host=SECOND_ADDRESS)
        assert chosen["protocol"] == "tcp"
        assert f"{DEVICE} has no GID with an IP address" in chosen["reason"]
    finally:
        machine.run("ip", "addr", "add", address, "dev", "eth0")
        machine.wait_device()


def test_too_little_locked_memory_is_refused_with_both_numbers(machine: Machine) -> None:
    limited = ("prlimit", f"--memlock={NUM_BYTES}", "setpriv", "--bounding-set=-ipc_lock")
    error = choose(machine, "rdma", num_bytes=NUM_BYTES + 1, wrapper=limited)["error"]
    assert f"limited to {NUM_BYTES} bytes" in error
    assert f"{NUM_BYTES + 1} bytes" in error
    assert "ulimit -l unlimited" in error
    assert choose(machine, "rdma", num_bytes=NUM_BYTES, wrapper=limited)["protocol"] == "rdma"


def test_of_several_devices_those_that_are_named_are_used(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    with second_device(second):
        both = choose(second, "rdma", f"{DEVICE},{SECOND_DEVICE}")
        assert both["devices"] == [DEVICE, SECOND_DEVICE]
        note = f"{SECOND_DEVICE} has the address {SECOND_ADDRESS}, not the advertised {second.address}"
        assert note in both["reason"]
        error = choose(second, "rdma", f"{DEVICE},nothing_0")["error"]
        assert f"nothing_0 is not in /sys/class/infiniband, which has: {DEVICE}, {SECOND_DEVICE}" in error

        # The other device's network does not lead to the peer, so bytes that arrive came by the named one.
        pattern = PATTERNS[0]
        with endpoint(first) as writer, endpoint(second, DEVICE) as target:
            before = second.counters(), second.counters(SECOND_DEVICE)
            target.poison()
            assert writer.write(pattern, target.session, target.base_addr) == ""
            assert target.check(pattern) == ""
            assert second.counters()["rcvd_pkts"] > before[0]["rcvd_pkts"]
            assert second.counters(SECOND_DEVICE)["rcvd_pkts"] == before[1]["rcvd_pkts"]
