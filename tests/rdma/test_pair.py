"""The pair across two machines gives the same tokens over RDMA as over TCP, and all KV goes by verbs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.rdma.conftest import without_device
from tests.rdma.machines import DEVICE, Machine
from tests.rdma.pair import (
    HOT_BUFFER,
    Service,
    num_cached,
    running_node,
    running_pair,
    start_node,
    token_bytes,
)
from tests.rdma.patterns import MAX_PAYLOAD_BYTES
from tools.bench.retrieval import retrievals

PROMPTS = [retrieval.token_ids for length in (140, 400) for retrieval in retrievals(length, 1)]
"""Prompts of which one fits its hot buffer and one does not."""
NUM_NEW_TOKENS = 16
TURN = [40 + position * position % 80 for position in range(20)]
"""Tokens that each further turn of a conversation adds."""
PAGE_SIZE = 64
"""Page size of both nodes, their default."""
NO_HELD = ("--disable-prefix-cache",)
RDMA = ("--transfer-protocol", "rdma", "--ib-device", DEVICE)
TCP = ("--transfer-protocol", "tcp")

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(7200)]


@dataclass
class Run:
    """What one pair did. ``answers``: by prompt and flag.

    ``turns``: answers to the next turns, each of a conversation whose last request had the same flag.
    ``later_turns``: the same after these, when the prefill node has lost its prefixes.
    ``sent_packets``, ``received_packets``: packets to the decode node, counted by the RDMA devices.
    ``read_packets``: the packets that came back from it in the later turns, by both counts.
    """

    answers: dict[tuple[int, bool], dict[str, Any]]
    turns: dict[tuple[int, bool], dict[str, Any]]
    later_turns: dict[tuple[int, bool], dict[str, Any]]
    sent_packets: int
    received_packets: int
    read_packets: tuple[int, int]
    infos: list[dict[str, Any]]
    metrics: list[dict[str, float]]

    @property
    def tokens(self) -> dict[tuple[int, bool], list[int]]:
        return {which: answer["output_ids"] for which, answer in self.answers.items()}

    @property
    def num_held(self) -> int:
        return sum(answer["meta_info"]["held_tokens"] for answer in self.all_answers)

    @property
    def num_read(self) -> int:
        return sum(num_read(answer) for answer in self.all_answers)

    @property
    def all_answers(self) -> list[dict[str, Any]]:
        return [*self.answers.values(), *self.turns.values(), *self.later_turns.values()]


def run_pair(machines: tuple[Machine, Machine], *options: str, decode_options: Sequence[str] = ()) -> Run:
    first, second = machines

    def packets(source: Machine, target: Machine) -> tuple[int, int]:
        return source.counters()["sent_pkts"], target.counters()["rcvd_pkts"]

    def since(before: tuple[int, int], now: tuple[int, int]) -> tuple[int, int]:
        return now[0] - before[0], now[1] - before[1]

    before = packets(first, second)
    with running_pair(machines, *options, decode_options=decode_options) as pair:
        answers, turns, later_turns = {}, {}, {}
        so_far = {}
        for number, prompt in enumerate(PROMPTS):
            last = bool(number % 2)
            for hisparse in (not last, last):
                answers[number, hisparse] = pair.generate(prompt, NUM_NEW_TOKENS, hisparse)
            which = number, last
            said = [*prompt, *answers[which]["output_ids"], *TURN]
            turns[which] = pair.generate(said, NUM_NEW_TOKENS, last)
            so_far[which] = [*said, *turns[which]["output_ids"]]
        pair.prefill.flush()
        before_reads = packets(second, first)
        for which, tokens in so_far.items():
            later_turns[which] = pair.generate([*tokens, *TURN], NUM_NEW_TOKENS, which[1])
        read = since(before_reads, packets(second, first))
        sent, received = since(before, packets(first, second))
        run = Run(answers, turns, later_turns, sent, received, read, infos=[], metrics=[])
        num_tokens = sum(answer["meta_info"]["prompt_tokens"] for answer in run.all_answers)
        of_decode = pair.decode.wait_counted("prompt_tokens_total", num_tokens)
        of_prefill = pair.prefill.wait_counted("held_read_tokens_total", run.num_read)
        run.infos += [node.server_info() for node in (pair.prefill, pair.decode)]
        run.metrics += [of_prefill, of_decode]
    return run


@pytest.fixture(scope="module")
def over_rdma(machines: tuple[Machine, Machine]) -> Run:
    return run_pair(machines, *RDMA)


@pytest.fixture(scope="module")
def over_tcp(machines: tuple[Machine, Machine]) -> Run:
    """A run over TCP between the same machines, RDMA devices included. No prefix is held: all KV is sent."""
    return run_pair(machines, *TCP, decode_options=NO_HELD)


def test_requests_are_answered_in_both_modes(over_rdma: Run) -> None:
    for (number, hisparse), answer in over_rdma.answers.items():
        assert len(answer["output_ids"]) == NUM_NEW_TOKENS
        usage = answer["meta_info"]["hisparse"]
        assert usage["mode"] == ("hisparse" if hisparse else "dense")
        if hisparse:
            assert (usage["misses"] > 0) == (len(PROMPTS[number]) + NUM_NEW_TOKENS > HOT_BUFFER)
    for number in range(len(PROMPTS)):
        assert over_rdma.tokens[number, True] == over_rdma.tokens[number, False]


def test_verbs_carried_it(over_rdma: Run) -> None:
    num_bytes = sum(
        value
        for name, value in over_rdma.metrics[0].items()
        if name.startswith("hisparse_pd:kv_transfer_bytes_total")
    )
    assert num_bytes > 0
    assert min(over_rdma.sent_packets, over_rdma.received_packets) >= num_bytes / MAX_PAYLOAD_BYTES


def test_the_nodes_show_what_they_run_on(over_rdma: Run) -> None:
    check_shown(over_rdma.infos, over_rdma.metrics)


def check_shown(infos: list[dict[str, Any]], metrics: list[dict[str, float]]) -> None:
    reason = f"RDMA devices usable: {DEVICE}"
    for info in infos:
        assert (info["transfer_protocol"], info["transfer_devices"]) == ("rdma", [DEVICE])
        assert info["transfer_reason"] == reason
    for samples in metrics:
        (name,) = [name for name in samples if name.startswith("hisparse_pd:transfer_info{")]
        assert samples[name] == 1
        for label in ('protocol="rdma"', f'devices="{DEVICE}"', f'reason="{reason}"'):
            assert label in name


def test_tokens_are_those_of_tcp(over_rdma: Run, over_tcp: Run) -> None:
    assert over_rdma.tokens == over_tcp.tokens


@pytest.mark.I5
def test_turns_go_on_from_what_is_held_with_the_tokens_of_all_sent(over_rdma: Run, over_tcp: Run) -> None:
    assert {hisparse for _, hisparse in over_rdma.turns} == {True, False}
    for (number, hisparse), turn in over_rdma.turns.items():
        so_far = len(PROMPTS[number]) + NUM_NEW_TOKENS
        assert turn["meta_info"]["held_tokens"] == num_held(turn, so_far)
        usage = turn["meta_info"]["hisparse"]
        assert usage["mode"] == ("hisparse" if hisparse else "dense")
        assert turn["output_ids"] == over_tcp.turns[number, hisparse]["output_ids"]
    assert over_tcp.num_held == 0
    landed, without = (run.metrics[1]["hisparse_pd:kv_transfer_bytes_total"] for run in (over_rdma, over_tcp))
    assert without - landed == over_rdma.num_held * token_bytes()
    assert over_rdma.metrics[1]["hisparse_pd:held_tokens_total"] == over_rdma.num_held


@pytest.mark.I5
def test_what_the_prefill_node_lost_is_read_by_verbs_with_the_tokens_of_all_computed(
    over_rdma: Run, over_tcp: Run
) -> None:
    assert over_rdma.later_turns.keys() == over_rdma.turns.keys()
    for which, turn in over_rdma.later_turns.items():
        so_far = over_rdma.turns[which]["meta_info"]["prompt_tokens"] + NUM_NEW_TOKENS
        assert num_read(turn) == turn["meta_info"]["cached_tokens"] == num_held(turn, so_far)
        others = over_tcp.later_turns[which]
        assert turn["output_ids"] == others["output_ids"]
        assert others["meta_info"]["cached_tokens"] == 0
    num_later_tokens = sum(num_read(turn) for turn in over_rdma.later_turns.values())
    assert min(over_rdma.read_packets) >= num_later_tokens * token_bytes() / MAX_PAYLOAD_BYTES
    metrics = over_rdma.metrics[0]
    assert metrics["hisparse_pd:held_read_tokens_total"] == over_rdma.num_read
    assert metrics["hisparse_pd:held_read_bytes_total"] == over_rdma.num_read * token_bytes()
    assert metrics["hisparse_pd:held_read_failures_total"] == 0
    assert over_tcp.num_read == 0


def num_held(turn: dict[str, Any], so_far: int) -> int:
    """Return how many tokens of a turn's prompt the decode node holds. ``so_far``: tokens before the turn."""
    assert turn["meta_info"]["prompt_tokens"] == so_far + len(TURN)
    # The last token of an answer has no KV, because it was never a step's input.
    return (so_far - 1) // PAGE_SIZE * PAGE_SIZE


def num_read(answer: dict[str, Any]) -> int:
    """Return how many tokens of a prompt the prefill node read from the decode node."""
    return num_cached(answer, "decode")


def test_tcp_is_tcp_where_there_are_rdma_devices(over_tcp: Run) -> None:
    assert (over_tcp.sent_packets, over_tcp.received_packets) == (0, 0)
    assert {info["transfer_protocol"] for info in over_tcp.infos} == {"tcp"}


def test_nodes_without_the_device_do_not_start(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    with without_device(first), without_device(second):
        nodes = [start_node(first, "prefill", *RDMA), start_node(second, "decode", *RDMA)]
        try:
            for node in nodes:
                assert node.wait() not in (0, None)
                assert "--transfer-protocol rdma: no RDMA device in /sys/class/infiniband" in node.stderr
                assert "or use --transfer-protocol tcp" in node.stderr, "the remedy"
        finally:
            for node in nodes:
                node.close()


@pytest.fixture
def auto_node(machines: tuple[Machine, Machine]) -> Iterator[Service]:
    with running_node(machines[1], "decode", "--transfer-protocol", "auto") as node:
        yield node


def test_auto_takes_the_device_and_says_so(auto_node: Service) -> None:
    auto_node.wait_healthy()
    check_shown([auto_node.server_info()], [auto_node.metrics()])
    assert "KV transport: rdma" in auto_node.command.stderr + auto_node.command.stdout
