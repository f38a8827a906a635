"""Control connections and bootstrap look-ups in the test's hands, in place of ZMQ, TCP and HTTP.

As over TCP, a connection delivers its frames in order, and what is under way when it breaks is lost. Between
connections there is no order: one that was closed may still have frames to deliver behind those of its
successor. Frames are those of the wire: every message is encoded and decoded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from hisparse_pd.protocol import messages
from hisparse_pd.protocol.bootstrap import BootstrapLookupError
from hisparse_pd.protocol.messages import ToDecode, ToPrefill


class Connection:
    """One TCP connection: frames in order, each way, until it breaks."""

    def __init__(self, number: int, client: SimClient, server: SimServer) -> None:
        self.identity = b"connection-%d" % number
        self.client, self.server = client, server
        self.to_server: deque[bytes] = deque()
        self.to_client: deque[bytes] = deque()
        self.delivered_to_server: deque[bytes] = deque(maxlen=8)
        self.delivered_to_client: deque[bytes] = deque(maxlen=8)

    def deliver(self, num_frames: int) -> None:
        """Take up to so many frames a direction to the other end; a closed end takes nothing."""
        for _ in range(min(num_frames, len(self.to_server))):
            frame = self.to_server.popleft()
            self.delivered_to_server.append(frame)
            self.server.inbox.append((self.identity, frame))
        for _ in range(min(num_frames, len(self.to_client))):
            frame = self.to_client.popleft()
            self.delivered_to_client.append(frame)
            self.client.inbox.append(frame)


class SimClient:
    """In place of a ``ControlClient``. It connects again by itself, and keeps what it could not send."""

    def __init__(self, network: Network, endpoint: str) -> None:
        self._network = network
        self.endpoint = endpoint
        self.dropped: Counter[str] = Counter()
        self.inbox: deque[bytes] = deque()
        self.unsent: deque[bytes] = deque()
        self.connection: Connection | None = None
        self.is_lost = False
        network.clients.append(self)

    def take_loss(self) -> bool:
        is_lost, self.is_lost = self.is_lost, False
        return is_lost

    def receive(self) -> Iterator[ToDecode]:
        while self.inbox:
            yield messages.to_decode_decoder.decode(self.inbox.popleft())

    def send(self, message: ToPrefill) -> bool:
        queue = self.unsent if self.connection is None else self.connection.to_server
        queue.append(messages.encoder.encode(message))
        return True

    def close(self) -> None:
        """What is under way to the server still arrives; what is under way to here does not."""
        self._network.clients.remove(self)
        if self.connection is not None:
            self.connection.to_client.clear()
            self._network.leftovers.append(self.connection)


class SimServer:
    """In place of a ``ControlServer``."""

    def __init__(self, network: Network, port: int) -> None:
        self._network = network
        self.port = port
        self.dropped: Counter[str] = Counter()
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        network.servers[f"tcp://127.0.0.1:{port}"] = self

    def receive(self) -> Iterator[tuple[bytes, ToPrefill]]:
        while self.inbox:
            identity, frame = self.inbox.popleft()
            yield identity, messages.to_prefill_decoder.decode(frame)

    def send(self, identity: bytes, message: ToDecode) -> bool:
        for client in self._network.clients:
            connection = client.connection
            if connection is not None and connection.server is self and connection.identity == identity:
                connection.to_client.append(messages.encoder.encode(message))
                return True
        self.dropped["unroutable"] += 1
        return False

    def close(self) -> None:
        self._network.server_died(self)


class Network:
    def __init__(self) -> None:
        self.clients: list[SimClient] = []
        self.servers: dict[str, SimServer] = {}
        self.leftovers: list[Connection] = []
        """Closed by the client, with frames that the server has not got yet."""
        self._num_connections = 0

    def connect(self) -> None:
        """Clients without a connection get one, where somebody listens."""
        for client in self.clients:
            server = self.servers.get(client.endpoint)
            if client.connection is None and server is not None:
                self._num_connections += 1
                client.connection = Connection(self._num_connections, client, server)
                client.connection.to_server, client.unsent = client.unsent, deque()

    @property
    def connections(self) -> list[Connection]:
        """With the leftovers, which may overtake or be overtaken by their successors."""
        live = [client.connection for client in self.clients if client.connection is not None]
        return self.leftovers + live

    def deliver_all(self) -> None:
        self.connect()
        for connection in self.connections:
            connection.deliver(1000)
        self.leftovers.clear()

    def break_connection(self, client: SimClient, num_kept: int) -> None:
        """Whatever was under way is lost, but for the last ``num_kept`` frames, which had not left yet."""
        connection, client.connection = client.connection, None
        if connection is not None:
            client.is_lost = True
            kept = list(connection.to_server)[-num_kept:] if num_kept else []
            client.unsent = deque(kept)

    def server_died(self, server: SimServer) -> None:
        for endpoint, listening in list(self.servers.items()):
            if listening is server:
                del self.servers[endpoint]
        self.leftovers = [connection for connection in self.leftovers if connection.server is not server]
        self.silence(server)

    def silence(self, server: SimServer) -> None:
        """ZMQ closes the connections of a server that does not answer; new ones are as silent."""
        for client in self.clients:
            if client.connection is not None and client.connection.server is server:
                self.break_connection(client, 0)

    def client_died(self, client: SimClient) -> None:
        if client in self.clients:
            client.close()


class Lookups:
    """In place of the threads that ask bootstrap endpoints: answers are made at once, and given when told."""

    def __init__(self) -> None:
        self.pending: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, endpoint: tuple[str, int], ask: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            answer = ask(*args)
            self.pending.append((future, lambda: future.set_result(answer)))
        except BootstrapLookupError as error:
            failure = error
            self.pending.append((future, lambda: future.set_exception(failure)))
        return future

    def answer(self) -> None:
        while self.pending:
            future, give = self.pending.pop(0)
            if future.set_running_or_notify_cancel():
                give()

    def close(self, *, wait: bool) -> None:
        self.pending.clear()
