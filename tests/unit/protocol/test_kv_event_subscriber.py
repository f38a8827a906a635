"""A subscriber of KV events gets them in order, or is told that it has lost some."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.protocol import kv_event_subscriber
from hisparse_pd.protocol.kv_event_sockets import KvEventPublisher
from hisparse_pd.protocol.kv_event_subscriber import Feed, KvEventSubscriber, Order
from hisparse_pd.protocol.kv_events import (
    AllBlocksCleared,
    BlockChange,
    BlockChanges,
    BlockRemoved,
    BlockStored,
    HashesStored,
    KvEvent,
    block_changes_decoder,
    encode_batch,
)
from tests.unit.event_subscriber import config_in, replay, replay_socket
from tests.waiting import WAIT_SECS, wait_until

pytestmark = pytest.mark.I7


class Log:
    """What a subscriber is told of its sources, each in the order in which it came."""

    def __init__(self) -> None:
        self.of: dict[str, list[str]] = {}

    def on_changes(self, source: str, changes: Sequence[BlockChange]) -> None:
        for change in changes:
            assert isinstance(change, HashesStored)
            self.of.setdefault(source, []).append(str(change.block_hashes[0]))

    def on_lost(self, source: str) -> None:
        self.of.setdefault(source, []).append("lost")


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def subscriber(log: Log) -> Iterator[KvEventSubscriber[str]]:
    with closing(KvEventSubscriber[str](log.on_changes, log.on_lost)) as subscriber:
        yield subscriber


class Rank:
    """A rank that publishes numbers, as blocks with these hashes."""

    def __init__(self, config: KvEventsConfig, ts: float = 1.0) -> None:
        self.publisher = KvEventPublisher(config)
        self._config = config
        self._ts = ts

    def publish(self, number: int) -> bool:
        """Publish a number. Returns False, so that a condition can try again and again."""
        self._ts += 1
        event = BlockStored([number], None, [1, 2], 2, medium="GPU")
        payload = encode_batch(self._ts, [event], 0)
        self.publisher.publish(lambda: payload)
        return False

    def skip(self) -> None:
        """Give a number to a batch that nobody gets."""
        self.publisher._next_seq += 1

    def publish_unheard(self, number: int) -> None:
        """Publish a number that can be had by a replay alone, as one that ZMQ dropped."""
        self.wait_until_sent()
        topic, self.publisher._topic = self.publisher._topic, b"nobody's"
        self.publish(number)
        self.wait_until_sent()
        self.publisher._topic = topic

    def wait_until_sent(self) -> None:
        """Wait until all is published: the same thread answers replays, between two batches."""
        with replay_socket(self._config) as sock:
            wait_until(lambda: replay(sock, self.publisher.num_published - 1), "the last batch is sent")

    def close(self) -> None:
        self.publisher.close()


def feed(config: KvEventsConfig) -> Feed:
    return Feed(config.endpoint, config.replay_endpoint, config.topic)


def take_turn(subscriber: KvEventSubscriber[str]) -> bool:
    """Wake the thread, which has nothing to receive. Returns False, so that a condition can try again."""
    subscriber._wakeup.set()
    return False


def test_what_was_published_before_and_after_comes_in_order(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log
) -> None:
    config = config_in(tmp_path)
    with closing(Rank(config)) as rank:
        for number in range(3):
            rank.publish(number)
        rank.wait_until_sent()
        subscriber.follow("rank", feed(config))
        wait_until(lambda: len(log.of.get("rank", ())) == 3)
        for number in range(3, 100):
            rank.publish(number)
        # The subscription may take longer than the replay; a gap shows with the next batch, and is filled.
        more = iter(range(100, 10_000))
        wait_until(lambda: rank.publish(next(more)) or len(log.of["rank"]) > 100)
        assert log.of["rank"] == [str(number) for number in range(len(log.of["rank"]))]


@pytest.mark.parametrize("has_replay", [True, False])
def test_what_nobody_has_is_lost(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log, has_replay: bool
) -> None:
    config = config_in(tmp_path, **({} if has_replay else {"replay_endpoint": None}))
    with closing(Rank(config)) as rank:
        subscriber.follow("rank", feed(config))
        numbers = iter(range(10_000))
        wait_until(lambda: rank.publish(next(numbers)) or log.of.get("rank"))
        rank.skip()
        rank.publish(20_000)
        rank.publish(20_001)
        wait_until(lambda: log.of["rank"][-1] == "20001")
        assert log.of["rank"][-3:] == ["lost", "20000", "20001"]


def test_a_rank_that_starts_again_is_forgotten(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log
) -> None:
    config = config_in(tmp_path)
    with closing(Rank(config)) as rank:
        subscriber.follow("rank", feed(config))
        for number in range(300):
            rank.publish(number)
        wait_until(lambda: log.of.get("rank", [""])[-1] == "299")
    with closing(Rank(config, ts=1000.0)) as rank:
        rank.publish(7000)
        rank.publish(7001)
        # In all of the wait it does not publish as much again as before.
        wait_until(lambda: rank.publish(7002) or "7002" in log.of["rank"], poll_secs=WAIT_SECS / 300)
        assert "lost" in log.of["rank"]
        again = log.of["rank"][log.of["rank"].index("lost") + 1 :]
        assert again[:3] == ["7000", "7001", "7002"]


def test_what_went_missing_before_a_pause_is_asked_for(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_subscriber, "SILENCE_SECS", 0.01)
    config = config_in(tmp_path)
    with closing(Rank(config)) as rank:
        subscriber.follow("rank", feed(config))
        rank.publish(0)
        wait_until(lambda: log.of.get("rank") == ["0"])
        rank.publish_unheard(1)
        wait_until(lambda: log.of["rank"] == ["0", "1"])


def test_sources_are_followed_apart_and_left(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    configs = {name: config_in(tmp_path / name) for name in "ab"}
    with closing(Rank(configs["a"])) as a, closing(Rank(configs["b"])) as b:
        for name, config in configs.items():
            subscriber.follow(name, feed(config))
        a.publish(1)
        b.publish(2)
        wait_until(lambda: "1" in log.of.get("a", ()) and "2" in log.of.get("b", ()))
        subscriber.leave("a")
        wait_until(lambda: log.of["a"] == ["1", "lost"])
        numbers = iter(range(10, 10_000))
        wait_until(lambda: (a.publish(3), b.publish(next(numbers))) and len(log.of["b"]) > 1)
        assert log.of["a"] == ["1", "lost"]


def test_a_replay_that_does_not_come_is_given_up(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)
    monkeypatch.setattr(kv_event_subscriber, "REPLAY_SECS", 0.0)
    nobody = feed(config)._replace(replay_endpoint=f"ipc://{tmp_path}/nobody")
    with (
        closing(Rank(config)) as rank,
        closing(KvEventSubscriber[str](log.on_changes, log.on_lost)) as subscriber,
    ):
        subscriber.follow("rank", nobody)
        numbers = iter(range(10_000))
        wait_until(lambda: rank.publish(next(numbers)) or log.of.get("rank"))


def test_an_address_that_cannot_be_used_leaves_nothing_behind(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log
) -> None:
    """Its other socket would be readable for ever, and the thread would never wait again."""
    config = config_in(tmp_path)
    with closing(Rank(config)) as rank:
        subscriber.follow("unusable", feed(config)._replace(replay_endpoint="tcp://127.0.0.1:none"))
        subscriber.follow("rank", feed(config))
        numbers = iter(range(10_000))
        wait_until(lambda: rank.publish(next(numbers)) or log.of.get("rank"))
        subscriber.leave("rank")
        wait_until(lambda: log.of["rank"][-1] == "lost")
        assert [*subscriber._poller._poller.sockets] == [(subscriber._wakeup.fileno(), zmq.POLLIN)]
    assert "unusable" not in log.of


def test_a_source_whose_sockets_fail_is_left_alone(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    configs = {name: config_in(tmp_path / name) for name in "ab"}
    with closing(Rank(configs["a"])) as a, closing(Rank(configs["b"])) as b:
        numbers = iter(range(10_000))
        for name, rank in (("a", a), ("b", b)):
            subscriber.follow(name, feed(configs[name]))
            wait_until(lambda rank=rank, name=name: rank.publish(next(numbers)) or log.of.get(name))  # type: ignore[misc]

        def connect(*_: object) -> None:
            raise zmq.ZMQError(errno.EMFILE)

        with monkeypatch.context() as patch:
            patch.setattr(kv_event_subscriber._Stream, "_connect", connect)
            a.skip()  # the gap needs another socket
            wait_until(lambda: a.publish(next(numbers)) or log.of["a"][-1] == "lost")
        num_known = len(log.of["b"])
        wait_until(lambda: b.publish(next(numbers)) or len(log.of["b"]) > num_known)
        subscriber.follow("a", feed(configs["a"]))
        wait_until(lambda: a.publish(next(numbers)) or log.of["a"][-1] != "lost")


def test_a_source_whose_sockets_failed_is_followed_again(
    tmp_path: Path,
    subscriber: KvEventSubscriber[str],
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is as if it were followed for the first time, and the log says once that it was not."""
    num_tries = 0

    def connect(*_: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise zmq.ZMQError(errno.EMFILE)

    caplog.set_level("INFO")
    monkeypatch.setattr(kv_event_subscriber, "RETRY_SECS", 0.0)
    config = config_in(tmp_path)
    with closing(Rank(config)) as rank:
        numbers = iter(range(10_000))
        subscriber.follow("rank", feed(config))
        wait_until(lambda: rank.publish(next(numbers)) or log.of.get("rank"))
        with monkeypatch.context() as patch:
            patch.setattr(kv_event_subscriber._Stream, "_connect", connect)
            rank.skip()  # the gap needs another socket
            wait_until(lambda: take_turn(subscriber) or rank.publish(next(numbers)) or num_tries >= 3)
            num_lost = log.of["rank"].count("lost")
        wait_until(lambda: rank.publish(next(numbers)) or log.of["rank"][-1] != "lost")
        subscriber.leave("rank")
        wait_until(lambda: log.of["rank"][-1] == "lost")
    assert num_lost == 1
    again = log.of["rank"][log.of["rank"].index("lost") + 1 :]
    assert again[0] == "0", "what was published before is replayed"
    said = [record.getMessage() for record in caplog.records]
    assert sum("are not followed" in line for line in said) == 1
    assert sum("are followed now" in line for line in said) == 1


def test_a_source_that_is_left_is_not_tried_again(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def connect(stream: kv_event_subscriber._Stream, kind: int, endpoint: str) -> None:
        tried.append(stream.feed.endpoint)
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(kv_event_subscriber, "RETRY_SECS", 0.0)
    monkeypatch.setattr(kv_event_subscriber._Stream, "_connect", connect)
    for name in "ab":
        subscriber.follow(name, Feed(f"ipc://{tmp_path}/{name}", None, ""))
    wait_until(lambda: take_turn(subscriber) or len(tried) > 4)
    subscriber.leave("a")
    wait_until(lambda: take_turn(subscriber) or list(subscriber._failed) == ["b"])
    tried.clear()
    wait_until(lambda: take_turn(subscriber) or len(tried) > 4)
    assert set(tried) == {f"ipc://{tmp_path}/b"}
    assert log.of == {}


def test_bytes_that_are_no_events_are_dropped(
    tmp_path: Path, subscriber: KvEventSubscriber[str], log: Log
) -> None:
    config = config_in(tmp_path)
    with closing(Rank(config)) as rank:
        rank.publisher.publish(lambda: b"\xc1")
        rank.publish(5)
        subscriber.follow("rank", feed(config))
        wait_until(lambda: log.of.get("rank") == ["lost", "5"])


# --- the order alone -----------------------------------------------------------------------------------


def batch(ts: float, *events: KvEvent) -> BlockChanges:
    return block_changes_decoder.decode(encode_batch(ts, events, 0))


class Source:
    """A rank with few blocks, whose latest batches can be replayed."""

    def __init__(self, max_replayed: int) -> None:
        self.blocks: set[int] = set()
        self.sent: list[BlockChanges] = []
        self._max_replayed = max_replayed
        self._ts = 0.0

    def change(self, block: int) -> tuple[int, BlockChanges]:
        self._ts += 1
        if block in self.blocks:
            self.sent.append(batch(self._ts, BlockRemoved([block], "GPU")))
        else:
            self.sent.append(batch(self._ts, BlockStored([block], None, [1], 1, medium="GPU")))
        self.blocks ^= {block}
        return len(self.sent) - 1, self.sent[-1]

    def restart(self) -> None:
        self._ts += 1
        self.blocks, self.sent = set(), [batch(self._ts, AllBlocksCleared())]

    def replay(self, first: int) -> list[tuple[int, BlockChanges]]:
        known = list(enumerate(self.sent))[-self._max_replayed :]
        return [(seq, changes) for seq, changes in known if seq >= first]


class Reader:
    """Applies what an order yields."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.has_lost = False

    def read(self, found: Sequence[BlockChanges | None]) -> None:
        for changes in found:
            if changes is None:
                self.blocks, self.has_lost = set(), True
                continue
            for event in changes.events:
                match event:
                    case HashesStored():
                        self.blocks.update(event.block_hashes)
                    case BlockRemoved():
                        self.blocks.difference_update(event.block_hashes)
                    case AllBlocksCleared():
                        self.blocks.clear()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.integers(0, 5), st.booleans()),
        st.tuples(st.sampled_from(["answer", "give up", "restart", "silence"]), st.just(0), st.just(True)),
    ),
    max_size=60,
)


@given(
    steps=steps,
    last=st.sampled_from([("change", 6, True), ("silence", 0, True)]),
    max_replayed=st.sampled_from([2, 100]),
)
@settings(derandomize=True, max_examples=300)
def test_a_subscriber_knows_what_the_rank_has_or_less(
    steps: list[tuple[str, int, bool]], last: tuple[str, int, bool], max_replayed: int
) -> None:
    """Whatever gets lost, and whenever replays come: in the end it knows no block that is gone, and all of
    them if every batch could be replayed and no replay was given up."""
    source, order, reader = Source(max_replayed), Order(), Reader()
    asked: int | None = 0
    is_complete = max_replayed == 100

    def replay() -> None:
        nonlocal asked
        if asked is not None:
            for found in source.replay(asked):
                reader.read(order.replayed(*found))
            reader.read(order.end_replay())
            asked = order.take_gap()

    for step, block, arrives in [*steps, last]:
        match step:
            case "change":
                sent = source.change(block)
                if arrives:
                    reader.read(order.published(*sent))
            case "restart" if asked is None and source.sent:
                # Its first number is lower than the one that comes next. Whatever hides that from a
                # subscriber takes so long that the router's health check notices the restart.
                source.restart()
                reader.read(order.published(0, source.sent[0]))
            case "answer":
                replay()
            case "give up" if asked is not None:
                reader.read(order.end_replay())
                asked, is_complete = order.take_gap(), False
            case "silence" if asked is None:
                order.suspect_gap()
        gap = order.take_gap()
        asked = gap if gap is not None else asked
    while asked is not None:
        replay()
    assert reader.blocks <= source.blocks
    if is_complete:
        assert reader.blocks == source.blocks
