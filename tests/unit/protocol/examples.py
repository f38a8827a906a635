"""One example of every control message with its golden bytes, and the geometry of the tests' nodes."""

from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.protocol.messages import (
    AbortRoom,
    Bootstrap,
    Extent,
    FetchedTokens,
    Geometry,
    Heartbeat,
    HeartbeatAck,
    HeldKv,
    PrefillTimes,
    Region,
    RegionKind,
    Register,
    Registered,
    RegistrationRefused,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    RoomScores,
)
from hisparse_pd.protocol.prompt_scores import WantedScores

GEOMETRY = Geometry(
    model_fingerprint="fp",
    dtype="float32",
    num_layers=4,
    num_index_layers=3,
    item_bytes=192,
    index_item_bytes=128,
    index_topk=64,
    page_size=64,
    index_rotation="hadamard",
    has_row_checks=True,
    attention_split_tile_size=256,
)
PROMPT = b"".join(token_id.to_bytes(4, "little") for token_id in range(1000, 1068))
BOOTSTRAP = Bootstrap(
    room=2**63 - 1,
    kv_extents=(Extent(7, 2), Extent(300, 1)),
    index_extents=(Extent(64, 64),),
    aux_slot=5,
    prompt=PROMPT,
    root=bytes(range(16)),
    attempt=1,
    num_held_tokens=64,
    num_resumed_tokens=2,
    scores=WantedScores(1, 20),
    held=HeldKv((Extent(9, 48), Extent(80, 16)), (Extent(128, 64),), 48),
    hisparse=True,
)

TO_PREFILL = [
    (
        Register(
            1,
            "node",
            "10.0.0.2:15001",
            GEOMETRY,
            (Region(RegionKind.KV_HOST, 4096, 768, 1),),
            "rdma",
            LaneOffer("hisparse-pd-lane-" + "0f" * 8, bytes(range(32))),
            "decode-1",
        ),
        "9901"
        "01a46e6f6465ae31302e302e302e323a3135303031"
        "9ca26670a7666c6f6174333204"
        "03ccc0cc804040" + "00"
        "a8686164616d617264" + "c3" + "cd0100"
        "9194a76b765f686f7374cd1000cd030001"
        "a472646d61"
        "92d92168697370617273652d70642d6c616e652d" + "3066" * 8 + "c420" + bytes(range(32)).hex() + "a8"
        "6465636f64652d31",
    ),
    (Heartbeat(9), "920209"),
    (
        BOOTSTRAP,
        "9d03cf7fffffffffffffff" + "9292070292cd012c01" + "91924040" + "05"
        "c50110" + PROMPT.hex() + "c410" + bytes(range(16)).hex() + "014002" + "920114"
        "93929209309250109192cc804030" + "c3",
    ),
    (AbortRoom(3, "gone", 9), "940403a4676f6e6509"),
]
TO_DECODE = [
    (
        Registered(1, "inst", GEOMETRY, "shm", "same"),
        "960101a4696e7374"
        "9ca26670a7666c6f617433320403ccc0cc80404000a8686164616d617264c3cd0100"
        "a373686da473616d65",
    ),
    (RegistrationRefused("no", True), "9302a26e6fc3"),
    (HeartbeatAck(9, "inst"), "930309a4696e7374"),
    (
        RoomDone(3, 4096, 64, 0.5, PrefillTimes(0.25, 0.5, 1.0), FetchedTokens(48, 16, 8)),
        "970403cd100040cb3fe000000000000093cb3fd0000000000000cb3fe0000000000000cb3ff000000000000093301008",
    ),
    (RoomFailed(3, 503, "lost", False, True, 9), "970503cd01f7a46c6f7374c2c309"),
    (RoomQuiet(3, False, 9), "940603c209"),
    (RoomScores(3, 1, 0, bytes(8)), "9507030100c408" + "00" * 8),
]
