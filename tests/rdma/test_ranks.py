"""Nodes of several ranks, with idle keys in main memory and the cluster's store: what goes from machine to
machine goes by verbs, and the tokens are those of a pair on this machine that keeps nothing.

The start of the nodes takes longest, so all tests use the same ones, each from empty caches. Requests go to
the decode node as a router sends them, with rooms that choose the prefill node's rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.harness import deployment, output_ids
from tests.rdma.machines import DEVICE, Machine
from tests.rdma.pair import (
    BOOTSTRAP_PORT,
    HOT_BUFFER,
    Service,
    by_rank,
    generate,
    num_cached,
    running_node,
    token_bytes,
)
from tests.rdma.patterns import MAX_PAYLOAD_BYTES
from tests.rdma.store import running_lender, running_master, store_address
from tools.bench.documents import RETRIEVAL_MODEL
from tools.bench.retrieval import retrievals

NUM_CONVERSATIONS = 4
DENSE = 3
"""The conversation whose requests are dense; those of the others are hisparse."""
NUM_TURNS = 3
NUM_NEW_TOKENS = 4
SAID = [40 + position * position % 80 for position in range(20)]
"""Tokens that each further turn adds."""
PAGE_SIZE = 16
INDEX_TOKENS = 416
"""Tokens that have indexer keys on a decode rank's device: those of one conversation, not of two."""
NUM_RANKS = 2
RANKS = ("--dp-size", f"{NUM_RANKS}")
COMMON = ("--page-size", f"{PAGE_SIZE}", "--transfer-protocol", "rdma", "--ib-device", DEVICE)

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(7200), pytest.mark.I5]

Answer = dict[str, Any]


@dataclass
class Conversation:
    """``prompts``, ``answers``: the tokens of each turn. The pair on this machine made the answers."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def num_held(self, turn: int) -> int:
        """Return how many tokens of a turn's prompt the decode node holds after the turn before."""
        # The last token of an answer has no KV, because it was never a step's input.
        num_known = len(self.prompts[turn - 1]) + len(self.answers[turn - 1]) - 1
        return num_known // PAGE_SIZE * PAGE_SIZE

    @property
    def num_stored(self) -> int:
        """Return how many tokens of the first prompt the store can save: all but the last one, which is the
        decode node's, and another one that is always computed."""
        return (len(self.prompts[0]) - 2) // PAGE_SIZE * PAGE_SIZE


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> list[Conversation]:
    nothing_kept = ["--disable-prefix-cache"]
    directory = tmp_path_factory.mktemp("here")
    found = [Conversation() for _ in range(NUM_CONVERSATIONS)]
    with deployment(
        RETRIEVAL_MODEL, directory, prefill_options=nothing_kept, decode_options=nothing_kept
    ) as pair:
        for conversation, retrieval in zip(found, retrievals(220, NUM_CONVERSATIONS), strict=True):
            prompt = list(retrieval.token_ids)
            for _ in range(NUM_TURNS):
                params = {"max_new_tokens": NUM_NEW_TOKENS}
                answer = output_ids(pair.url, input_ids=prompt, hisparse=True, params=params)
                conversation.prompts.append(prompt)
                conversation.answers.append(answer)
                prompt = [*prompt, *answer, *SAID]
    return found


@dataclass
class Nodes:
    """Nodes of several ranks. ``prefill`` is in the first machine, ``decode`` in the second, with the master
    of a store that has no memory yet."""

    machines: tuple[Machine, Machine]
    prefill: Service
    decode: Service
    conversations: list[Conversation]
    num_asked: int = 0
    _rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def flush(self) -> None:
        """Empty all caches. A page that is being written to the store is in use until then."""
        self.prefill.wait_metrics(lambda metrics: not any(by_rank(metrics, "store_queued_pages").values()))
        for node in (self.prefill, self.decode):
            node.flush()

    def served(self) -> dict[int, float]:
        """Return how many requests each rank of the decode node has served."""
        return by_rank(self.decode.wait_counted("requests_total", self.num_asked), "requests_total")

    def ask(self, turn: int, number: int, rank: int) -> Answer:
        """Return the answer to a turn of conversation ``number``, which must be the expected one. ``rank``:
        the rank of the prefill node that computes what is lacking."""
        self.num_asked += 1
        hisparse, conversation = number != DENSE, self.conversations[number]
        answer = generate(
            self.decode.url,
            conversation.prompts[turn],
            NUM_NEW_TOKENS,
            hisparse=hisparse,
            bootstrap_host=self.machines[0].address,
            bootstrap_port=BOOTSTRAP_PORT,
            bootstrap_room=NUM_RANKS * next(self._rounds) + rank,
        )
        assert answer["output_ids"] == conversation.answers[turn], (turn, number, answer["meta_info"])
        assert answer["meta_info"]["hisparse"]["mode"] == ("hisparse" if hisparse else "dense")
        return answer

    @contextmanager
    def by_verbs(self, sender: int, num_bytes: Callable[[], float]) -> Iterator[None]:
        """Check that the context sends enough packets for ``num_bytes`` from machine ``sender``."""
        source, target = self.machines[sender], self.machines[1 - sender]
        before = source.counters()["sent_pkts"], target.counters()["rcvd_pkts"]
        yield
        after = source.counters()["sent_pkts"], target.counters()["rcvd_pkts"]
        num_packets = min(now - then for now, then in zip(after, before, strict=True))
        assert num_packets >= num_bytes() / MAX_PAYLOAD_BYTES > 0


@pytest.fixture(scope="module")
def nodes(machines: tuple[Machine, Machine], conversations: list[Conversation]) -> Iterator[Nodes]:
    first, second = machines
    prefill_options = (
        "--host-cache-tokens",
        "4096",
        "--kv-store",
        store_address(second),
        "--kv-store-gib",
        "0",
    )
    decode_options = ("--idle-keys", "host", "--index-pool-tokens", f"{INDEX_TOKENS}")
    with (
        running_master(second),
        running_node(first, "prefill", *COMMON, *RANKS, *prefill_options) as prefill,
        running_node(second, "decode", *COMMON, *RANKS, *decode_options) as decode,
    ):
        for node in (prefill, decode):
            node.wait_healthy()
        yield Nodes(machines, prefill, decode, conversations)


def test_every_rank_pushes_holds_and_reads_by_verbs(nodes: Nodes) -> None:
    """The conversations of a decode rank exceed its index pool: their keys go down, and come back."""
    numbers = range(NUM_CONVERSATIONS)
    assert len(nodes.conversations[0].prompts[0]) > HOT_BUFFER
    with nodes.by_verbs(0, lambda: num_tokens * token_bytes()), ThreadPoolExecutor(NUM_RANKS) as both:
        first = list(both.map(lambda number: nodes.ask(0, number, number % NUM_RANKS), numbers))
        # Beside another request a turn may come to a rank that does not hold the one before.
        second = [nodes.ask(1, number, number % NUM_RANKS) for number in numbers]
        num_tokens = sum(
            answer["meta_info"]["prompt_tokens"] - 1 - answer["meta_info"]["held_tokens"]
            for answer in (*first, *second)
        )
    assert [answer["meta_info"]["held_tokens"] for answer in first] == [0] * NUM_CONVERSATIONS
    held = [conversation.num_held(1) for conversation in nodes.conversations]
    assert [answer["meta_info"]["held_tokens"] for answer in second] == held

    # What one rank of the prefill node lost and the other one never had.
    nodes.prefill.flush()
    held = [conversation.num_held(2) for conversation in nodes.conversations]
    with nodes.by_verbs(1, lambda: sum(held) * token_bytes()):
        third = [nodes.ask(2, number, 1 - number % NUM_RANKS) for number in numbers]
    assert [answer["meta_info"]["held_tokens"] for answer in third] == held
    assert [num_cached(answer, "decode") for answer in third] == held

    of_prefill = nodes.prefill.wait_counted("held_read_tokens_total", sum(held))
    for name in ("kv_transfer_bytes_total", "held_read_tokens_total"):
        counts = by_rank(of_prefill, name)
        assert (len(counts), min(counts.values()) > 0) == (NUM_RANKS, True), (name, counts)
    assert sum(by_rank(of_prefill, "held_read_failures_total").values()) == 0
    for name in (
        "held_fetched_tokens_total",
        "held_moved_down_tokens_total",
        "held_stored_dense_tokens_total",
    ):
        nodes.decode.wait_counted(name, 1)
    served = nodes.served()
    assert (len(served), min(served.values()) > 0) == (NUM_RANKS, True), served


@pytest.mark.I7
def test_a_rank_finds_in_the_store_what_another_one_wrote_until_its_memory_dies(nodes: Nodes) -> None:
    """The prefill node is of little use afterwards: reads from a dead peer stay open on Soft-RoCE, for more
    than 10 minutes, and Mooncake waits for them busily, which leaves too little of an interpreted machine's
    one CPU for answers within seconds. The loss of a master, which nobody asks by verbs, is tested over TCP.
    """
    numbers = range(NUM_RANKS)
    num_stored = [nodes.conversations[number].num_stored for number in numbers]
    num_bytes = sum(num_stored) * token_bytes()
    put, got = "store_put_tokens_total", "store_got_tokens_total"
    nodes.flush()
    with ExitStack() as until_killed:
        lender = until_killed.enter_context(running_lender(nodes.machines[1]))
        with nodes.by_verbs(0, lambda: 2 * num_bytes):  # to the decode node, and to the store
            computed = [nodes.ask(0, number, number) for number in numbers]
            nodes.prefill.wait_counted(put, sum(num_stored))
        assert [answer["meta_info"]["cached_tokens"] for answer in computed] == [0] * NUM_RANKS

        nodes.flush()
        with nodes.by_verbs(1, lambda: num_bytes):
            found = [nodes.ask(0, number, 1 - number) for number in numbers]
        assert [num_cached(answer, "storage") for answer in found] == num_stored
        counted = nodes.prefill.wait_counted(got, sum(num_stored))
        assert min(by_rank(counted, put).values()) > 0
        assert min(by_rank(counted, got).values()) > 0
        assert sum(by_rank(counted, "kv_rows_corrupt_total").values()) == 0

    # The bytes are gone, and the master does not know.
    assert not lender.is_running
    nodes.flush()
    without_lender = nodes.ask(0, 0, 1)
    assert num_cached(without_lender, "storage") == 0
