"""Options that change what crosses the wire: keys, lists of peers, KV dtype, hisparse policy, balancer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse_pd.protocol import bootstrap
from hisparse_pd.protocol.bootstrap import BootstrapLookupError
from hisparse_pd.protocol.channels import ControlClient, ControlKeys
from hisparse_pd.protocol.messages import Heartbeat
from hisparse_pd.protocol.polling import Poller
from tests.integration.harness import decode_service, deployment, generate_body, generated
from tests.waiting import WAIT_SECS

PROMPT = "Bytes are compared, not believed. " * 12


@pytest.mark.slow
def test_encrypted_control_bfloat16_kv_and_policies(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    key_path = tmp_path / "control.key"
    key_path.write_bytes(ControlKeys.generate().secret)
    client_keys, node_keys = tmp_path / "client.keys", tmp_path / "node.keys"
    client_keys.write_text("# the only client\nthe-key-of-a-client\n")
    node_keys.write_text("the-key-of-the-nodes\n")
    common = ["--control-key-file", str(key_path), "--kv-cache-dtype", "bfloat16"]
    common += ["--api-key-file", str(node_keys), "--allowed-peers", "127.0.0.1"]
    headers = {"authorization": "Bearer the-key-of-a-client"}
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        num_decode=2,
        prefill_options=common,
        decode_options=[*common, "--device-buffer-size", "128", "--hisparse", "always"],
        router_options=[
            *("--policy", "least_loaded"),
            *("--api-key-file", str(client_keys), "--node-api-key-file", str(node_keys)),
        ],
    ) as nodes:

        def generate(**flag: Any) -> dict[str, Any]:
            body = generate_body(text=PROMPT, params={"max_new_tokens": 24}, **flag)
            answer = httpx.post(f"{nodes.url}/generate", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            decoded = answer.json()
            assert isinstance(decoded, dict)
            return decoded

        unflagged, dense = generate(), generate(hisparse=False)
        assert unflagged["meta_info"]["hisparse"]["mode"] == "hisparse"  # the node's policy
        assert unflagged["meta_info"]["hisparse"]["misses"] > 0
        assert dense["meta_info"]["hisparse"]["mode"] == "dense"
        assert unflagged["output_ids"] == dense["output_ids"]

        for url in (nodes.url, nodes.prefill[0].url, nodes.decode[0].url):
            assert httpx.get(url + "/v1/models", timeout=WAIT_SECS).status_code == 401
        models = httpx.get(nodes.url + "/v1/models", headers=headers, timeout=WAIT_SECS).json()["data"]
        assert len(models) == 1

        port = nodes.prefill[0].bootstrap_port
        with pytest.raises(BootstrapLookupError, match="--control-key-file"):
            bootstrap.look_up("127.0.0.1", port)
        info = bootstrap.look_up("127.0.0.1", port, ControlKeys.load(key_path))
        assert info.curve
        stranger = ControlClient(info.control_endpoint("127.0.0.1"))
        try:
            stranger.send(Heartbeat(1))
            poller = Poller()
            poller.register(stranger)
            assert not poller.wait(1.0), "the control socket answered a peer without the key"
        finally:
            stranger.close()
        assert generate()["output_ids"] == dense["output_ids"]


@pytest.mark.slow
def test_fp8_items_give_the_same_tokens_in_both_modes(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Both nodes have items and indexer keys in fp8; the decode node's steps then overlap, on the CPU too."""
    common = ["--kv-cache-dtype", "fp8_e4m3"]
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        prefill_options=common,
        decode_options=[*common, "--device-buffer-size", "128", "--stream-interval", "5"],
    ) as nodes:
        hisparse, dense = (
            generated(nodes.url, text=PROMPT, params={"max_new_tokens": 24}, hisparse=flag)
            for flag in (True, False)
        )
        assert hisparse["meta_info"]["hisparse"]["mode"] == "hisparse"
        assert hisparse["meta_info"]["hisparse"]["misses"] > 0
        assert dense["meta_info"]["hisparse"]["mode"] == "dense"
        assert hisparse["output_ids"] == dense["output_ids"]
        assert len(set(hisparse["output_ids"])) > 4


def test_what_cannot_work_is_one_line_and_no_traceback(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    node = decode_service(tiny_checkpoint("v32"), tmp_path, "decode", ["--device-buffer-size", "10"])
    node.start()
    assert node.exit_status() == 1
    log = node.log_tail()
    assert "cannot start: --device-buffer-size 10: " in log
    assert "Traceback" not in log
