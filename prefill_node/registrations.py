"""The decode nodes that this prefill node writes to: owns which are registered and when each was last heard.

``DecodeEvents`` calls ``why_refused`` and ``register`` for each Register, ``heard`` for each message, and
``silent`` in each turn of the engine's loop. ZMQ names a control connection by an identity that changes with
every reconnect; a node's ``node_id`` stays. Registering again with the same session and regions keeps the
node's requests and moves their answers to the new connection. Another session or other regions mean that the
node restarted: the old registration is lost.

``BootstrapChecks`` calls ``why_not_landing``, which checks a Bootstrap's landing zone against the registered
regions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hisparse_pd.base.access import PeerList, is_host
from hisparse_pd.core.paging.extents import SlotRanges, total_length
from hisparse_pd.protocol.messages import (
    PROTOCOL_VERSION,
    ROW_CHECK_BYTES,
    Bootstrap,
    Extent,
    Geometry,
    Region,
    RegionKind,
    Register,
)
from hisparse_pd.transfer.aux_record import AuxLayout
from hisparse_pd.transfer.plan import RegionView


@dataclass(eq=False, slots=True)
class Peer:
    """A registered decode node. ``identity`` is its current connection."""

    node_id: str
    session: str
    identity: bytes
    page_size: int
    regions: dict[RegionKind, RegionView]
    last_heard_secs: float
    """Time on the clock of ``time.monotonic``. ``DecodeEvents`` adds a heartbeat interval if a silent peer's
    connection still stands, since such a node may be in a long step."""

    @property
    def num_index_groups(self) -> int:
        """Index groups whose keys the decode node takes: fewer than this node has if it does not draft."""
        return self.regions[RegionKind.INDEX].num_layers


class Registrations:
    """Registered decode nodes by node id and by connection."""

    def __init__(
        self,
        geometry: Geometry,
        transfer_protocol: str,
        allowed: PeerList | None = None,
    ) -> None:
        """``allowed``: addresses of the sessions that this node may write to."""
        self._allowed = allowed or PeerList()
        self._geometry = geometry
        self._transfer_protocol = transfer_protocol
        self._by_node: dict[str, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}

    def register(self, identity: bytes, register: Register, now_secs: float) -> tuple[Peer, list[Peer]]:
        """Register a decode node. Returns the peer and the registrations that it replaces because the node
        restarted. ``register`` must have passed ``why_refused``."""
        regions = {region.kind: _view(region, register.geometry) for region in register.regions}
        page_size = register.geometry.page_size
        known = self._by_node.get(register.node_id)
        # With the same values it is the same process, whose memory is where it was, with a new connection.
        is_same_process = known is not None and (
            (known.session, known.page_size, known.regions) == (register.session, page_size, regions)
        )
        if known is not None and is_same_process:
            self._by_identity.pop(known.identity, None)
            known.identity = identity
            known.last_heard_secs = now_secs
            self._by_identity[identity] = known
            return known, []
        replaced = [
            peer
            for peer in self._by_node.values()
            if peer is known or peer.identity == identity or peer.session == register.session
        ]
        for peer in replaced:
            self.lose(peer)
        peer = Peer(register.node_id, register.session, identity, page_size, regions, now_secs)
        self._by_node[peer.node_id] = peer
        self._by_identity[identity] = peer
        return peer, replaced

    def of_node(self, node_id: str) -> Peer | None:
        """Return the registration of a decode node, or None."""
        return self._by_node.get(node_id)

    def of_session(self, session: str) -> Peer | None:
        """Return the registration with this session, or None."""
        return next((peer for peer in self._by_node.values() if peer.session == session), None)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_node.values())

    def heard(self, identity: bytes, now_secs: float) -> Peer | None:
        """Note that a connection's peer was heard. Returns the peer, or None when it is not registered."""
        peer = self._by_identity.get(identity)
        if peer is not None:
            peer.last_heard_secs = now_secs
        return peer

    def current(self, peer: Peer) -> Peer:
        """Return the registration to which answers for a request go. ``peer``: the one that the request has
        kept from its beginning. This is the node's present one if its session is the same, else ``peer``."""
        now_registered = self._by_node.get(peer.node_id)
        return now_registered if now_registered and now_registered.session == peer.session else peer

    def silent(self, now_secs: float, secs: float) -> list[Peer]:
        """Return the peers that were silent for longer than ``secs``."""
        return [peer for peer in self._by_node.values() if now_secs - peer.last_heard_secs > secs]

    def lose(self, peer: Peer) -> None:
        """Remove the registration of a peer."""
        self._by_node.pop(peer.node_id, None)
        self._by_identity.pop(peer.identity, None)

    def why_refused(self, register: Register) -> str | None:
        """Return why a registration is refused, with both nodes' values, or None. The page size may differ,
        and the decode node need not take the draft layer or the row checks that this node computes."""
        if register.protocol_version != PROTOCOL_VERSION:
            return (
                f"protocol version: the decode node speaks {register.protocol_version}, this prefill node "
                f"{PROTOCOL_VERSION}; run the same release on both"
            )
        why = _why_geometry_differs(register.geometry, self._geometry)
        if why is not None:
            return why
        if register.transfer_protocol not in ("", self._transfer_protocol):
            return (
                f"--transfer-protocol: the decode node is on {register.transfer_protocol!r}, this prefill "
                f"node on {self._transfer_protocol!r}; start both with the same, tcp or rdma"
            )
        return self._why_session_refused(register.session) or _why_regions_refused(
            register.regions, register.geometry
        )

    def _why_session_refused(self, session: str) -> str | None:
        if not session:
            return "session: the decode node names none, so nothing could be written to it"
        host = _host_of(session)
        if host is None:
            return f"session {session!r}: expected HOST:PORT, where the KV is to be written to"
        why = self._allowed.why_refused(host)
        if why is not None:
            return (
                # such as "its address '10.0.0.7' is not in allowed_peers (10.1.0.0/16) of this prefill node"
                f"session {session}: its {why} of this prefill node; add it there, or give the "
                "decode node an address of the list as --advertise-host"
            )
        return None

    def __len__(self) -> int:
        return len(self._by_node)


def _why_geometry_differs(decode: Geometry, prefill: Geometry) -> str | None:
    """Return the first field in which the geometries of the two nodes differ in a way that matters, or
    None."""
    for name in Geometry.__struct_fields__:
        theirs, ours = getattr(decode, name), getattr(prefill, name)
        if name == "num_draft_layers":
            if theirs > ours:
                return (
                    f"{name}: the decode node drafts with {theirs} MTP layer, this prefill node computes "
                    f"{ours}; run one checkpoint on both, or the decode node with --speculative-num-steps 0"
                )
        elif name == "has_row_checks":
            if theirs and not ours:
                return (
                    f"{name}: the decode node verifies rows by checks that this prefill node does not "
                    "compute; give --no-verify-rows to both or to neither"
                )
        elif theirs != ours and name != "page_size":
            return f"{name}: the decode node has {theirs!r}, this prefill node {ours!r}; they must be equal"
    return None


def _why_regions_refused(regions: tuple[Region, ...], geometry: Geometry) -> str | None:
    """Return which region is missing, given twice or of a wrong size for ``geometry``; None for none."""
    kinds = [region.kind for region in regions]
    for kind in RegionKind:
        if kinds.count(kind) > 1:
            return f"region {kind.value} is registered {kinds.count(kind)} times; name it once"
    required = [RegionKind.INDEX, RegionKind.AUX]
    if geometry.has_row_checks:
        required.append(RegionKind.ROW_CHECKS)
    for kind in required:
        if kind not in kinds:
            return f"region {kind.value} is missing; the decode node must register it"
    if RegionKind.KV_HOST not in kinds and RegionKind.KV_DEVICE not in kinds:
        return "regions kv_host and kv_device are both missing; register at least one"
    for region in regions:
        num_layers, item_bytes = _shape_of(region.kind, geometry)
        num_bytes = num_layers * region.num_slots * item_bytes
        if region.num_slots < 1 or region.base_addr < 1 or region.base_addr + region.num_bytes > 2**63 - 1:
            return (
                f"region {region.kind.value}: {region.num_bytes} bytes at {region.base_addr:#x} in "
                f"{region.num_slots} slots are no memory"
            )
        if region.num_bytes != num_bytes:
            return (
                f"region {region.kind.value}: the decode node registers {region.num_bytes} bytes, this "
                f"prefill node expects {num_bytes}: {num_layers} layers x {region.num_slots} slots x "
                f"{item_bytes} bytes"
            )
    num_slots = {region.kind: region.num_slots for region in regions}
    num_keys = num_slots[RegionKind.INDEX]
    num_checks = num_slots.get(RegionKind.ROW_CHECKS, num_keys)
    if num_checks != num_keys:
        return f"region row_checks has {num_checks} slots, region index {num_keys}; they must be equal"
    return None


def _host_of(session: str) -> str | None:
    """Return the session's host without brackets, or None unless ``session`` is HOST:PORT."""
    host, _, port = session.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535
    return host if is_port and is_host(host) else None


def kv_region_of(bootstrap: Bootstrap) -> RegionKind:
    """Return the region in which a request's KV is to land."""
    return RegionKind.KV_HOST if bootstrap.hisparse else RegionKind.KV_DEVICE


def why_not_landing(bootstrap: Bootstrap, peer: Peer, page_size_src: int) -> str | None:
    """Return why a landing zone cannot be written, or None when it lies in the peer's regions and fits the
    positions that are computed and not held."""
    if not bootstrap.hisparse and peer.page_size != page_size_src:
        return (
            f"dense rooms need equal page sizes: the decode node's is {peer.page_size}, this prefill node's "
            f"{page_size_src}; start both with the same --page-size or send the request with hisparse"
        )
    num_landing = bootstrap.num_computed_tokens - bootstrap.num_held_tokens
    kv_kind = kv_region_of(bootstrap)
    for kind, extents in ((kv_kind, bootstrap.kv_extents), (RegionKind.INDEX, bootstrap.index_extents)):
        region = peer.regions.get(kind)
        if region is None:
            return f"the decode node has not registered a region {kind.value}"
        error = _why_extents_wrong(kind, extents, region.num_slots, num_landing)
        if error is not None:
            return error
    num_aux_slots = peer.regions[RegionKind.AUX].num_slots
    if bootstrap.aux_slot >= num_aux_slots:
        return f"aux_slot {bootstrap.aux_slot} is not in [0, {num_aux_slots}) of region aux"
    return None


def why_held_wrong(bootstrap: Bootstrap, peer: Peer) -> str | None:
    """Return why what is said to be held cannot be read, or None when it lies in the peer's regions."""
    held = bootstrap.held
    if held is None:
        return None
    num_given = total_length(held.kv_extents)
    for kind, extents in ((kv_region_of(bootstrap), held.kv_extents), (RegionKind.INDEX, held.index_extents)):
        num_slots = peer.regions[kind].num_slots
        end = max((extent.end for extent in extents), default=0)
        if end > num_slots:
            return f"held {kind.value} extents end at slot {end}, past the region's {num_slots} slots"
        if (number := total_length(extents)) != num_given:
            return f"held {kind.value} extents are of {number} tokens, those of the KV of {num_given}"
    if num_given > bootstrap.num_held_tokens:
        return f"held extents are of {num_given} tokens, num_held_tokens is {bootstrap.num_held_tokens}"
    if held.num_prefilled_tokens > num_given:
        return f"{held.num_prefilled_tokens} of {num_given} held tokens are said to be prefilled"
    return None


def _why_extents_wrong(
    kind: RegionKind, extents: tuple[Extent, ...], num_slots: int, num_landing: int
) -> str | None:
    """Return why the extents cannot take ``num_landing`` tokens in a region of ``num_slots`` slots: they end
    past it, have a wrong number of slots, or overlap."""
    num_given = 0  # slots of all extents
    for extent in extents:
        if extent.end > num_slots:
            return (
                f"{kind.value} extent [{extent.start}, {extent.end}) ends past the region's {num_slots} slots"
            )
        num_given += extent.length
    may_exceed = kind is RegionKind.INDEX  # indexer keys land in whole pages
    if num_given < num_landing or (num_given > num_landing and not may_exceed):
        bound = "at least " if may_exceed else ""
        return f"{kind.value} extents are of {num_given} tokens, the KV to land is of {bound}{num_landing}"
    ranges = SlotRanges.of_extents(extents)
    order = np.argsort(ranges.starts)
    starts, lengths = ranges.starts[order], ranges.lengths[order]
    overlapping = np.flatnonzero(starts[1:] < (starts + lengths)[:-1])
    if len(overlapping):
        return f"{kind.value} extents overlap at slot {starts[overlapping[0] + 1]}"
    return None


def _shape_of(kind: RegionKind, geometry: Geometry) -> tuple[int, int]:
    """Return the number of layers and the item bytes of a region, by its kind and the decode node's
    geometry."""
    match kind:
        case RegionKind.KV_HOST | RegionKind.KV_DEVICE:
            return geometry.num_kv_layers, geometry.item_bytes
        case RegionKind.INDEX:
            return geometry.num_index_groups, geometry.index_item_bytes
        case RegionKind.ROW_CHECKS:
            return geometry.num_kv_layers, ROW_CHECK_BYTES
        case RegionKind.AUX:
            return 1, AuxLayout(geometry.num_index_groups, geometry.index_topk).slot_bytes


def _view(region: Region, geometry: Geometry) -> RegionView:
    num_layers, item_bytes = _shape_of(region.kind, geometry)
    return RegionView(region.base_addr, region.num_bytes, num_layers, region.num_slots, item_bytes)
