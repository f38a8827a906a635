"""The two-node deployment in containers: reached through its one port, killed, stopped, and watched."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from tests.compose.deployment import HEALTHY_TIMEOUT_SECS, PROMPT, Deployment, Load, wait_until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

SERVICES = ("prefill", "decode", "router")
LONG = 600
"""Tokens of an answer that is still being streamed when its node is told to stop."""


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


def test_prometheus_has_all_services_and_the_rules(deployment: Deployment) -> None:
    url = f"http://127.0.0.1:{deployment.prometheus_port}/api/v1"

    def ask(path: str) -> Any:
        return httpx.get(url + path, timeout=10, trust_env=False).json()["data"]

    def targets() -> dict[str, str]:
        return {target["labels"]["instance"]: target["health"] for target in ask("/targets")["activeTargets"]}

    expected = {"prefill:30000": "up", "decode:30000": "up", "router:8000": "up"}

    def are_up() -> bool:
        try:
            return targets() == expected
        except httpx.TransportError:
            return False

    wait_until(are_up, "all targets are up", HEALTHY_TIMEOUT_SECS)
    assert any(group["rules"] for group in ask("/rules")["groups"])
    assert deployment.complete(1).is_success
    query = "/query?query=sum(hisparse_pd:generation_tokens_total)"
    wait_until(lambda: bool(ask(query)["result"]), "a metric of the nodes", HEALTHY_TIMEOUT_SECS)


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
            HEALTHY_TIMEOUT_SECS,
        )
        deployment.wait_healthy(service, "router")
        load.wait_answered(6)
    assert set(load.texts) == {expected}
    for error in load.errors:
        is_clear = error.startswith(("502 ", "503 ", "504 "))
        assert is_clear or service == "router", f"a client was told {error}"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_is_stopped_finishes_its_requests(deployment: Deployment, service: str) -> None:
    body = {"model": "retrieval", "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    stopping = threading.Thread(target=deployment.compose, args=("stop", service))
    with httpx.stream(
        "POST",
        deployment.url + "/v1/completions",
        json={**body, "stream": True},
        headers=deployment.headers,
        timeout=120,
        trust_env=False,
    ) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert answer.status_code == 200
        first = next(lines)
        stopping.start()
        refused = _first_refusal(deployment)
        rest = list(lines)
    stopping.join()
    assert refused is None or refused in (502, 503)
    assert "error" not in json.loads(first.removeprefix("data: "))
    assert rest[-1] == "data: [DONE]"
    assert deployment.state(service)["ExitCode"] == 0
    assert not deployment.state(service)["OOMKilled"]
    deployment.compose("start", service)
    deployment.wait_healthy(service, "router")
    wait_until(deployment.is_serving, "requests are answered again", HEALTHY_TIMEOUT_SECS)


def _first_refusal(deployment: Deployment) -> int | None:
    """The status that new requests get once the service drains; None when it does not listen any more."""
    while True:
        try:
            answer = deployment.complete(1)
        except httpx.TransportError:
            return None
        if not answer.is_success:
            return answer.status_code
