"""Options that only mean something on a GPU, each run once: nodes start with them, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.integration.harness import DEVICE, deployment, generated
from tests.oracle_beside import Oracle

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="HISPARSE_PD_TEST_DEVICE names no GPU")

NUM_NEW_TOKENS = 24
PROMPTS = [
    [(7 * place * place + number) % 95 + 32 for place in range(length)]
    for number, length in enumerate((1, 31, 65, 200, 500))
]
SMALL_BUFFER = ("--device-buffer-size", "128")


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Oracle]:
    with closing(Oracle(tiny_checkpoint("v32"), PROMPTS, NUM_NEW_TOKENS)) as oracle:
        yield oracle


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
"""Mark of cases with graphs and micro-batches on the second GPU, without CUDA_VISIBLE_DEVICES."""


@pytest.mark.parametrize(
    ("prefill_options", "decode_options"),
    [
        pytest.param(
            ("--attention-backend", "triton"),
            ("--attention-backend", "triton", "--cuda-graph-max-bs", "3", "--micro-batch-min-bs", "2"),
            id="graphs-of-some-sizes",
        ),
        pytest.param(
            ("--attention-backend", "torch"),
            ("--attention-backend", "torch", "--cuda-graph-max-bs", "0", "--micro-batch-min-bs", "0"),
            id="no-graphs",
        ),
        pytest.param(
            ("--page-size", "16"),
            ("--page-size", "16", "--cuda-graph-max-bs", "5", "--max-running-requests", "6"),
            id="small-pages",
        ),
        pytest.param(
            ("--mem-fraction-static", "0.3", "--kv-pool-tokens", "0"),
            ("--mem-fraction-static", "0.6", "--device-pool-tokens", "0", "--index-pool-tokens", "65536"),
            id="pools-from-free-memory",
        ),
        *(
            pytest.param(
                ("--device", f"cuda:{prefill}"),
                ("--device", f"cuda:{decode}", "--micro-batch-min-bs", "2"),
                id=f"gpu-{prefill}-to-gpu-{decode}",
                marks=two_gpus,
            )
            for prefill, decode in ((0, 1), (1, 0), (1, 1))
        ),
    ],
)
def test_tokens_with_options_of_a_gpu(
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    oracle: Oracle,
    prefill_options: tuple[str, ...],
    decode_options: tuple[str, ...],
) -> None:
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        prefill_options=prefill_options,
        decode_options=(*SMALL_BUFFER, *decode_options),
    ) as pair:
        for hisparse in (True, False):
            assert generate(pair.url, PROMPTS, hisparse=hisparse) == oracle.tokens


@pytest.mark.parametrize("index_format", ["fp8_e4m3", "bfloat16", "float32"])
def test_tokens_do_not_depend_on_the_mode_in_fp8(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, index_format: str
) -> None:
    """Requests come one at a time and are computed in full: bfloat16 rounds by the shapes of products."""
    common = ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3", "--indexer-cache-dtype", index_format)
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path,
        prefill_options=(*common, "--disable-prefix-cache"),
        decode_options=(*SMALL_BUFFER, *common),
    ) as pair:
        for prompt in PROMPTS:
            assert generate(pair.url, [prompt], hisparse=True) == generate(pair.url, [prompt], hisparse=False)


def generate(url: str, prompts: list[list[int]], *, hisparse: bool) -> list[list[int]]:
    params = {"max_new_tokens": NUM_NEW_TOKENS}
    samples = generated(url, input_ids=prompts, hisparse=hisparse, params=params)
    return [sample["output_ids"] for sample in samples]
