"""A pair and its router with TLS on all HTTP between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integration.harness import decode_service, prefill_service, router_service, running
from tests.tls_files import make_tls_files, needs_openssl

pytestmark = [needs_openssl, pytest.mark.slow]


def test_a_request_through_https_at_every_step(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    nodes_tls, routers_tls = make_tls_files(tmp_path / "nodes"), make_tls_files(tmp_path / "router")
    checkpoint = tiny_checkpoint("v32")
    options = ["--ssl-certfile", str(nodes_tls.cert), "--ssl-keyfile", str(nodes_tls.key)]
    prefill = prefill_service(checkpoint, tmp_path, "prefill", options)
    decode = decode_service(checkpoint, tmp_path, "decode", options)
    prefill.tls = decode.tls = nodes_tls
    router_options = ["--ssl-certfile", str(routers_tls.cert), "--ssl-keyfile", str(routers_tls.key)]
    router_options += ["--node-ca-file", str(nodes_tls.cert)]
    router = router_service([prefill], [decode], tmp_path, router_options)
    router.tls = routers_tls
    body = {"prompt": "a page", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with (
        running([prefill, decode, router]),
        httpx.Client(base_url=router.url, verify=routers_tls.trusting(), timeout=60) as client,
    ):
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 2
        told = client.get("/server_info").json()
        assert [entry["url"] for entry in told["prefill"] + told["decode"]] == [prefill.url, decode.url]
        assert str(tmp_path) not in str(told)  # the files of a certificate are nobody's business
        for _ in range(8):  # on connections of their own, which both processes take
            with httpx.Client(verify=routers_tls.trusting(), timeout=60) as other:
                again = other.post(f"{router.url}/v1/completions", json=body).json()
                assert again["choices"][0]["text"] == text
