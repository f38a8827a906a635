"""What a pair with default settings opens to other machines: nothing."""

from __future__ import annotations

import socket

import pytest

from hisparse_pd.base.access import parse_address
from tests.integration.harness import Deployment
from tests.port_scan import listening

pytestmark = [pytest.mark.I1, pytest.mark.I7]


@pytest.fixture
def other_address() -> str:
    """An address of this machine that is not loopback; to nodes it is as foreign as another machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing, but chooses a source address
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(sock.getsockname()[0])


def test_nothing_is_open_to_other_machines_by_default(pair: Deployment, other_address: str) -> None:
    num_filtered = 0
    for service in pair.services:
        ports = listening([service.pid])
        assert {port for _, port in ports} >= {service.port}
        for address, port in ports:
            parsed = parse_address(address)
            assert parsed is not None
            if parsed.is_loopback:
                continue
            with pytest.raises(TimeoutError):
                socket.create_connection((other_address, port), 0.2, (other_address, 0)).close()
            socket.create_connection(("127.0.0.1", port), 10).close()
            num_filtered += 1
    assert num_filtered > 0, "Mooncake binds all interfaces; if it does no more, the filter can go"
