"""The files that are put over docker-compose.yml: two nodes of each kind, and the public router."""

from __future__ import annotations

import itertools

import pytest

from tests.compose.deployment import BASE, Deployment, wait_until
from tests.compose.images import BUILD_TIMEOUT_SECS

pytestmark = [pytest.mark.compose, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    "files",
    [
        ("docker-compose.yml", "compose.gpu.yml"),
        ("compose.rdma.yml",),
        ("compose.rdma.yml", "compose.gpu.yml"),
        ("docker-compose.yml", "compose.scale.yml", "compose.gpu.yml", "compose.monitoring.yml"),
    ],
    ids="+".join,
)
def test_files_that_need_other_hardware_are_valid(deployment: Deployment, files: tuple[str, ...]) -> None:
    before = deployment.files
    deployment.files = files
    try:
        assert "prefill" in deployment.compose("config")
    finally:
        deployment.files = before


def test_two_nodes_of_each_kind(deployment: Deployment) -> None:
    deployment.files = (*BASE, "compose.scale.yml")
    deployment.configure(PROMETHEUS_TARGETS="./targets")
    nodes = ("prefill", "decode", "prefill-2", "decode-2")
    deployment.up(*nodes, "router", "prometheus")
    used: set[str] = set()
    numbers = itertools.count()

    def all_are_used() -> bool:
        # Each another prompt: what begins alike stays with one prefill node.
        answer = deployment.complete(4, prompt=f"Request {next(numbers)}.", hisparse=True)
        assert answer.status_code == 200, answer.text
        used.update(answer.headers[f"x-hisparse-pd-{kind}"] for kind in ("prefill", "decode"))
        return len(used) == len(nodes)

    wait_until(all_are_used, "every node has had a request")
    expected = {**dict.fromkeys((f"{node}:30000" for node in nodes), "up"), "router:8000": "up"}
    wait_until(lambda: deployment.targets() == expected, "all targets are up")
    num_restarts = deployment.inspect("decode-2")["RestartCount"]
    deployment.crash("decode-2")
    answers = [deployment.complete(4) for _ in range(6)]
    refusals = [answer for answer in answers if answer.status_code != 200]
    assert len(refusals) < len(answers)
    # Once it is back, its front may say 503 while it starts; the router then asks one other pair.
    assert {answer.status_code for answer in refusals} <= {503}, [answer.text for answer in refusals]
    wait_until(
        lambda: deployment.inspect("decode-2")["RestartCount"] > num_restarts, "Docker starts decode-2 again"
    )
    deployment.wait_healthy("decode-2")
    used.clear()
    wait_until(all_are_used, "every node has had a request again")
    deployment.configure(PROMETHEUS_TARGETS="./monitoring/targets")
    deployment.files = BASE
    deployment.compose("up", "-d", "--remove-orphans", "prefill", "decode", "router", "prometheus")
    deployment.wait_healthy("prefill", "decode", "router")


def test_the_public_router_in_place_of_ours(deployment: Deployment) -> None:
    deployment.files = (*BASE, "compose.sglang-router.yml")
    deployment.compose("build", "router", timeout_secs=BUILD_TIMEOUT_SECS)
    deployment.up("prefill", "decode", "router")
    wait_until(deployment.is_serving, "the router has found both nodes")
    for hisparse in (True, False):
        answer = deployment.complete(hisparse=hisparse)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["hisparse"]["mode"] == ("hisparse" if hisparse else "dense")
    body = {"model": "retrieval", "prompt": "a", "max_tokens": 1}
    assert deployment.post("/v1/completions", body, headers={}).status_code == 401
