"""Nodes of several ranks: the same tokens whichever rank has a request, and what the loss of one does."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.fp8_checkpoints import write_fp8_checkpoint
from tests.int4_checkpoints import FORMS, write_int4_checkpoint
from tests.integration.harness import (
    DEVICE,
    FLAGS,
    Deployment,
    Load,
    Service,
    at_once,
    decode_service,
    deployment,
    engine_pids,
    generate,
    generate_by,
    generated,
    is_empty,
    pool_usage,
    prefill_service,
    running,
    wait_until,
)
from tests.oracle_beside import Oracle
from tests.waiting import WAIT_SECS
from tools.checkpoints.make_tiny import LIKELY_DRAFTS

NUM_NEW_TOKENS = 5
NUM_CONCURRENT = 12
LENGTHS = (1, 36, 38, 64, 129, 200, 257, 300)
"""Lengths of prompts. With others, a drawn prompt may be nearer to a tie than float32 rounds."""
NUM_RANKS = 2 if DEVICE == "cpu" else min(4, max(2, torch.cuda.device_count()))
RANKS = ("--dp-size", str(NUM_RANKS))
PREFILL = (
    "--page-size",
    "16",
    "--chunked-prefill-size",
    "230",
    "--kv-pool-tokens",
    "2048",
    "--host-cache-tokens",
    "8192",
)
DECODE = ("--page-size", "16", "--device-buffer-size", "80", "--device-pool-tokens", "2048")
HEARTBEATS = ("--heartbeat-interval-secs", "2")


ROOMS = itertools.count(1)


def ask(prefill: Service, decode: Service, token_ids: list[int], flag: bool | str) -> list[int]:
    """Return the tokens of a request through these two nodes, as a router sends it."""
    fields = {"input_ids": token_ids, "hisparse": flag, "params": {"max_new_tokens": NUM_NEW_TOKENS}}
    answer = generate_by(prefill, decode, next(ROOMS), **fields)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["output_ids"]
    return found


@pytest.fixture(scope="module")
def checkpoint_of(
    tied_checkpoint: Callable[[str], Path], tiny_checkpoint: Callable[[str], Path]
) -> Callable[[str], Path]:
    """Checkpoints full of equal scores; on a GPU, whose kernels mind their odd sizes, tiny ones."""
    return tied_checkpoint if DEVICE == "cpu" else tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("v32")


def of_ranks(checkpoint: Path, directory: Path) -> AbstractContextManager[Deployment]:
    """Run a prefill node and a decode node of ``NUM_RANKS`` each."""
    return deployment(
        checkpoint,
        directory,
        prefill_options=[*PREFILL, *RANKS],
        decode_options=[*DECODE, *RANKS],
        router_options=["--policy", "cache_aware"],
    )


@pytest.fixture(scope="module")
def nodes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with of_ranks(checkpoint, tmp_path_factory.mktemp("ranks")) as nodes:
        yield nodes


def check_tokens(pairs: Sequence[tuple[Service, Service]], checkpoint: Path) -> None:
    """Check the tokens of each pair of a prefill and a decode node, in all modes at once."""
    drawn = random.Random(11)
    prompts = [[drawn.randint(32, 126) for _ in range(length)] for length in LENGTHS]
    with closing(Oracle(checkpoint, prompts, NUM_NEW_TOKENS)) as oracle:
        expected = oracle.tokens
    jobs = list(itertools.product(range(len(pairs)), range(len(prompts)), FLAGS))
    drawn.shuffle(jobs)

    def answer(job: tuple[int, int, bool | str]) -> list[int]:
        pair, number, flag = job
        return ask(*pairs[pair], prompts[number], flag)

    answers = at_once(answer, jobs, NUM_CONCURRENT)
    wrong = [(job, got) for job, got in zip(jobs, answers, strict=True) if got != expected[job[1]]]
    assert not wrong, f"{len(wrong)} of {len(jobs)} differ; first {wrong[0]}"


def has_served(node: Service, rank: int) -> bool:
    numbers = httpx.get(node.url + "/metrics", timeout=WAIT_SECS).text
    served = re.findall(rf'^hisparse_pd:requests_total{{dp_rank="{rank}",mode=".*"}} (.*)$', numbers, re.M)
    return sum(map(float, served)) > 0


@pytest.mark.I5
@pytest.mark.timeout(600)
def test_tokens_are_the_oracles_on_any_ranks(nodes: Deployment, checkpoint: Path) -> None:
    check_tokens([(nodes.prefill[0], nodes.decode[0])], checkpoint)
    for rank in range(NUM_RANKS):
        wait_until(
            partial(has_served, nodes.decode[0], rank), f"rank {rank} of the decode node served somebody"
        )


def check_other_numbers_of_ranks(nodes: Deployment, checkpoint: Path, directory: Path) -> None:
    prefill = prefill_service(checkpoint, directory, "prefill-of-one", PREFILL)
    decode = decode_service(checkpoint, directory, "decode-of-one", DECODE)
    with running([prefill, decode]):
        check_tokens([(prefill, nodes.decode[0]), (nodes.prefill[0], decode)], checkpoint)


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_are_the_oracles_where_nodes_have_other_numbers_of_ranks(
    nodes: Deployment, checkpoint: Path, tmp_path: Path
) -> None:
    check_other_numbers_of_ranks(nodes, checkpoint, tmp_path)


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_of_another_model_are_the_oracles_on_any_ranks(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("mistral")
    with of_ranks(checkpoint, tmp_path) as nodes:
        check_tokens([(nodes.prefill[0], nodes.decode[0])], checkpoint)
        check_other_numbers_of_ranks(nodes, checkpoint, tmp_path)


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_take_part_in_each_others_drafts(
    sharing_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Seven drafts share one selection."""
    checkpoint = sharing_checkpoint("glm")
    drafting = ("--speculative-num-steps", "7", "--device-buffer-size", "520")
    with deployment(checkpoint, tmp_path, decode_options=[*RANKS, *drafting]) as pair:
        check_tokens([(pair.prefill[0], pair.decode[0])], checkpoint)
        accepted = "hisparse_pd:accepted_draft_tokens_total"
        wait_until(lambda: pair.decode[0].metrics()[accepted] > 0, "the engines' reports")


@pytest.mark.I5
def test_one_rank_works_while_the_others_have_nothing(nodes: Deployment) -> None:
    """Nothing is left in any rank's pools."""
    token_ids = [32 + number % 90 for number in range(150)]
    alone = [ask(nodes.prefill[0], nodes.decode[0], token_ids, flag) for flag in (True, False)]
    assert alone[0] == alone[1]
    nodes.flush_prefix_caches()
    for node in (*nodes.prefill, *nodes.decode):
        wait_until(partial(is_empty, node), f"{node.name} is empty")


@pytest.mark.timeout(300)
def test_what_a_node_says_of_its_ranks(nodes: Deployment) -> None:
    for node in (*nodes.prefill, *nodes.decode):
        assert httpx.get(node.url + "/server_info", timeout=WAIT_SECS).json()["dp_size"] == NUM_RANKS
        loads = httpx.get(node.url + "/get_load", timeout=WAIT_SECS).json()
        assert [load["dp_rank"] for load in loads] == [*range(NUM_RANKS)]
    bootstrap_url = f"http://127.0.0.1:{nodes.prefill[0].bootstrap_port}/bootstrap"
    info = httpx.get(bootstrap_url, timeout=WAIT_SECS).json()
    ranks = info["ranks"]
    assert len({rank["instance_id"] for rank in ranks}) == NUM_RANKS
    assert len({rank["control_port"] for rank in ranks}) == NUM_RANKS


def test_samples_of_one_prompt_go_to_all_ranks(nodes: Deployment) -> None:
    params = {"max_new_tokens": 4, "n": 2 * NUM_RANKS + 1}
    answer = generate_by(nodes.prefill[0], nodes.decode[0], next(ROOMS), params=params)
    assert answer.status_code == 200, answer.text
    assert len({tuple(sample["output_ids"]) for sample in answer.json()}) == 1


def test_what_a_rank_has_cached_is_found_again(nodes: Deployment) -> None:
    prompts = [f"{number}: " + "all that was said so far, " * 8 for number in range(4)]
    for num_before in range(2):
        for prompt in prompts:
            answer = generated(nodes.url, text=prompt, params={"max_new_tokens": 2})
            num_cached = answer["meta_info"]["cached_tokens"]
            assert (num_cached > 0) is (num_before > 0), (prompt, num_before)


@pytest.mark.slow
def test_an_answer_says_which_tier_had_its_prompt(nodes: Deployment) -> None:
    """The same prompt is computed, then taken from each tier. A room's number chooses the prefill node's
    rank."""
    (prefill,), (decode,) = nodes.prefill, nodes.decode
    nodes.flush_prefix_caches()
    token_ids = [32 + number * number % 91 for number in range(450)]
    others = [[32 + (seed + number * number) % 90 for number in range(450)] for seed in range(1, 6)]

    def tiers(prompt: list[int]) -> dict[str, int]:
        room = NUM_RANKS * (1000 + next(ROOMS))
        params = {"max_new_tokens": 1}
        answer = generate_by(prefill, decode, room, input_ids=prompt, params=params)
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        assert sum(meta["cached_tokens_details"].values()) == meta["cached_tokens"]
        found: dict[str, int] = meta["cached_tokens_details"]
        return found

    def flush_decode_node() -> None:
        httpx.post(decode.url + "/flush_cache", timeout=WAIT_SECS).raise_for_status()

    assert tiers(token_ids) == {"device": 0, "host": 0, "storage": 0, "decode": 0}
    assert tiers(token_ids) == {"device": 0, "host": 0, "storage": 0, "decode": 448}
    flush_decode_node()
    assert tiers(token_ids) == {"device": 448, "host": 0, "storage": 0, "decode": 0}
    for other in others:
        tiers(other)
    flush_decode_node()
    found = tiers(token_ids)
    assert found["host"] > 0, "the others took its pages on the device"
    assert sum(found.values()) == 448
    counter = 'hisparse_pd:cached_tier_tokens_total{tier="host"}'
    wait_until(lambda: decode.metrics()[counter] > 0, "the engine's report")


def test_each_rank_of_a_node_has_its_numbers(nodes: Deployment) -> None:
    def loads() -> list[dict[str, Any]]:
        """Return what both nodes tell; none if one's answer came too late for the router's round."""
        found = httpx.get(f"{nodes.url}/status", timeout=WAIT_SECS).json()["nodes"]
        found = [node["load"] for node in found if not node["load_trouble"]]
        return found if all(len(load["ranks"]) == NUM_RANKS for load in found) and len(found) == 2 else []

    told = wait_until(loads, "every rank's numbers")
    for load, pools in zip(told, [{"kv", "host"}, {"host", "device", "index", "lookup"}], strict=True):
        assert [rank["dp_rank"] for rank in load["ranks"]] == [*range(NUM_RANKS)]
        for rank in load["ranks"]:
            assert rank["numbers"]["pool_total_tokens"].keys() == pools
            assert all(rank["numbers"]["pool_total_tokens"].values())


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.parametrize("key", ["fp8", "compressed beside fp8", "awq", "gptq"])
def test_experts_in_few_bits_are_those_of_the_weights_in_float32(tmp_path: Path, key: str) -> None:
    """Those of an MTP layer, too."""
    most = 3 if DEVICE == "cpu" else torch.cuda.device_count()
    if key == "fp8":
        checkpoint, in_float32 = write_fp8_checkpoint(tmp_path, "v32", LIKELY_DRAFTS)
    else:
        checkpoint, in_float32 = write_int4_checkpoint(tmp_path, "v32", FORMS[key], LIKELY_DRAFTS)
    prompts = [
        [(7 * n * n + length) % 95 + 32 for n in range(length)] for length in (1, 31, 64, 65, 200, 700)
    ]
    with (
        closing(Oracle(in_float32, prompts, 24)) as oracle,
        deployment(
            checkpoint,
            tmp_path,
            prefill_options=["--dp-size", str(min(2, most)), "--chunked-prefill-size", "256"],
            decode_options=[
                *("--dp-size", str(min(3, most)), "--device-buffer-size", "128"),
                *("--speculative-num-steps", "2"),
            ],
        ) as pair,
    ):
        for hisparse in (True, False, "auto"):
            params = {"max_new_tokens": 24}
            samples = generated(pair.url, input_ids=prompts, hisparse=hisparse, params=params)
            assert [sample["output_ids"] for sample in samples] == oracle.tokens


@pytest.mark.I7
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_of_a_rank_ends_the_node_and_its_next_run_serves(checkpoint: Path, tmp_path: Path) -> None:
    """Requests in flight end in an error, within the heartbeats; the peer goes on with the next run."""

    def lose_a_rank(
        pair: Deployment, lost: Service, peer: Service, number: signal.Signals, says: str
    ) -> None:
        with Load(pair.url, num_clients=6, max_new_tokens=200) as load:
            load.wait_for_more(3)
            os.kill(engine_pids(lost)[1], number)
            assert lost.exit_status() == 1, "a supervisor is to start it again"
        statuses = {answer.status_code for answer in load.answers}
        assert 200 in statuses
        assert statuses - {200} <= {502, 503, 504}
        assert statuses - {200}
        assert says in lost.log_tail(20000)
        lost.log_path.write_text("")
        lost.start()
        lost.wait_healthy()
        wait_until(lambda: generate(pair.url, params={"max_new_tokens": 4}).status_code == 200, "an answer")
        pair.flush_prefix_caches()
        wait_until(lambda: pool_usage(pair.decode[0]) == 0, "the decode node's pools are empty")
        assert not peer.has_ended()

    with deployment(
        checkpoint,
        tmp_path,
        prefill_options=[*PREFILL, *RANKS, *HEARTBEATS],
        decode_options=[*DECODE, *RANKS, *HEARTBEATS],
        router_options=["--max-retries", "0"],
    ) as pair:
        (prefill,), (decode,) = pair.prefill, pair.decode
        assert generate(pair.url, params={"max_new_tokens": 4}).status_code == 200
        lose_a_rank(pair, decode, prefill, signal.SIGKILL, "rank 1 exited with status -9")
        lose_a_rank(pair, prefill, decode, signal.SIGSTOP, "has died, or stands still")
