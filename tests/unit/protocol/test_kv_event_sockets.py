"""Publishing of KV events over real sockets: numbers, replays, gaps, and subscribers that do not read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import zmq

from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.protocol.kv_event_sockets import KvEventPublisher
from hisparse_pd.protocol.kv_events import encode_seq
from tests.unit.event_subscriber import config_in, received, replay, replay_socket, subscribers
from tests.waiting import WAIT_SECS, wait_until

pytestmark = pytest.mark.I8


@pytest.fixture
def config(tmp_path: Path) -> KvEventsConfig:
    return config_in(tmp_path)


@pytest.fixture
def publisher(config: KvEventsConfig) -> Iterator[KvEventPublisher]:
    with closing(KvEventPublisher(config)) as publisher:
        yield publisher


def publish(publisher: KvEventPublisher, payload: bytes) -> bool:
    """Publish a batch. Returns False, so that a condition can try again and again."""
    publisher.publish(lambda: payload)
    return False


def reach(publisher: KvEventPublisher, *socks: zmq.Socket[bytes]) -> None:
    """Publish until each subscriber has got something; a connection takes its time."""

    def all_have_got_one() -> bool:
        publish(publisher, b"anybody there?")
        return all(sock.poll(0) for sock in socks)

    wait_until(all_have_got_one, "subscribers are connected")


def drain(sock: zmq.Socket[bytes], last: bytes) -> list[list[bytes]]:
    """Return messages up to the one with the payload ``last``."""
    messages = [received(sock)]
    while messages[-1][2] != last:
        messages.append(received(sock))
    return messages


def test_a_message_is_topic_number_and_batch(publisher: KvEventPublisher, config: KvEventsConfig) -> None:
    with subscribers(config, [b"kv", b"k", b""]) as socks:
        reach(publisher, *socks)
        publish(publisher, b"first")
        publish(publisher, b"second")
        seq = publisher.num_published - 2
        for sock in socks:
            messages = drain(sock, b"second")
            assert messages[-2:] == [
                [b"kv", encode_seq(seq), b"first"],
                [b"kv", encode_seq(seq + 1), b"second"],
            ]


def test_a_subscriber_gets_its_topic_alone(publisher: KvEventPublisher, config: KvEventsConfig) -> None:
    with subscribers(config, [b"kv", b"other"]) as (sock, other):
        reach(publisher, sock)
        publish(publisher, b"last")
        drain(sock, b"last")
        assert not other.poll(0)


def test_a_replay_has_what_was_published_from_a_number_on(
    publisher: KvEventPublisher, config: KvEventsConfig
) -> None:
    with replay_socket(config) as sock:
        for payload in (b"0", b"1", b"2"):
            publish(publisher, payload)
        assert wait_until(lambda: len(found := replay(sock)) == 3 and found) == [
            (0, b"0"),
            (1, b"1"),
            (2, b"2"),
        ]
        assert replay(sock, 1) == [(1, b"1"), (2, b"2")]
        assert replay(sock, 3) == []
        for malformed in ([b"", b""], [b"x", encode_seq(0)], [b"", b"", encode_seq(0)], [encode_seq(0)]):
            sock.send_multipart(malformed)
        assert replay(sock, 2) == [(2, b"2")], "malformed requests have no answer"


@pytest.mark.parametrize(("options", "max_bytes"), [({"buffer_steps": 2}, 1000), ({}, 20)])
def test_old_batches_are_forgotten(tmp_path: Path, options: dict[str, int], max_bytes: int) -> None:
    config = config_in(tmp_path, **options)
    with (
        patch("hisparse_pd.protocol.kv_event_sockets.MAX_REPLAY_BYTES", max_bytes),
        closing(KvEventPublisher(config)) as publisher,
        replay_socket(config) as sock,
    ):
        for number in range(5):
            publish(publisher, b"%010d" % number)
        batches = wait_until(lambda: (found := replay(sock)) and found[-1][0] == 4 and found)
        assert batches == [(3, b"%010d" % 3), (4, b"%010d" % 4)]


@pytest.mark.parametrize("buffer_steps", [1, 2, 3, 4, 100])
def test_a_subscriber_may_ask_again_once_it_has_its_replay(tmp_path: Path, buffer_steps: int) -> None:
    """ZMQ drops what has no room in a queue, and learns late what was taken from it."""
    config = config_in(tmp_path, buffer_steps=buffer_steps)
    with closing(KvEventPublisher(config)) as publisher, replay_socket(config) as sock:
        for number in range(buffer_steps):
            publish(publisher, b"%d" % number)
        with replay_socket(config) as other:
            wait_until(lambda: len(replay(other)) == buffer_steps, "all are there to be replayed")
        for _ in range(200):
            assert len(replay(sock)) == buffer_steps


def test_a_dropped_batch_is_a_gap_in_the_numbers(tmp_path: Path) -> None:
    config = config_in(tmp_path, max_queue_size=1)
    is_encoding, may_go_on = threading.Event(), threading.Event()

    def slow() -> bytes:
        is_encoding.set()
        assert may_go_on.wait(WAIT_SECS)
        return b"slow"

    with closing(KvEventPublisher(config)) as publisher, replay_socket(config) as sock:
        publisher.publish(slow)
        assert is_encoding.wait(WAIT_SECS)
        publish(publisher, b"waits")
        publish(publisher, b"dropped")
        publish(publisher, b"dropped, too")
        assert (publisher.num_published, publisher.num_dropped) == (4, 2)
        may_go_on.set()
        wait_until(lambda: len(replay(sock)) == 2)
        publish(publisher, b"next")
        batches = wait_until(lambda: len(found := replay(sock)) == 3 and found)
        assert batches == [(0, b"slow"), (1, b"waits"), (4, b"next")]
        assert publisher.num_dropped == 2


def test_nobody_waits_for_a_subscriber_that_does_not_read(tmp_path: Path) -> None:
    config = config_in(tmp_path, hwm=2)
    large = bytes(1 << 18)
    with (
        closing(KvEventPublisher(config)) as publisher,
        subscribers(config, [b""], hwm=1) as (sock,),
        replay_socket(config) as replays,
    ):
        reach(publisher, sock)
        first = publisher.num_published
        num_batches = 40  # no buffer of a socket has room for 10 MB
        for _ in range(num_batches):
            publish(publisher, large)
            wait_until(lambda: replay(replays, publisher.num_published - 1), "the batch is sent")
        assert publisher.num_dropped == 0
        wait_until(lambda: publish(publisher, b"end") or replay(replays, publisher.num_published - 1))
        got = [int.from_bytes(received(sock)[1], "big")]
        while sock.poll(0) or got[-1] < first:
            got.append(int.from_bytes(received(sock)[1], "big"))
        missed = set(range(first, first + num_batches)).difference(got)
        assert missed, "it lost what it did not read"
        again = dict(replay(replays, min(missed)))
        assert all(again[seq] == large for seq in missed)


def test_the_publisher_connects_to_an_address_without_a_wildcard(tmp_path: Path) -> None:
    sock: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.SUB) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.subscribe(b"")
        port: int = sock.bind_to_random_port("tcp://127.0.0.1")
        config = KvEventsConfig(publisher="zmq", endpoint=f"tcp://127.0.0.1:{port}")
        with closing(KvEventPublisher(config)) as publisher:
            reach(publisher, sock)


def test_a_port_that_is_taken_is_an_error_at_the_start() -> None:
    sock: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.PUB) as sock:
        port: int = sock.bind_to_random_port("tcp://*")
        with pytest.raises(StartError, match=rf"--kv-events-config: tcp://\*:{port} cannot be used"):
            KvEventPublisher(KvEventsConfig(publisher="zmq", endpoint=f"tcp://*:{port}"))


def test_the_end_waits_for_what_is_queued(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    publisher = KvEventPublisher(config)
    with subscribers(config, [b""]) as (sock,):
        reach(publisher, sock)
        for _ in range(100):
            publish(publisher, b"one")
        with patch("hisparse_pd.protocol.kv_event_sockets._CLOSE_SECS", WAIT_SECS):
            publisher.close()
        assert not publisher._thread.is_alive()
        assert not publisher._batches.qsize()
