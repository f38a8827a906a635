"""Streams whose decode node is lost go on at the other one, and say what they would have said (I5).

Losses are connections that are cut after some lines of the journal, and nodes that are killed, stopped or
told to leave. Steps verify drafts, so that a line may have several tokens.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse_pd.router.nodes import NodeKind
from tests.integration.cutting_proxy import CuttingProxy
from tests.integration.harness import (
    DEVICE,
    REQUEST_TIMEOUT_SECS,
    Deployment,
    Service,
    at_once,
    decode_service,
    deployment,
    engine_pids,
    prefill_service,
    router_service,
    running,
    wait_until,
)
from tests.stream_events import said_in
from tests.waiting import WAIT_SECS

pytestmark = pytest.mark.I5

Json = dict[str, Any]
LINES_BETWEEN_CUTS = 10
"""Enough lines that no stream is cut four times, after which the router would give it up."""
NUM_ROUNDS = 4
"""On a busy machine several tokens come in a line, and a short answer may be over before it is cut."""
ROUTER = ["--health-interval-secs", "0.5"]
HEARTBEATS = ("--heartbeat-interval-secs", "2")
TEXT = "Once upon a time a node went away. " * 5
NUM_NEW = 30
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 6, "maxLength": 9}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FREE = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "ignore_eos": True}
PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.3}
PENALIZED = SAMPLED | PENALTIES | {"repetition_penalty": 1.2}
REASONING = {"chat_template_kwargs": {"thinking": True}, "min_tokens": NUM_NEW - 5, "ignore_eos": False}
USAGE = {"stream_options": {"include_usage": True}}

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
Case = tuple[str, Json]


def completions(**fields: Any) -> Case:
    return COMPLETIONS, {"prompt": TEXT, "max_tokens": NUM_NEW, **fields}


def chat(**fields: Any) -> Case:
    return CHAT, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": NUM_NEW, **fields}


def generate(params: Json, **fields: Any) -> Case:
    return GENERATE, {"text": TEXT, "sampling_params": {"max_new_tokens": NUM_NEW, **params}, **fields}


def responses(**fields: Any) -> Case:
    return RESPONSES, {"input": TEXT, "max_output_tokens": NUM_NEW, **fields}


def messages(**fields: Any) -> Case:
    return MESSAGES, chat(**fields)[1]


CASES: dict[str, Case] = {
    "completions-sampled-n2": completions(max_tokens=20, n=2, **SAMPLED, **USAGE),
    "completions-echo-n4": completions(
        max_tokens=4, n=4, echo=True, logprobs=0, prompt_logprobs=20, **SAMPLED
    ),
    "completions-schema": completions(max_tokens=30, json_schema=SCHEMA, hisparse=False, temperature=0),
    "chat-hisparse": chat(hisparse=True, **FREE, **USAGE),
    "chat-auto-n2": chat(max_tokens=20, n=2, hisparse="auto", logprobs=True, **PENALIZED),
    "generate-logprobs": generate(
        {"temperature": 0.7, "sampling_seed": 9},
        return_logprob=True,
        logprob_start_len=3,
        top_logprobs_num=2,
    ),
    "generate-regex-list": generate({"regex": "([ab]{3}-){4}", "temperature": 0}, text=["one", TEXT]),
    "responses-penalized-reasoning": responses(**PENALIZED | REASONING),
    "messages-forced-tool": messages(
        max_tokens=180,
        tools=[{"name": "look", "input_schema": SCHEMA}],
        tool_choice={"type": "any"},
        temperature=0.8,
        seed=6,
    ),
}
"""Cases that differ in what the nodes compute; tests/unit/api/test_journal.py has what fronts do at a cut."""
SAMPLE = ("chat-auto-n2", "generate-regex-list", "responses-penalized-reasoning")
"""Cases of the default run: samples with penalties and logprobs, a grammar, and reasoning."""


class Stream:
    """A streamed answer of ``path`` that is read piece by piece."""

    def __init__(self, path: str, answer: httpx.Response) -> None:
        self.answer = answer
        self._path = path
        self._pieces = answer.iter_text()
        self._text = ""

    def read(self, num_events: int) -> None:
        """Read until so many more events have come."""
        target = self._text.count("data: ") + num_events
        while self._text.count("data: ") < target:
            self._text += next(self._pieces)
        assert "[DONE]" not in self._text, "the stream is over"

    def said(self) -> Any:
        """Read to the end; return what the stream says."""
        self._text += "".join(self._pieces)
        return said_in(self._path, self._text)


@contextlib.contextmanager
def reading(url: str, path: str, body: Json, name: str = "") -> Iterator[Stream]:
    body, headers = {**body, "stream": True}, {"x-request-id": name} if name else {}
    with httpx.stream(
        "POST", f"{url}{path}", json=body, headers=headers, timeout=REQUEST_TIMEOUT_SECS
    ) as answer:
        assert answer.status_code == 200, answer.read()
        yield Stream(path, answer)


@dataclass
class Cut:
    model: Path
    nodes: Deployment
    proxies: list[CuttingProxy]

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Cut each connection to a decode node after LINES_BETWEEN_CUTS lines."""
        for proxy in self.proxies:
            proxy.cut_after = LINES_BETWEEN_CUTS
        try:
            yield
        finally:
            for proxy in self.proxies:
                proxy.cut_after = None

    @property
    def cut_ids(self) -> set[str]:
        return set().union(*(proxy.cut_ids for proxy in self.proxies))

    def said(self, path: str, body: Json, name: str = "") -> Any:
        with reading(self.nodes.url, path, body, name) as stream:
            return stream.said()

    @functools.cached_property
    def undisturbed(self) -> tuple[list[Any], list[int]]:
        """What the streams and whole answers of ``lose`` say when no node is lost."""
        with ThreadPoolExecutor(1) as beside:
            whole = beside.submit(httpx.post, f"{self.nodes.url}/generate", json=WHOLE, timeout=60)
            streams = at_once(lambda case: self.said(*case), LONG, len(LONG))
        return streams, whole.result().json()["output_ids"]

    def node_of(self, stream: Stream) -> tuple[Service, Service]:
        """Return the decode node at which a stream began, and the other one."""
        urls = [proxy.url for proxy in self.proxies]
        here = urls.index(stream.answer.headers[NodeKind.DECODE.header])
        return self.nodes.decode[here], self.nodes.decode[1 - here]

    def num_resumes(self, reason: str) -> float:
        return self.nodes.router.metrics().get(f'hisparse_pd:router_resumes_total{{reason="{reason}"}}', 0.0)

    def start_again(self, *nodes: Service) -> None:
        """Start nodes, and wait until the router finds all nodes healthy."""
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_healthy()
        wait_until(self.is_whole, "the router finds all nodes healthy")

    def is_whole(self) -> bool:
        told = httpx.get(f"{self.nodes.url}/health", timeout=WAIT_SECS).json()["nodes"]
        return all(node["healthy"] for node in told)


@pytest.fixture(scope="module")
def cut(
    drafting_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cut]:
    """Two decode nodes, each behind a proxy, and a prefill node."""
    directory = tmp_path_factory.mktemp("resume")
    checkpoint = shutil.copytree(drafting_checkpoint("v32"), directory / "model")
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)  # its chats may then have tools
    prefill = prefill_service(checkpoint, directory, "prefill")
    options = ["--device-buffer-size", "200", "--speculative-num-steps", "3"]
    decode = [decode_service(checkpoint, directory, f"decode-{number}", options) for number in range(2)]
    with running([prefill, *decode]), contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(CuttingProxy(node.url).running()) for node in decode]
        router = router_service([prefill], proxies, directory, ROUTER)
        with running([router]):
            yield Cut(checkpoint, Deployment([prefill], decode, router), proxies)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [SAMPLE, pytest.param(tuple(CASES), marks=pytest.mark.slow)])
def test_streams_that_are_cut_say_what_they_would_have_said(cut: Cut, names: tuple[str, ...]) -> None:
    """Streams run at once, so that they share steps."""

    def said(name: str) -> Any:
        return cut.said(*CASES[name], name)

    undisturbed = dict(zip(names, at_once(said, names, len(names)), strict=True))
    uncut = [*names]
    for _ in range(NUM_ROUNDS):
        with cut.cutting():
            found = at_once(said, uncut, len(uncut))
        for name, other in zip(uncut, found, strict=True):
            one = undisturbed[name]
            assert other == (one if DEVICE == "cpu" else nearly(one)), name
        uncut = [name for name in names if name not in cut.cut_ids]
        if not uncut:
            break
    assert not uncut


def nearly(said: Any) -> Any:
    """Return ``said`` with floats up to rounding: on a GPU, forwards of a prompt round unlike steps."""
    if isinstance(said, dict):
        return {key: nearly(value) for key, value in said.items()}
    if isinstance(said, list):
        return [nearly(value) for value in said]
    return pytest.approx(said, abs=1e-3) if isinstance(said, float) else said


@pytest.mark.slow
def test_prompts_may_be_held_or_not(cut: Cut) -> None:
    """A cut stream's prompt may be held at either node, or not; those of other tests mostly are."""
    path, body = completions(**FREE, **USAGE)

    def num_held() -> float:
        return sum(node.metrics()["hisparse_pd:held_hits_total"] for node in cut.nodes.decode)

    undisturbed = cut.said(path, body)
    cut.nodes.flush_prefix_caches()
    before = num_held()
    with cut.cutting():
        assert cut.said(path, body) == undisturbed
        assert cut.said(path, body) == undisturbed
    wait_until(lambda: num_held() > before, "a held prompt is counted")


def test_journals_are_given_back(cut: Cut) -> None:
    router = cut.nodes.router
    wait_until(lambda: router.metrics()["hisparse_pd:router_journal_bytes"] == 0, "no journal is kept")
    samples = router.metrics()
    assert samples["hisparse_pd:router_dropped_journals_total"] == 0
    assert samples['hisparse_pd:router_resumes_total{reason="lost"}'] >= len(SAMPLE)


LONG: list[Case] = [
    completions(**PENALIZED | {"max_tokens": 45}),
    chat(hisparse=False, **SAMPLED | {"max_tokens": 45}),
    generate(FREE | {"max_new_tokens": 45}),
    responses(**SAMPLED | {"max_output_tokens": 45}),
    messages(**FREE | {"max_tokens": 45}),
]
"""Streams that are read while a node is lost."""
_, WHOLE = generate(FREE | {"max_new_tokens": 40})


def lose(cut: Cut, node: Service, action: Callable[[], None]) -> None:
    """Check streams and whole answers on both nodes while ``action`` happens to one of them."""
    undisturbed, expected = cut.undisturbed
    found: list[Any] = []
    answers: list[httpx.Response] = []

    def read_streams() -> None:
        found.extend(at_once(lambda case: cut.said(*case), LONG, len(LONG)))

    def ask_whole() -> None:
        answers.append(httpx.post(f"{cut.nodes.url}/generate", json=WHOLE, timeout=120))

    threads = [threading.Thread(target=target) for target in (read_streams, ask_whole, ask_whole)]
    for thread in threads:
        thread.start()
    wait_until(lambda: node.metrics()["hisparse_pd:num_running_reqs"] >= 3, "requests at the node")
    action()
    for thread in threads:
        thread.join()
    assert found == undisturbed
    assert [answer.json()["output_ids"] for answer in answers] == [expected] * 2


_, ENDLESS = completions(**PENALIZED | {"max_tokens": 7000})
"""A request that takes longer than anything that a test does meanwhile."""


@pytest.mark.slow
def test_a_node_that_is_told_to_leave_does_not_wait_for_its_streams(cut: Cut) -> None:
    with reading(cut.nodes.url, COMPLETIONS, ENDLESS) as stream:
        stream.read(1)
        node, other = cut.node_of(stream)

        def leave() -> None:
            httpx.post(f"{node.url}/drain", timeout=WAIT_SECS).raise_for_status()
            assert node.exit_status() == 0

        before = cut.num_resumes("moved")
        lose(cut, node, leave)
        assert cut.num_resumes("moved") > before
        wait_until(
            lambda: other.metrics()["hisparse_pd:num_running_reqs"] == 1, "the endless stream alone goes on"
        )
    cut.start_again(node)


@pytest.mark.slow
def test_a_prefill_node_and_a_decode_node_that_are_killed_at_once(cut: Cut, tmp_path: Path) -> None:
    """Another node of each kind is there."""
    nodes = cut.nodes
    prefill = prefill_service(cut.model, tmp_path, "prefill-1")
    decode = nodes.decode[0]
    router = router_service([prefill, *nodes.prefill], cut.proxies, tmp_path, ROUTER)
    with running([prefill, router]):

        def kill_both() -> None:
            prefill.signal_group(signal.SIGKILL)
            decode.kill()

        lose(
            replace(cut, nodes=Deployment([prefill, *nodes.prefill], nodes.decode, router)), decode, kill_both
        )
    cut.start_again(decode)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loss_of_a_rank_is_the_loss_of_its_node(
    drafting_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Requests of all its ranks go on at the other node, as when a node of several ranks leaves."""
    checkpoint = drafting_checkpoint("v32")
    with deployment(
        checkpoint,
        tmp_path,
        num_decode=2,
        prefill_options=HEARTBEATS,
        decode_options=["--dp-size", "2", "--device-buffer-size", "200", *HEARTBEATS],
        router_options=ROUTER,
    ) as nodes:
        ranked = Cut(checkpoint, nodes, [])
        node = nodes.decode[0]

        def halt_a_rank() -> None:
            os.kill(engine_pids(node)[0], signal.SIGSTOP)
            assert node.exit_status() == 1

        def leave() -> None:
            httpx.post(f"{node.url}/drain", timeout=WAIT_SECS).raise_for_status()
            assert node.exit_status() == 0

        for action, reason in ((halt_a_rank, "lost"), (leave, "moved")):
            before = ranked.num_resumes(reason)
            lose(ranked, node, action)
            assert ranked.num_resumes(reason) >= before + 2, (
                "what both ranks had, but for what ended just before"
            )
            ranked.start_again(node)


@pytest.mark.slow
def test_a_node_that_is_killed(cut: Cut) -> None:
    """The last test, because the node stays away."""
    node, other = cut.nodes.decode
    lose(cut, node, node.kill)
    assert other.is_healthy()
