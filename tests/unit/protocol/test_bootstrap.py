"""The bootstrap endpoint and the look-up: which callers are answered, and which answers are accepted."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from hisparse_pd.base.access import PeerList
from hisparse_pd.protocol import bootstrap, names
from hisparse_pd.protocol.bootstrap import (
    BOOTSTRAP_PATH,
    CODE_HEADER,
    MAX_INFO_BYTES,
    NONCE_HEADER,
    BootstrapInfo,
    BootstrapLookupError,
    RankInfo,
    look_up,
)
from hisparse_pd.protocol.channels import ControlAddressError, ControlClient, ControlKeys
from hisparse_pd.protocol.messages import PROTOCOL_VERSION
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import Node, serving
from tests.unit.protocol.examples import GEOMETRY
from tests.unit.servers import held_port
from tests.waiting import WAIT_SECS

pytestmark = [pytest.mark.I1, pytest.mark.I7]

CLIENT = httpx.Client(trust_env=False, verify=False, timeout=WAIT_SECS)
"""One client for all tests: reading the system's certificates takes longer than a test."""

INFO = BootstrapInfo(PROTOCOL_VERSION, "inst", "127.0.0.1", 7000, GEOMETRY, False)


def on_prefill_node(tmp_path: Path, check: Callable[[Node], None], **options: Any) -> None:
    """Serve a prefill node's front, and run ``check`` in a thread, where blocking calls belong."""

    async def main() -> None:
        async with serving(say("A"), tmp_path, role="prefill", **options) as node:
            await asyncio.to_thread(check, node)

    asyncio.run(main())


def key_file(tmp_path: Path) -> tuple[Path, ControlKeys]:
    keys = ControlKeys.generate()
    path = tmp_path / "control.key"
    path.write_bytes(keys.secret)
    return path, keys


def refusals(node: Node, reason: str) -> float:
    text = CLIENT.get(f"http://127.0.0.1:{node.port}/metrics").text
    name = f'hisparse_pd:bootstrap_refusals_total{{reason="{reason}"}} '
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


# --- the endpoint -------------------------------------------------------------------------------------


def test_holders_of_one_key_understand_each_other_and_nobody_else_is_answered(tmp_path: Path) -> None:
    path, keys = key_file(tmp_path)

    def check(node: Node) -> None:
        info = look_up("127.0.0.1", node.bootstrap_port, keys)
        assert info.curve
        for stranger in (None, ControlKeys.generate()):
            with pytest.raises(BootstrapLookupError, match=r"status 401.*same --control-key-file") as caught:
                look_up("127.0.0.1", node.bootstrap_port, stranger)
            assert caught.value.is_final
            assert not caught.value.nobody_listens
            assert info.instance_id not in str(caught.value)
        assert refusals(node, "wrong_key") == 2
        # Both reasons have a counter from the start; otherwise an alert would not see the first refusal as
        # growth.
        text = CLIENT.get(f"http://127.0.0.1:{node.port}/metrics").text
        assert 'hisparse_pd:bootstrap_refusals_total{reason="address_not_allowed"} 0.0' in text.splitlines()

    on_prefill_node(tmp_path, check, control_key_file=path)


@pytest.mark.parametrize("keyed", [False, True])
def test_nothing_can_be_changed_at_the_endpoint(tmp_path: Path, keyed: bool) -> None:
    path, _ = key_file(tmp_path)

    def check(node: Node) -> None:
        url = f"http://127.0.0.1:{node.bootstrap_port}"
        for method in ("PUT", "POST", "DELETE", "PATCH"):
            assert CLIENT.request(method, url + BOOTSTRAP_PATH, json={"room": 1}).status_code == 405, method
        for other in ("/route", "/", "/register_dp_rank", "/flush_cache", "/v1/completions"):
            assert CLIENT.put(url + other).status_code == 404
            assert CLIENT.get(url + other).status_code == 404
        assert node.engine.received == []

    on_prefill_node(tmp_path, check, control_key_file=path if keyed else None)


def test_a_recorded_request_gets_nothing_but_the_same_information(tmp_path: Path) -> None:
    path, keys = key_file(tmp_path)

    def check(node: Node) -> None:
        url = f"http://127.0.0.1:{node.bootstrap_port}{BOOTSTRAP_PATH}"
        nonce = "0" * 32
        code = keys.sign("bootstrap request", nonce.encode())
        answers = [
            CLIENT.get(url, headers={NONCE_HEADER: sent, CODE_HEADER: code})
            for sent in (nonce, nonce, "1" * 32, "", nonce + "0")
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 401, 401, 401]
        assert answers[0].content == answers[1].content
        no_text = [(NONCE_HEADER.encode(), b"caf\xe9"), (CODE_HEADER.encode(), b"\xff\xfe")]
        refused = CLIENT.get(url, headers=no_text)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "wrong_key")

    on_prefill_node(tmp_path, check, control_key_file=path)


def test_only_the_list_is_answered_and_a_header_does_not_change_an_address(tmp_path: Path) -> None:
    def check(node: Node) -> None:
        with pytest.raises(BootstrapLookupError) as caught:
            look_up("127.0.0.1", node.bootstrap_port)
        assert caught.value.is_final
        assert "'127.0.0.1' is not in --allowed-peers (127.0.0.2)" in str(caught.value)
        url = f"http://127.0.0.1:{node.bootstrap_port}{BOOTSTRAP_PATH}"
        headers = {"x-forwarded-for": "127.0.0.2", "forwarded": "for=127.0.0.2"}
        assert CLIENT.get(url, headers=headers).status_code == 403
        transport = httpx.HTTPTransport(local_address="127.0.0.2", verify=False)
        with httpx.Client(transport=transport, timeout=WAIT_SECS) as client:
            assert client.get(url).status_code == 200
        assert refusals(node, "address_not_allowed") == 2

    on_prefill_node(tmp_path, check, allowed_peers=("127.0.0.2",))


@pytest.fixture(autouse=True)
def look_ups_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no look-up end for want of time that is not to."""
    monkeypatch.setattr(bootstrap, "LOOKUP_TIMEOUT_SECS", WAIT_SECS)


# --- the look-up, of endpoints that are hostile -----------------------------------------------------------


@contextmanager
def answering(parts: Iterable[bytes], hangs: bool = False) -> Iterator[int]:
    """Yield a port at which every connection gets ``parts`` as its answer."""
    server = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                if stopped.is_set():
                    return
                connection.recv(65536)
                try:
                    for part in parts:
                        connection.sendall(part)
                        if stopped.is_set():
                            return
                    if hangs:
                        stopped.wait()
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        stopped.set()
        socket.create_connection(server.getsockname()).close()
        thread.join()
        server.close()


def http(body: bytes, status: bytes = b"200 OK", **headers: str) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body)]
    lines += [f"{name.replace('_', '-')}: {value}".encode() for name, value in headers.items()]
    return b"\r\n".join([*lines, b"", body])


def _chunks(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body


def test_an_answer_may_come_in_chunks() -> None:
    body = msgspec.json.encode(INFO)
    pieces = (body[:7], body[7:])
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    with answering((_chunks(chunks + b"0\r\n\r\n"),), hangs=True) as port:
        assert look_up("127.0.0.1", port).instance_id == "inst"


@pytest.mark.I8
@pytest.mark.parametrize(
    "begin", [_chunks(b"-1\r\n"), _chunks(b"fffffffffff\r\n"), b"HTTP/1.1 200 OK\r\n\r\n"]
)
def test_no_more_is_read_of_an_endless_answer_than_the_information_may_have(begin: bytes) -> None:
    num_sent = 0

    def floods() -> Iterator[bytes]:
        nonlocal num_sent
        yield begin
        while True:
            num_sent += 1
            yield b"x" * (1 << 16)

    with answering(floods()) as port, pytest.raises(BootstrapLookupError, match="more than 65536 bytes"):
        look_up("127.0.0.1", port)
    assert num_sent < 1000, "the others wait in the sockets' buffers"


def test_a_forged_or_recorded_answer_is_not_believed() -> None:
    keys = ControlKeys.generate()
    body = msgspec.json.encode(INFO)
    recorded = keys.sign("bootstrap answer", b"0" * 32, body)
    codes: tuple[dict[str, str], ...] = ({}, {CODE_HEADER: "0" * 64}, {CODE_HEADER: recorded})
    for headers in codes:
        with answering((http(body, b"200 OK", **headers),)) as port:
            assert look_up("127.0.0.1", port).instance_id == "inst", "without a key there is nothing to check"
            with pytest.raises(BootstrapLookupError, match="same --control-key-file") as caught:
                look_up("127.0.0.1", port, keys)
            assert caught.value.is_final


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(b"{}"), "no bootstrap information"),
        (http(b"[" * 60_000), "no bootstrap information"),
        (http(b'{"instance_id": "\xff"}'), "no bootstrap information"),
        (http(b"x" * (MAX_INFO_BYTES + 1)), "more than 65536 bytes"),
        (http(msgspec.json.encode(INFO).replace(b"7000", b"70000")), "control_port"),
        (http(msgspec.json.encode(INFO).replace(b'"127.0.0.1"', b'"a:1/?x"')), "no name and no address"),
        (http(msgspec.json.encode(INFO).replace(b'"inst"', b'"a\\nb"')), "instance_id"),
        (
            http(b'{"error": {"message": "the engine is loading"}}', b"503 No"),
            "status 503: the engine is loading",
        ),
        (http(b"[1]", b"500 No"), "status 500"),
        (http(b"", b"302 Found", location="http://127.0.0.1:1/"), "status 302"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MAX_INFO_BYTES + 1), "more than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "ended 8 bytes before its end"),
        (_chunks(b"-2\r\n{}"), "no bootstrap information|IncompleteRead"),
        (_chunks(b"1\r\n{\r\n0\r\n\r\n"), "no bootstrap information"),
        (_chunks(b"9\r\n{"), "IncompleteRead"),
        (_chunks(b"x\r\n{"), "IncompleteRead"),
        (b"\x00\xff nothing of the kind\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200, "more than 100 headers"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_says_so(answer: bytes, words: str) -> None:
    with answering((answer,)) as port, pytest.raises(BootstrapLookupError, match=words) as caught:
        look_up("127.0.0.1", port)
    assert not caught.value.nobody_listens
    assert len(str(caught.value)) < 1000


def drips(byte: bytes) -> Iterator[bytes]:
    while True:
        yield byte
        time.sleep(0.01)


@pytest.mark.I8
@pytest.mark.parametrize("drip", [b"", b"x"])
@pytest.mark.parametrize(
    "begin", [b"", b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n{"]
)
def test_an_answer_that_drips_ends_with_the_time(
    begin: bytes, drip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "LOOKUP_TIMEOUT_SECS", 0.2)
    parts = itertools.chain((begin,), drips(drip) if drip else ())
    with (
        answering(parts, hangs=True) as port,
        pytest.raises(BootstrapLookupError, match=r"no whole answer in 0\.\d+ s"),
    ):
        look_up("127.0.0.1", port)


@pytest.mark.I8
def test_a_name_that_took_all_of_the_time_leaves_none_to_ask_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow name server answers in the last moment, and this thread goes on after it."""
    now = time.monotonic()
    monkeypatch.setattr(bootstrap, "time", SimpleNamespace(monotonic=lambda: now))

    def resolve(host: str, deadline: float) -> list[str]:
        nonlocal now
        now = deadline + 0.1
        return ["127.0.0.8", "127.0.0.9"]

    monkeypatch.setattr(bootstrap, "resolve", resolve)
    with pytest.raises(BootstrapLookupError, match=r"no whole answer in 0\.000 s") as caught:
        look_up("prefill.example", 1)
    assert not caught.value.nobody_listens


def test_threads_that_cannot_be_started_keep_no_later_name_from_being_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        for _ in range(names._MAX_THREADS + 1):
            with pytest.raises(OSError, match="can't start new thread"):
                names.resolve("localhost", time.monotonic() + WAIT_SECS)
    assert names.resolve("localhost", time.monotonic() + WAIT_SECS)


@pytest.mark.I8
def test_a_name_server_that_does_not_answer_takes_no_more_than_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look-up has a time limit, and ZMQ never resolves names, because it only gets addresses."""
    is_over, is_asked = threading.Event(), threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        is_asked.set()
        is_over.wait()
        return []

    named = msgspec.structs.replace(INFO, control_host="control.example")
    monkeypatch.setattr(names, "socket", SimpleNamespace(**vars(socket) | {"getaddrinfo": never}))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(bootstrap, "LOOKUP_TIMEOUT_SECS", 0.2)
            with pytest.raises(BootstrapLookupError, match="name servers"):
                look_up("prefill.example", 1)
        assert is_asked.wait(WAIT_SECS)
        is_asked.clear()
        # The time is up once the node has answered, and no sooner.
        late = SimpleNamespace(monotonic=lambda: time.monotonic() + WAIT_SECS)
        monkeypatch.setattr(names, "time", late)
        with (
            answering((http(msgspec.json.encode(named)),)) as port,
            pytest.raises(BootstrapLookupError, match=r"control\.example: not resolved in time"),
        ):
            look_up("127.0.0.1", port)
        assert is_asked.wait(WAIT_SECS)
    finally:
        is_over.set()
    with pytest.raises(ControlAddressError, match="a name stalls ZMQ"):
        ControlClient("tcp://prefill.example:7000")


def test_a_name_stands_for_that_address_of_it_which_answers_and_the_list_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection goes to that same address: a second look-up of the name could give another."""
    addresses: list[str] = []
    resolved: list[str] = []

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        resolved.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]

    def asked(allowed: PeerList | None, *found: str) -> str:
        addresses[:] = found
        with monkeypatch.context() as patch:
            patch.setattr(names, "socket", SimpleNamespace(**vars(socket) | {"getaddrinfo": resolve}))
            return look_up("prefill.example", port, None, allowed).control_host

    loopback = PeerList.parse(["127.0.0.0/8"])
    with answering((http(msgspec.json.encode(msgspec.structs.replace(INFO, control_host="*"))),)) as port:
        assert asked(None, "127.0.0.9", "127.0.0.1") == "127.0.0.1"
        with pytest.raises(BootstrapLookupError, match="refused") as caught:
            asked(None, "127.0.0.9", "127.0.0.8")
        assert caught.value.nobody_listens
        assert asked(loopback, "192.0.2.9", "127.0.0.1") == "127.0.0.1"
        with pytest.raises(BootstrapLookupError, match=r"'192\.0\.2\.9' is not in --allowed-peers"):
            asked(loopback, "192.0.2.9")
    assert resolved == ["prefill.example"] * 4


@pytest.mark.parametrize("host", ["127.0.0.1/x?", "user@127.0.0.1", "127.0.0.1#", "a b", "", "127.0.0.1:1"])
def test_a_host_cannot_lead_to_another_url(host: str) -> None:
    with pytest.raises(BootstrapLookupError, match="no name and no address") as caught:
        look_up(host, 1)
    assert caught.value.is_final


def test_a_decode_node_asks_and_connects_to_its_list_only() -> None:
    allowed = PeerList.parse(["127.0.0.1"])
    with answering((http(msgspec.json.encode(INFO)),)) as port:
        info = look_up("127.0.0.1", port, None, allowed)
        assert info.control_endpoint("127.0.0.1") == "tcp://127.0.0.1:7000"
        with pytest.raises(BootstrapLookupError, match=r"'127\.0\.0\.2' is not in --allowed-peers") as caught:
            look_up("127.0.0.2", port, None, allowed)
        assert caught.value.is_final
    elsewhere = msgspec.structs.replace(INFO, control_host="192.0.2.9")
    with (
        answering((http(msgspec.json.encode(elsewhere)),)) as port,
        pytest.raises(BootstrapLookupError, match=r"'192\.0\.2\.9' is not in --allowed-peers"),
    ):
        look_up("127.0.0.1", port, None, allowed)
    wildcard = msgspec.structs.replace(INFO, control_host="0.0.0.0")
    with answering((http(msgspec.json.encode(wildcard)),)) as port:
        assert look_up("127.0.0.1", port, None, allowed).control_endpoint("x") == "tcp://127.0.0.1:7000"


def test_a_rank_may_be_on_another_machine_which_the_list_has() -> None:
    ranks = (RankInfo("first", 7000), RankInfo("second", 7001, "127.0.0.2"))
    several = http(msgspec.json.encode(msgspec.structs.replace(INFO, ranks=ranks)))
    with answering((several,)) as port:
        info = look_up("127.0.0.1", port, None, PeerList.parse(["127.0.0.0/8"]))
        endpoints = [rank.control_endpoint("x") for rank in (info.of_rank(0), info.of_rank(1)) if rank]
        assert endpoints == ["tcp://127.0.0.1:7000", "tcp://127.0.0.2:7001"]
        with pytest.raises(BootstrapLookupError, match=r"'127\.0\.0\.2' is not in --allowed-peers"):
            look_up("127.0.0.1", port, None, PeerList.parse(["127.0.0.1"]))
    for host in ("0.0.0.0", "a b"):
        wrong = msgspec.structs.replace(INFO, ranks=(RankInfo("first", 7000, host),))
        with (
            answering((http(msgspec.json.encode(wrong)),)) as port,
            pytest.raises(BootstrapLookupError, match=f"control host '{host}' is no name and no address"),
        ):
            look_up("127.0.0.1", port)


def test_nothing_listening_is_told_apart() -> None:
    with held_port() as port, pytest.raises(BootstrapLookupError) as caught:
        look_up("127.0.0.1", port)
    assert caught.value.nobody_listens
    assert not caught.value.is_final
