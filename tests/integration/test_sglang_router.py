"""Both nodes unchanged behind the public ``sglang-router``: the Rust router and ``--mini-lb``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse_pd.base.ports import free_port
from tests.integration.harness import Deployment, Service, openai_client, running, streamed

PROMPT = "Extents, not one integer a token, say where the bytes of a room are to land. " * 4
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module", params=["rust", pytest.param("mini-lb", marks=pytest.mark.slow)])
def router(
    request: pytest.FixtureRequest, pair: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    port = free_port()
    arguments = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)]
    if request.param == "mini-lb":
        arguments.append("--mini-lb")
    else:
        arguments += ["--prometheus-port", str(free_port())]
    for node in pair.prefill:
        arguments += ["--prefill", node.url, str(node.bootstrap_port)]
    for node in pair.decode:
        arguments += ["--decode", node.url]
    log_path: Path = tmp_path_factory.mktemp(request.param) / "router.log"
    service = Service(
        request.param,
        arguments,
        port,
        log_path,
        module="sglang_router.launch_router",
        health_path="/readiness" if request.param == "rust" else "/health",
    )
    with running([service]):
        yield service


def post(router: Service, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(router.url + path, json=body, timeout=60)
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}\n{router.log_tail()}"
    return answer.json()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 8}, ""),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 8}, "metadata"),
        ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 8}}, "custom_labels"),
    ],
)
def test_the_flag_reaches_the_nodes(router: Service, path: str, body: dict[str, Any], field: str) -> None:
    """The flag is a field of the body, or is in a field that the router does not drop."""
    for hisparse, mode in ((True, "hisparse"), (False, "dense")):
        flag = {field: {"hisparse": str(hisparse).lower()}} if field else {"hisparse": hisparse}
        answer = post(router, path, {"model": "tiny", "ignore_eos": True, **body, **flag})
        usage = answer["meta_info"] if path == "/generate" else answer["usage"]
        assert usage["completion_tokens"] > 0
        assert usage["hisparse"]["mode"] == mode


def test_generate_with_input_ids_and_lists(router: Service) -> None:
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    alone = post(router, "/generate", {"input_ids": list(b"one room"), "sampling_params": params})
    both = post(
        router, "/generate", {"input_ids": [list(b"one room"), list(b"two")], "sampling_params": params}
    )
    assert [len(answer["output_ids"]) for answer in both] == [5, 5]
    assert both[0]["output_ids"] == alone["output_ids"]


def test_streams(router: Service) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = post(router, "/v1/completions", body)["choices"][0]["text"]
    chunks = streamed(f"{router.url}/v1/completions", body)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole


def test_a_client_error_reaches_the_client(router: Service) -> None:
    answer = httpx.post(
        f"{router.url}/v1/completions",
        json={"model": "tiny", "prompt": "x" * 9000, "max_tokens": 4},
        timeout=60,
    )
    assert 400 <= answer.status_code < 500, answer.text
    assert "8192" in answer.text


def test_openai_client_with_n(router: Service) -> None:
    with openai_client(router.url) as client:
        chat = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a page"}],
            n=2,
            seed=3,
            temperature=1.0,
            max_tokens=6,
        )
    assert {choice.index for choice in chat.choices} == {0, 1}


@pytest.mark.parametrize("num_new_tokens", [0, 2])
def test_logprobs_of_the_prompt_are_the_decode_nodes(router: Service, num_new_tokens: int) -> None:
    params = {"temperature": 0, "max_new_tokens": num_new_tokens, "ignore_eos": True}
    body = {"input_ids": list(b"one room"), "sampling_params": params}
    answer = post(router, "/generate", {**body, "return_logprob": True, "logprob_start_len": 0})
    shown = answer["meta_info"]["input_token_logprobs"]
    assert [token_id for _, token_id, _ in shown] == list(b"one room")
    assert [logprob is None for logprob, *_ in shown] == [True] + [False] * 7
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == num_new_tokens


def test_an_echo_has_the_logprobs_of_the_prompt(router: Service) -> None:
    body = {"model": "tiny", "prompt": "one room", "max_tokens": 1, "echo": True, "logprobs": 1}
    (choice,) = post(router, "/v1/completions", body)["choices"]
    assert choice["text"].startswith("one room")
    assert choice["logprobs"]["tokens"][:8] == list("one room")
    assert [logprob is None for logprob in choice["logprobs"]["token_logprobs"]] == [True] + [False] * 8
