"""``PeerList``: the addresses that may reach a node; and checks of what hosts and addresses look like.

A node parses one list from ``--allowed-peers``. Its control socket (``protocol/zap.py``), its bootstrap
endpoint and look-up (``protocol/bootstrap.py``), registrations (``prefill_node/registrations.py``) and the KV
ports (``transfer/listeners.py``) all ask that list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from hisparse_pd.base.vocabulary import StartError

Network = IPv4Network | IPv6Network

MAX_NETWORKS = 256
"""Limit of entries in a list. Each becomes a few instructions in the KV ports' packet filter, and the kernel
accepts filters of 4096 instructions."""

MAX_HOST_CHARS = 253
"""Longest name that DNS has."""

WILDCARD_HOSTS = ("", "0.0.0.0", "::", "*")
"""Hosts that stand for every address of a machine. A socket can bind them, but no peer can connect to
them."""

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")
_LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))


class KeyFileError(StartError):
    """A file with keys cannot be used. The message names the file and never shows its content."""


@dataclass(frozen=True)
class PeerList:
    """The addresses and networks of ``--allowed-peers``; empty allows every address."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> PeerList:
        """Parse the entries. Raises ValueError for one that is neither an address nor a network."""
        networks = tuple(_network(entry) for entry in entries)
        if len(networks) > MAX_NETWORKS:
            raise ValueError(f"{len(networks)} entries, {MAX_NETWORKS} at most; name networks, not addresses")
        return cls(networks)

    @classmethod
    def loopback(cls) -> PeerList:
        """Return the list that allows this machine alone."""
        return cls(_LOOPBACK)

    def __bool__(self) -> bool:
        return bool(self.networks)

    def allows(self, address: str) -> bool:
        """Whether a peer with ``address`` is allowed. Text that is no address is allowed only by an
        empty list."""
        if not self.networks:
            return True
        peer = parse_address(address)
        return peer is not None and any(peer in network for network in self.networks)

    def why_refused(self, address: str) -> str | None:
        """Return why a peer with ``address`` is not allowed, naming it and the list; None if it is."""
        if self.allows(address):
            return None
        return f"address {address[:MAX_HOST_CHARS]!r} is not in --allowed-peers ({self})"

    def __str__(self) -> str:
        return ", ".join(
            str(network.network_address if network.num_addresses == 1 else network)
            for network in self.networks
        )


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address, which may have brackets and a scope, such as [fe80::1%eth0]; None if it is none.

    IPv4 in the form in which a dual-stack socket shows it, such as ::ffff:10.0.0.1, becomes IPv4.
    """
    try:
        address = ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def exposure(hosts: Iterable[str], dangers: Iterable[str]) -> str | None:
    """Return a warning about a service at these ``hosts``; None if all are loopback or there are no dangers.

    ``dangers``: what other machines could do there, a clause each.
    """
    others = [host for host in dict.fromkeys(hosts) if not is_loopback(host)]
    dangers_text = "; ".join(dangers)
    if not others or not dangers_text:
        return None
    return f"this service is open to other machines at {' and '.join(others)}: {dangers_text}"


def is_host(text: str) -> bool:
    """Whether ``text`` can be a host in a URL: a name or an address, without brackets."""
    is_short = 0 < len(text) <= MAX_HOST_CHARS
    return is_short and (_NAME.fullmatch(text) is not None or (":" in text and _is_ipv6(text)))


def in_url(host: str) -> str:
    """Return a host as it stands in a URL, with brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a socket bound to ``host``."""
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    # IPv6Address accepts a scope of any characters.
    return re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?", text) is not None


def _network(entry: str) -> Network:
    try:
        return ip_network(entry)
    except ValueError as error:
        raise ValueError(
            f"{entry!r} is neither an address nor a network such as 10.0.0.0/24: {error}"
        ) from None
