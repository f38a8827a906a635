"""Nodes that stop, start again, hang or disagree, and clients that leave. Invariants I1, I2 and I7."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol import bootstrap, messages
from protocol.channels import ControlClient
from tests.integration.harness import (
    Deployment,
    Service,
    decode_service,
    deployment,
    prefill_service,
    router_service,
    running,
    wait_until,
)

PROMPT = "Nodes come and go without a restart of the rest. " * 8
Checkpoint = Callable[[str], Path]
HEARTBEATS = ["--heartbeat-interval-secs", "1", "--heartbeat-max-failures", "5"]


def generate(url: str, *, timeout_secs: float = 60, **change: Any) -> httpx.Response:
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, **change.pop("params", {})}
    body = {"text": PROMPT, "sampling_params": params, **change}
    return httpx.post(f"{url}/generate", json=body, timeout=timeout_secs)


def pool_usage(node: Service) -> float:
    """Tokens in use or in quarantine over all pools, the prefix cache aside."""
    return sum(
        value
        for name, value in node.metrics().items()
        if name.startswith("hisparse_pd:pool_used_tokens") or name == "hisparse_pd:quarantined_tokens"
    )


def is_idle(node: Service) -> bool:
    samples = node.metrics()
    return samples["hisparse_pd:num_running_reqs"] == 0 and samples["hisparse_pd:num_queue_reqs"] == 0


@dataclass
class Load:
    """Clients that send requests one after the other until told to stop, and keep every answer."""

    url: str
    num_clients: int
    answers: list[httpx.Response] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _counter: Iterator[int] = field(default_factory=itertools.count)

    def _client(self) -> None:
        flags = (True, False, "auto")
        while not self._over.is_set():
            number = next(self._counter)
            text = f"{number} {PROMPT}" if number % 3 else PROMPT
            params = {"max_new_tokens": 8 + number % 17}
            self.answers.append(generate(self.url, text=text, hisparse=flags[number % 3], params=params))

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._client) for _ in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def wait_for_more(self, num_answers: int) -> None:
        """Until so many further requests came back right."""
        target = self.num_ok + num_answers
        wait_until(lambda: self.num_ok >= target, 60, f"{num_answers} further answers")

    @property
    def num_ok(self) -> int:
        return sum(answer.status_code == 200 for answer in list(self.answers))


def test_two_by_two_under_load_while_nodes_stop_and_start(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Only requests that a stopped node held fail, with an error that names it; afterwards all is served."""
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        num_prefill=2,
        num_decode=2,
        prefill_options=HEARTBEATS,
        decode_options=["--device-buffer-size", "128", *HEARTBEATS],
        router_options=["--health-interval-secs", "0.5"],
    ) as nodes:
        reference = {
            length: generate(nodes.url, params={"max_new_tokens": length}).json()["output_ids"]
            for length in range(8, 25)
        }
        stopped: list[Service] = []
        with Load(nodes.url, num_clients=6) as load:
            load.wait_for_more(10)
            for node in (nodes.prefill[0], nodes.decode[1]):
                node.kill()
                stopped.append(node)
                load.wait_for_more(10)
                node.start()
                node.wait_healthy()
                load.wait_for_more(20)
        for answer in load.answers:
            if answer.status_code == 200:
                body = answer.json()
                if body["meta_info"]["prompt_tokens"] == len(PROMPT):
                    assert body["output_ids"] == reference[len(body["output_ids"])]
                continue
            held_by = {answer.headers["x-hisparse-pd-prefill"], answer.headers["x-hisparse-pd-decode"]}
            assert held_by & {node.url for node in stopped}, answer.text
            assert answer.json()["error"]["message"]
            assert answer.status_code in (500, 502, 503, 504)
        before = [node.metrics() for node in nodes.decode]
        for _ in range(8):
            assert generate(nodes.url).status_code == 200
        served = "hisparse_pd:kv_transfer_bytes_total"
        assert all(
            node.metrics()[served] > old[served] for node, old in zip(nodes.decode, before, strict=True)
        )
        for node in (*nodes.prefill, *nodes.decode):
            wait_until(lambda node=node: is_idle(node), 30, f"{node.name} idle")  # type: ignore[misc]


def test_a_client_that_leaves_frees_everything(pair: Deployment) -> None:
    decode = pair.decode[0]
    aborted = "hisparse_pd:aborted_requests_total"
    body = {
        "text": PROMPT,
        "stream": True,
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True, "temperature": 0},
    }
    for hisparse in (True, False):
        num_aborted = decode.metrics()[aborted]
        with httpx.stream(
            "POST", f"{pair.url}/generate", json={**body, "hisparse": hisparse}, timeout=60
        ) as answer:
            lines = answer.iter_lines()  # kept: closing it would close the answer
            next(lines)
            wait_until(lambda: decode.metrics()["hisparse_pd:num_running_reqs"] == 1, 30, "the request runs")
            assert pool_usage(decode) > 0
        wait_until(
            lambda before=num_aborted: decode.metrics()[aborted] == before + 1,  # type: ignore[misc]
            30,
            "the abort",
        )
        wait_until(lambda: is_idle(decode) and pool_usage(decode) == 0, 30, "pools whole after the abort")


def test_garbage_at_the_control_socket_is_counted_and_harmless(pair: Deployment) -> None:
    prefill = pair.prefill[0]
    info = bootstrap.look_up("127.0.0.1", prefill.bootstrap_port)
    client = ControlClient(info.control_endpoint("127.0.0.1"))
    dropped = 'hisparse_pd:control_messages_dropped_total{reason="malformed"}'
    before = prefill.metrics().get(dropped, 0)
    try:
        no_text = b"\x93\x04\x03\xa2\xff\xfe"  # an abort whose reason is no UTF-8
        too_deep = b"\x93\x02\x09" + b"\x91" * 100_000 + b"\xc0"  # a heartbeat with a nested further field
        for frame in (b"", b"\xff" * 100, b"\x91\x63", b"\x80", messages.encoder.encode([3, 1])):
            client.socket.send(frame)
        client.socket.send(no_text)
        client.socket.send(too_deep)
        client.send(messages.Bootstrap(1, 1, (messages.Extent(0, 1),), (messages.Extent(0, 1),), 0))
        wait_until(lambda: prefill.metrics().get(dropped, 0) >= before + 7, 10, "garbage counted")
    finally:
        client.close()
    assert generate(pair.url).status_code == 200


def test_retraction_under_pressure_keeps_the_tokens(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Dense requests that outgrow the device pool push others out, and every answer stays right."""
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        # Two dense requests of 8 pages fit for their whole life. A third is let in with two pages, and is
        # at the end of the pool with three, some three hundred steps before the others end.
        decode_options=["--device-pool-tokens", "1216", "--device-buffer-size", "192"],
    ) as pair:
        decode = pair.decode[0]
        prompts = [f"{number} {PROMPT[:48]}" for number in range(8)]
        params = {"max_new_tokens": 448}
        flags = [False, False, False, True, False, False, True, False]
        first, others = range(3), range(3, len(prompts))

        def answer(number: int) -> httpx.Response:
            return generate(
                pair.url, text=prompts[number], params=params, hisparse=flags[number], timeout_secs=120
            )

        alone = [answer(number).json()["output_ids"] for number in first]
        assert decode.metrics()["hisparse_pd:retractions_total"] == 0
        with ThreadPoolExecutor(len(prompts)) as threads:
            pending = [threads.submit(answer, number) for number in first]
            wait_until(
                lambda: decode.metrics()["hisparse_pd:retractions_total"] > 0, 60, "the third is pushed out"
            )
            pending += [threads.submit(answer, number) for number in others]
            answers = [future.result() for future in pending]
        assert [answer.status_code for answer in answers] == [200] * len(prompts), answers[0].text
        assert [answer.json()["output_ids"] for answer in answers[:3]] == alone
        wait_until(lambda: pool_usage(decode) == 0, 30, "pools whole")


def test_page_sizes_may_differ_for_hisparse_only(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        prefill_options=["--page-size", "32"],
        decode_options=["--page-size", "64", "--device-buffer-size", "128"],
    ) as pair:
        assert generate(pair.url, hisparse=True).status_code == 200
        answers: list[httpx.Response] = []

        def is_refused() -> bool:
            """Whatever a node that misses its health checks under load answers first."""
            answers.append(generate(pair.url, hisparse=False))
            return answers[-1].status_code == 400

        wait_until(is_refused, 30, "the refusal")
        message = answers[-1].json()["error"]["message"]
        assert "32" in message
        assert "64" in message


def test_a_node_of_another_model_is_refused_with_both_values(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    prefill = prefill_service(tiny_checkpoint("v32"), tmp_path, "prefill")
    decode = decode_service(tiny_checkpoint("glm"), tmp_path, "decode", ["--served-model-name", "tiny-v32"])
    router = router_service([prefill], [decode], tmp_path)
    with running([prefill, decode, router]):
        answer = generate(router.url)
        assert answer.status_code >= 400
        assert "fingerprint" in answer.json()["error"]["message"]
        assert all(node.is_healthy() for node in (prefill, decode, router))


@pytest.fixture(scope="module")
def impatient(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two prefill nodes and a decode node with short timeouts."""
    options = ["--room-timeout-secs", "8", "--transfer-timeout-secs", "4"]
    options += ["--heartbeat-interval-secs", "1", "--heartbeat-max-failures", "3"]
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path_factory.mktemp("impatient"),
        num_prefill=2,
        prefill_options=options,
        decode_options=[*options, "--quarantine-secs", "2"],
        router_options=["--health-interval-secs", "600"],  # so that the router keeps choosing both
    ) as nodes:
        for _ in range(4):
            assert generate(nodes.url).status_code == 200
        yield nodes


def test_requests_of_a_stopped_prefill_node_go_on_with_another(impatient: Deployment) -> None:
    """SIGSTOP: the node accepts connections and never answers. Everybody is served, within the timeouts."""
    stopped, other = impatient.prefill
    decode = impatient.decode[0]
    stopped.signal_group(signal.SIGSTOP)
    try:
        started = time.monotonic()
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda _: generate(impatient.url), range(6)))
        assert time.monotonic() - started < 40
        assert [answer.status_code for answer in answers] == [200] * len(answers), answers[0].text
        assert {answer.headers["x-hisparse-pd-prefill"] for answer in answers} == {other.url}
        assert impatient.router.metrics()["hisparse_pd:router_prefill_retries_total"] >= 1
        assert decode.is_healthy()
        assert other.is_healthy()
    finally:
        stopped.signal_group(signal.SIGCONT)
    wait_until(lambda: is_idle(decode) and pool_usage(decode) == 0, 40, "quarantine lifted")
    wait_until(
        lambda: all(generate(impatient.url).status_code == 200 for _ in range(2)),
        40,
        "the woken node serves again",
    )


def test_health_does_not_depend_on_the_peer(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    decode = decode_service(tiny_checkpoint("v32"), tmp_path, "decode")
    with running([decode]):
        answer = httpx.post(
            f"{decode.url}/generate",
            json={
                "text": "x",
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": 1,
                "bootstrap_room": 5,
                "sampling_params": {"max_new_tokens": 2},
            },
            timeout=60,
        )
        assert answer.status_code in (502, 503)
        assert "127.0.0.1:1" in json.dumps(answer.json())
        assert decode.is_healthy()
        assert pool_usage(decode) == 0


def test_an_engine_that_hangs_fails_health_and_one_that_dies_ends_the_node(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    decode = decode_service(tiny_checkpoint("v32"), tmp_path, "decode", ["--health-timeout-secs", "2"])
    with running([decode]):
        engine = _engine_pid(decode)
        _signal(engine, signal.SIGSTOP)
        wait_until(
            lambda: httpx.get(decode.url + "/health", timeout=5).status_code == 503, 20, "/health at 503"
        )
        _signal(engine, signal.SIGCONT)
        wait_until(decode.is_healthy, 20, "/health at 200 again")
        _signal(engine, signal.SIGKILL)
        assert decode.process is not None
        assert decode.process.wait(20) != 0


def test_sigterm_stops_every_service_with_status_0(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with deployment(tiny_checkpoint("v32"), tmp_path) as pair:
        assert generate(pair.url).status_code == 200
        engines = [_engine_pid(node) for node in (*pair.prefill, *pair.decode)]
        assert [service.stop() for service in pair.services] == [0, 0, 0]
        for engine in engines:
            wait_until(lambda engine=engine: not Path(f"/proc/{engine}").exists(), 10, "engine gone")  # type: ignore[misc]


def _engine_pid(node: Service) -> int:
    """The child of the front that is the engine: the one with the most memory."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()

    def resident_pages(pid: str) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])

    return int(max(children, key=resident_pages))


def _signal(pid: int, signal_number: int) -> None:
    import os

    os.kill(pid, signal_number)
