"""A model in fp8 with its experts on several devices: the tokens are those of the same weights in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import httpx
import pytest
import torch

from checkpoints.oracle import Oracle
from tests.fp8_checkpoints import write_fp8_checkpoint
from tests.integration.harness import DEVICE, Deployment, deployment

pytestmark = pytest.mark.slow

NUM_NEW_TOKENS = 24
LENGTHS = (1, 31, 64, 65, 200, 700)


def devices(count: int) -> list[str]:
    """So many, and on GPUs as many different ones as there are."""
    if DEVICE == "cpu":
        return [DEVICE] * count
    return [f"cuda:{number % torch.cuda.device_count()}" for number in range(count)]


@dataclass(frozen=True)
class Subject:
    pair: Deployment
    prompts: list[list[int]]
    oracle: Oracle


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """The nodes spread the experts differently."""
    directory = tmp_path_factory.mktemp("expert-devices")
    in_fp8, in_float32 = write_fp8_checkpoint(directory, "v32")
    prompts = [
        [(7 * place * place + number) % 95 + 32 for place in range(length)]
        for number, length in enumerate(LENGTHS)
    ]
    with (
        closing(Oracle(in_float32, prompts, NUM_NEW_TOKENS)) as oracle,
        deployment(
            in_fp8,
            directory,
            prefill_options=["--expert-devices", *devices(2), "--chunked-prefill-size", "256"],
            decode_options=["--expert-devices", *devices(3), "--device-buffer-size", "128"],
        ) as pair,
    ):
        yield Subject(pair, prompts, oracle)


@pytest.mark.parametrize("hisparse", [True, False])
def test_tokens_are_those_of_the_weights_in_float32(subject: Subject, hisparse: bool) -> None:
    answer = httpx.post(
        subject.pair.url + "/generate",
        json={
            "input_ids": subject.prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True},
            "hisparse": hisparse,
        },
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    assert [sample["output_ids"] for sample in answer.json()] == subject.oracle.tokens
