"""Override files of docker-compose.yml, for other hardware and for the public router."""

from __future__ import annotations

import pytest

from tests.compose.deployment import BASE, Deployment, wait_until
from tests.compose.images import BUILD_TIMEOUT_SECS

pytestmark = [pytest.mark.compose, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    "files",
    [
        ("docker-compose.yml", "compose.gpu.yml"),
        ("docker-compose.yml", "compose.store.yml"),
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
