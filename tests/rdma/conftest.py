"""Two machines for all tests of a session, each with an RDMA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.rdma.machines import Machine, two_machines


@pytest.fixture(scope="session")
def machines() -> Iterator[tuple[Machine, Machine]]:
    """The first is for the prefill node, the second for the decode node."""
    with two_machines() as (first, second):
        for machine in (first, second):
            machine.add_device()
        yield first, second


@contextmanager
def without_device(machine: Machine) -> Iterator[None]:
    machine.remove_device()
    try:
        yield
    finally:
        machine.add_device()
