"""Closes Mooncake's listening sockets to foreign addresses.

An engine starts Mooncake within ``guarded_listeners``. Mooncake listens on all interfaces whatever host it is
given, knows no keys, and lets any caller read and write the registered memory. A packet filter is therefore
attached to the listening sockets, and connections inherit it: the kernel drops packets from other addresses,
as if nothing listened. Linux lets any process attach filters to its own sockets; a stricter kernel asks for
CAP_NET_ADMIN.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import NamedTuple

from hisparse_pd.base.access import Network, PeerList, is_loopback
from hisparse_pd.transfer.errors import TransferSetupError
from hisparse_pd.transfer.transport import addresses_of

log = logging.getLogger(__name__)

_OPEN_FILES = Path("/proc/self/fd")
_SO_ATTACH_FILTER = 26

# Classic BPF, as in linux/filter.h.
_LOAD_BYTE = 0x30
_LOAD_WORD = 0x20
_SHIFT_RIGHT = 0x74
_AND = 0x54
_JUMP = 0x05
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_NETWORK_HEADER = 0xFFF00000
"""Offset at which the IP header begins."""
_SOURCE_OFFSET = {4: 12, 6: 8}
"""Offset of the source address in the header, by IP version."""
_ACCEPT = 0xFFFFFFFF
_DROP = 0
_INSTRUCTION = "HBBI"


class _Instruction(NamedTuple):
    """An instruction of the filter, as the kernel reads it."""

    code: int
    operand: int
    num_skipped_if_true: int = 0
    num_skipped_if_false: int = 0

    def packed(self) -> bytes:
        return struct.pack(
            _INSTRUCTION, self.code, self.num_skipped_if_true, self.num_skipped_if_false, self.operand
        )


class _WordTest(NamedTuple):
    """The condition that one 32-bit word of a packet, with some bits masked, has a wanted value."""

    offset: int
    mask: int
    wanted: int


def reachable_from(host: str, allowed: PeerList, has_peers: bool = True) -> PeerList:
    """Return who may connect to the KV ports of a node at ``host``, itself included; empty means anybody.

    Without a list, a node on loopback, or one without peers elsewhere (not ``has_peers``), takes connections
    from this machine only."""
    if not allowed and is_loopback(host):
        return PeerList.loopback()
    if not allowed and has_peers:
        return allowed
    listed = allowed or PeerList.loopback()
    return PeerList((*listed.networks, *map(ip_network, addresses_of(host))))


@contextmanager
def guarded_listeners(host: str, allowed: PeerList, has_peers: bool = True) -> Iterator[None]:
    """Restrict TCP sockets that begin to listen within this context to the peers of ``reachable_from``.

    Raises TransferSetupError when there is a list and the kernel refuses the filter; without a list it warns.
    """
    inodes_before = {inode for _, inode in _listening()}
    yield
    peers = reachable_from(host, allowed, has_peers)
    if not peers:
        return
    program = _program(peers)
    try:
        for descriptor, inode in _listening():
            if inode not in inodes_before:
                attach(descriptor, program)
    except OSError as error:
        what = f"this system cannot close the KV ports to other addresses than {peers} ({error.strerror})"
        if allowed:
            raise TransferSetupError(f"{what}; leave out --allowed-peers and use a firewall") from error
        log.warning("%s; use a firewall", what)


def _listening() -> Iterator[tuple[int, int]]:
    """Yield ``(descriptor, inode)`` of each listening TCP socket of this process."""
    for name in os.listdir(_OPEN_FILES):
        descriptor = int(name)
        try:
            if not os.readlink(_OPEN_FILES / name).startswith("socket:"):
                continue
            inode = os.fstat(descriptor).st_ino
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                listens = is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:  # another thread closed it meanwhile
            continue
        if listens:
            yield descriptor, inode


def attach(descriptor: int, program: bytes) -> None:
    """Attach a packet filter to a socket of this process. Raises OSError."""
    instructions = ctypes.create_string_buffer(program, len(program))
    num_instructions = len(program) // struct.calcsize(_INSTRUCTION)
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", num_instructions, ctypes.addressof(instructions)),
        )
        log.debug("port %d takes connections from allowed peers only", sock.getsockname()[1])


def _program(allowed: PeerList) -> bytes:
    """Return a filter that accepts packets whose source address is in ``allowed``.

    It branches by IP version. For 10.1.0.0/16 the instructions are: load the source address, keep its first
    16 bits, return "accept" if these are 10.1, otherwise go on with the next network; at last, "drop".
    """
    tests: dict[int, list[_Instruction]] = {4: [], 6: []}
    for network in allowed.networks:
        tests[network.version] += _accept_from(network)
    for version in tests:
        tests[version].append(_Instruction(_RETURN, _DROP))
    # A socket for both IP versions sees IPv4 packets with IPv4 headers. A conditional jump skips 255
    # instructions at most, so an unconditional one leads to the tests of IPv6.
    program: list[_Instruction] = [
        _Instruction(_LOAD_BYTE, _NETWORK_HEADER),
        _Instruction(_SHIFT_RIGHT, 4),  # the version
        _Instruction(_JUMP_IF_EQUAL, 4, num_skipped_if_false=1),
        _Instruction(_JUMP, 1),  # IPv4: skip the next jump
        _Instruction(_JUMP, len(tests[4])),
        *tests[4],
        *tests[6],
    ]
    return b"".join(instruction.packed() for instruction in program)


def _accept_from(network: Network) -> list[_Instruction]:
    """Return instructions that accept a packet from ``network`` and fall through for any other."""
    num_words = network.max_prefixlen // 32
    first = int(network.network_address).to_bytes(4 * num_words, "big")
    mask = int(network.netmask).to_bytes(4 * num_words, "big")
    words: list[_WordTest] = []  # an IPv6 network is told by up to four words
    for word in range(num_words):
        part = slice(4 * word, 4 * word + 4)
        word_mask, wanted = (int.from_bytes(value[part], "big") for value in (mask, first))
        if word_mask:
            offset = _NETWORK_HEADER + _SOURCE_OFFSET[network.version] + 4 * word
            words.append(_WordTest(offset, word_mask, wanted))
    instructions: list[_Instruction] = []
    for number, (offset, word_mask, wanted) in enumerate(words):
        num_to_skip = 3 * (len(words) - number - 1) + 1  # the tests of the words that follow, and the return
        instructions += [
            _Instruction(_LOAD_WORD, offset),
            _Instruction(_AND, word_mask),
            _Instruction(_JUMP_IF_EQUAL, wanted, num_skipped_if_false=num_to_skip),
        ]
    return [*instructions, _Instruction(_RETURN, _ACCEPT)]
