"""The two-node deployment in containers: reached through its one port, killed, stopped, and watched."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.compose.deployment import (
    PROMPT,
    UNHURRIED,
    Deployment,
    Load,
    wait_until,
)
from tests.monitoring_files import alert_rules, dashboard_queries

pytestmark = [pytest.mark.compose, pytest.mark.timeout(7200)]

SERVICES = ("prefill", "decode", "router")
LONG = 600
"""Tokens of an answer that is still being streamed when its node is told to stop."""

ENDLESS = 6000
"""Tokens of an answer that takes longer than a drain of one second."""

DONE = "[DONE]"


def test_only_the_routers_port_is_published(deployment: Deployment) -> None:
    for service in SERVICES:
        ports = deployment.inspect(service)["NetworkSettings"]["Ports"] or {}
        published = [entry["HostPort"] for entries in ports.values() for entry in entries or ()]
        assert published == ([str(deployment.router_port)] if service == "router" else [])


@pytest.mark.parametrize("service", SERVICES)
def test_containers_may_do_little(deployment: Deployment, service: str) -> None:
    description = deployment.inspect(service)
    host = description["HostConfig"]
    assert description["Config"]["User"] == "10001:10001"
    assert description["Config"]["StopSignal"] == "SIGTERM"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["Memory"] > 0
    assert host["NanoCpus"] > 0
    if service != "router":
        (model,) = [mount for mount in description["Mounts"] if mount["Destination"] == "/model"]
        assert not model["RW"]


def test_the_image_has_no_tools_of_its_build(deployment: Deployment) -> None:
    look = "command -v gcc cc make pip git; ls -d /wheels /src; find / -xdev -name '*.whl'"
    found = deployment.engine.docker(
        "exec", deployment.container("router"), "sh", "-c", f"({look}) 2>/dev/null; true"
    )
    assert found == ""


def test_requests_need_the_key(deployment: Deployment) -> None:
    body = {"model": "retrieval", "prompt": PROMPT, "max_tokens": 1}
    assert deployment.post("/v1/completions", body, headers={}).status_code == 401
    wrong = {"authorization": "Bearer not-the-key-of-this-deployment"}
    assert deployment.post("/v1/completions", body, headers=wrong).status_code == 401


def test_both_modes_give_the_same_answer(deployment: Deployment) -> None:
    answers = {}
    for hisparse in (True, False):
        answer = deployment.complete(hisparse=hisparse)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["hisparse"]["mode"] == ("hisparse" if hisparse else "dense")
        assert usage["completion_tokens"] == 16
        answers[hisparse] = answer.json()["choices"][0]["text"]
    assert answers[True] == answers[False]


def lanes(deployment: Deployment) -> dict[str, set[tuple[str, str]]]:
    """Return lane and reason of the pair as Prometheus has them, by node."""
    found: dict[str, set[tuple[str, str]]] = {}
    for series in deployment.ask_prometheus("query", query="hisparse_pd:lane_info")["result"]:
        labels = series["metric"]
        found.setdefault(labels["instance"], set()).add((labels["lane"], labels["reason"]))
    return found


def wait_for_lane(deployment: Deployment, lane: str, reason: str) -> None:
    """Send requests until one is answered, and wait until each node reports this lane to its peer."""
    expected = {f"{node}:30000": {(lane, reason)} for node in ("prefill", "decode")}
    wait_until(deployment.is_serving, "requests are answered")
    try:
        wait_until(lambda: lanes(deployment) == expected, "the lane")
    except TimeoutError as error:
        raise AssertionError(f"{error}: {lanes(deployment)}, not {expected}") from error


def test_containers_of_one_machine_share_the_decode_nodes_memory(deployment: Deployment) -> None:
    wait_for_lane(deployment, "shm", "both see the same memory")


def test_kv_takes_the_network_where_that_is_configured(deployment: Deployment) -> None:
    expected = deployment.complete().json()["choices"][0]["text"]
    deployment.configure(SAME_HOST_LANE="--same-host-lane off")
    try:
        deployment.up("prefill", "decode")
        wait_for_lane(deployment, "tcp", "--same-host-lane is off")
        for hisparse in (True, False):
            answer = deployment.complete(hisparse=hisparse)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected
    finally:
        deployment.configure(SAME_HOST_LANE="--same-host-dir /lane")
        deployment.up("prefill", "decode")
        wait_until(deployment.is_serving, "requests are answered")


def test_a_chat_is_streamed(deployment: Deployment) -> None:
    body = {
        "model": "retrieval",
        "messages": [{"role": "user", "content": "What is the key of room 41?"}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "hisparse": True,
    }
    answer = deployment.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    events = [line for line in answer.text.splitlines() if line]
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1] == "data: [DONE]"


def test_prometheus_has_every_target_up(deployment: Deployment) -> None:
    expected = {"prefill:30000": "up", "decode:30000": "up", "router:8000": "up"}
    wait_until(lambda: deployment.targets() == expected, "all targets are up")


def test_prometheus_evaluates_every_rule(deployment: Deployment) -> None:
    def states() -> dict[str, str]:
        groups = deployment.ask_prometheus("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    assert set(states()) == {rule["alert"] for rule in alert_rules()}
    wait_until(lambda: set(states().values()) == {"ok"}, "all rules are evaluated")


def test_every_query_of_the_dashboard_returns_data(deployment: Deployment) -> None:
    """Queries are Grafana's, without their conditions that draw only values above 0 or only several ranks."""
    queries = {
        query.expression.removesuffix(" > 0").replace(', dp_rank!=""', ""): query.where
        for query in dashboard_queries()
    }
    without_data = dict(queries)

    def have_data() -> bool:
        for expression in tuple(without_data):
            series = deployment.ask_prometheus("query", query=expression)["result"]
            if any(not math.isnan(float(each["value"][1])) for each in series):
                del without_data[expression]
        return not without_data

    with Load(deployment).running():
        try:
            wait_until(have_data, "every query has data")
        except TimeoutError as error:
            raise AssertionError(f"no data under load: {without_data}") from error


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_dies_under_load_comes_back(deployment: Deployment, service: str) -> None:
    expected = deployment.complete().json()["choices"][0]["text"]
    num_restarts = deployment.inspect(service)["RestartCount"]
    with Load(deployment).running() as load:
        load.wait_answered(3)
        deployment.crash(service)
        wait_until(
            lambda: deployment.inspect(service)["RestartCount"] > num_restarts,
            f"Docker starts {service} again",
        )
        deployment.wait_healthy(service, "router")
        load.wait_answered(6)
    assert set(load.texts) == {expected}
    for error in load.errors:
        is_clear = error.startswith(("502 ", "503 ", "504 "))
        assert is_clear or service == "router", f"a client was told {error}"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_is_stopped_finishes_its_requests(deployment: Deployment, service: str) -> None:
    stopping = threading.Thread(target=deployment.compose, args=("stop", service))
    with deployment.stream(max_tokens=LONG) as events:
        first = next(events)
        stopping.start()
        refused = _first_refusal(deployment)
        (*_, last) = events
    stopping.join()
    assert refused is None or refused in (502, 503)
    assert not is_error(first)
    assert last == DONE
    assert deployment.state(service)["ExitCode"] == 0
    assert not deployment.state(service)["OOMKilled"]
    deployment.compose("start", service)
    deployment.wait_healthy(service, "router")
    wait_until(deployment.is_serving, "requests are answered again")


@pytest.mark.parametrize("service", ["decode", "router"])
def test_a_drain_is_bounded(hurried: Deployment, service: str) -> None:
    """A request that outlasts the drain ends with an error, and the service ends by itself."""
    with hurried.stream(max_tokens=ENDLESS) as events:
        assert not is_error(next(events))
        hurried.compose("stop", service)
        (*_, last) = events
    assert is_error(last)
    assert hurried.state(service)["ExitCode"] == 0  # Docker's SIGKILL would make it 137
    hurried.compose("start", service)
    wait_until(hurried.is_serving, "requests are answered again")


@pytest.fixture(scope="module")
def hurried(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment with a drain of one second."""
    deployment.configure(DRAIN_TIMEOUT_SECS="1", STOP_GRACE_PERIOD="21s")
    deployment.up(*SERVICES)
    wait_until(deployment.is_serving, "requests are answered")
    yield deployment
    deployment.configure(**UNHURRIED)
    deployment.up(*SERVICES)


def is_error(event: str) -> bool:
    return event != DONE and "error" in json.loads(event)


def _first_refusal(deployment: Deployment) -> int | None:
    """The status that new requests get once the service drains; None when it no longer listens."""
    while True:
        try:
            answer = deployment.complete(1)
        except httpx.TransportError:
            return None
        if not answer.is_success:
            return answer.status_code
