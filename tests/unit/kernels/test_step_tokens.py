"""The tokens at both ends of a step: against plain loops, in torch and by Triton's interpreter."""

from __future__ import annotations

from tests.unit.kernels.drawn_tokens import Functions, check
from tests.unit.kernels.triton_here import compiled_for_hopper, interpreted, needs_triton

VOCAB_SIZES = [1, 33, 100]


def test_tokens_in_torch() -> None:
    check(Functions(), VOCAB_SIZES)


def interpret_cases() -> None:
    from hisparse_pd.kernels import triton_step_tokens as kernels

    kernels.CHUNK = 32  # a row has several chunks, the last in part
    kernels.BLOCK = 4
    check(Functions(kernels.newest_tokens, kernels.likeliest_tokens, kernels.plain_results), VOCAB_SIZES)


@needs_triton
def test_interpreted_kernels() -> None:
    interpreted(interpret_cases)


@needs_triton
def test_kernels_compile() -> None:
    from hisparse_pd.kernels import triton_step_tokens as kernels

    pointers = dict.fromkeys(("given", "own", "req_rows", "out"), "*i64")
    compiled_for_hopper(kernels.newest_kernel, pointers, {"BLOCK": 128}, [])
    pointers = {"logits": "*fp32", "best": "*fp32", "best_tokens": "*i32"}
    compiled_for_hopper(kernels.best_of_chunk_kernel, pointers, {"CHUNK": 4096, "OVERLAPS": True}, [])
    pointers |= dict.fromkeys(("known", "out", "req_rows", "counters", "newest"), "*i64")
    pointers |= {"num_real": "*i32", "error_flags": "*i32"}
    for num_counters in (0, 3):
        constants = {"NUM_COUNTERS": num_counters, "HAS_TABLES": num_counters > 0}
        constants |= {"BLOCK_CHUNKS": 32, "OVERLAPS": True}
        compiled_for_hopper(kernels.choose_kernel, pointers, constants, [], num_warps=1)
