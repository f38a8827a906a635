"""The transfer layer alone, from machine to machine by RDMA verbs, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rdma.endpoint import Endpoint, endpoint
from tests.rdma.machines import Machine
from tests.rdma.patterns import MAX_PAYLOAD_BYTES, MEMORY_BYTES, OBJECT, PATTERNS, Pattern
from tests.rdma.store import running_master, store_address

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def endpoints(machines: tuple[Machine, Machine]) -> Iterator[tuple[Endpoint, Endpoint]]:
    """The memory of the first is copied into the second's."""
    with endpoint(machines[0]) as source, endpoint(machines[1]) as target:
        yield source, target


def moved(verb: str, pattern: Pattern, source: Endpoint, target: Endpoint, offset: int = 0) -> str:
    """Copy a pattern, which the source writes or the target reads. Returns the error, or an empty string.
    ``offset``: added to the address of the peer's memory."""
    if verb == "write":
        return source.write(pattern, target.session, target.base_addr + offset)
    return target.read(pattern, source.session, source.base_addr + offset)


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_every_byte_lands_and_no_other_changes(
    machines: tuple[Machine, Machine], endpoints: tuple[Endpoint, Endpoint], pattern: Pattern, verb: str
) -> None:
    """The bytes go the same way whichever end moves them."""
    source, target = endpoints
    target.poison()
    before = [machine.counters() for machine in machines]
    assert moved(verb, pattern, source, target) == ""
    assert target.check(pattern) == ""
    sent, received = (
        machine.counters()[name] - counted[name]
        for machine, counted, name in zip(machines, before, ("sent_pkts", "rcvd_pkts"), strict=True)
    )
    assert min(sent, received) >= pattern.num_bytes / MAX_PAYLOAD_BYTES, "verbs carried it"


@pytest.mark.parametrize(("verb", "what"), [("write", "destination"), ("read", "source")])
def test_what_is_outside_registered_memory_fails_and_the_next_one_does_not(
    endpoints: tuple[Endpoint, Endpoint], verb: str, what: str
) -> None:
    source, target = endpoints
    target.poison()
    error = moved(verb, PATTERNS[0], source, target, offset=MEMORY_BYTES)
    assert f"has not registered the {what}" in error
    assert moved(verb, PATTERNS[0], source, target) == ""
    assert target.check(PATTERNS[0]) == ""


def test_an_object_of_the_store_goes_by_verbs_to_memory_that_a_peer_lends(
    machines: tuple[Machine, Machine], endpoints: tuple[Endpoint, Endpoint]
) -> None:
    lender, writer = endpoints
    num_bytes = sum(size for _, size in OBJECT)
    before = [machine.counters() for machine in machines]
    with running_master(machines[1]):
        lender.join(store_address(machines[1]), lent_bytes=16 << 20)
        writer.join(store_address(machines[1]), lent_bytes=0)
        assert writer.put("object") == "DONE"
        writer.poison()
        assert writer.get("object") == "DONE"
        assert writer.get("another") == "ABSENT"
    assert writer.check_object() == ""
    for machine, counted in zip(machines, before, strict=True):
        num_packets = machine.counters()["sent_pkts"] - counted["sent_pkts"]
        assert num_packets >= num_bytes / MAX_PAYLOAD_BYTES, "verbs carried it both ways"


def test_the_death_of_a_peer_is_an_error_and_the_next_peer_is_written_to(
    machines: tuple[Machine, Machine], endpoints: tuple[Endpoint, Endpoint]
) -> None:
    writer, _ = endpoints
    pattern = PATTERNS[0]
    with endpoint(machines[1]) as mortal:
        assert writer.write(pattern, mortal.session, mortal.base_addr) == ""
    assert "the peer is gone" in writer.write(pattern, mortal.session, mortal.base_addr)
    with endpoint(machines[1]) as successor:
        successor.poison()
        assert writer.write(pattern, successor.session, successor.base_addr) == ""
        assert successor.check(pattern) == ""
