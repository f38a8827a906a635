"""The sockets of a subscriber of KV events, as the peers' consumers have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.protocol.kv_events import END_OF_REPLAY, encode_seq
from tests.event_follower import EventFollower
from tests.waiting import WAIT_MS


def config_in(folder: Path, **options: object) -> KvEventsConfig:
    """Return a configuration whose sockets are files of ``folder``."""
    return KvEventsConfig.model_validate(
        {
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/pub",
            "replay_endpoint": f"ipc://{folder}/replay",
            "topic": "kv",
            **options,
        }
    )


def received(sock: zmq.Socket[bytes]) -> list[bytes]:
    assert sock.poll(WAIT_MS), "nothing arrived"
    return sock.recv_multipart()


@contextmanager
def replay_socket(config: KvEventsConfig) -> Iterator[zmq.Socket[bytes]]:
    assert config.replay_endpoint is not None
    sock: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.connect(config.replay_endpoint)
        yield sock


def replay(sock: zmq.Socket[bytes], first: int = 0) -> list[tuple[int, bytes]]:
    """Ask for what was published from ``first`` on. Returns numbers and payloads."""
    sock.send_multipart([b"", encode_seq(first)])
    batches = []
    while (frames := received(sock))[1] != END_OF_REPLAY:
        assert frames[0] == b""
        batches.append((int.from_bytes(frames[1], "big"), frames[2]))
    assert frames == [b"", END_OF_REPLAY, b""]
    return batches


def follow(config: KvEventsConfig, page_size: int, rank: int = 0) -> EventFollower:
    """Return a subscriber that has read all that was published."""
    follower = EventFollower(page_size, rank)
    with replay_socket(config) as sock:
        batches = replay(sock)
    assert [seq for seq, _ in batches] == list(range(len(batches)))
    for _, payload in batches:
        follower.read(payload)
    return follower


@contextmanager
def subscribers(
    config: KvEventsConfig, topics: Sequence[bytes], hwm: int = 0
) -> Iterator[list[zmq.Socket[bytes]]]:
    """Yield sockets that get what is published from now on, if it has one of ``topics``."""
    socks = []
    for topic in topics:
        sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVHWM, hwm)
        sock.subscribe(topic)
        sock.connect(config.endpoint)
        socks.append(sock)
    try:
        yield socks
    finally:
        for sock in socks:
            sock.close()
