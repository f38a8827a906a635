"""Roundings of the indexer and of activations cost what their designs promise."""

from __future__ import annotations

from tools.bench.rounding import activation_error, head_weight_error, index_key_error

FEW = {"num_positions": 4096, "num_queries": 4, "top_k": 512}


def test_rotated_keys_keep_their_scores_in_fp8() -> None:
    (plain, plain_overlap), (rotated, rotated_overlap) = (
        index_key_error(rotates, **FEW) for rotates in (False, True)
    )
    assert rotated < 0.02 < 0.04 < plain
    assert plain_overlap < rotated_overlap < 1


def test_head_weights_in_bfloat16_select_otherwise() -> None:
    error, overlap = head_weight_error(**FEW)
    assert 1e-3 < error < 1e-2
    assert overlap < 1


def test_activations_are_as_exact_with_scales_of_powers_of_two() -> None:
    errors = [activation_error(ue8m0, num_tokens=16, num_rows=64) for ue8m0 in (False, True)]
    assert all(0.02 < error < 0.03 for error in errors)
