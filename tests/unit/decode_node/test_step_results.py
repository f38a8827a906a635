"""The results that the device joins for a step equal those that the host makes of its rows."""

from __future__ import annotations

import torch

from hisparse_pd.decode_node.step_results import join_verified, num_columns, read_results
from hisparse_pd.kernels.row_errors import HotBufferError

WRONG = int(HotBufferError.WRONG_ROW)
ROW_RESULTS = torch.tensor([[0, 7, 8, 9], [WRONG, 1, 2, 3]])
COUNTERS = [(7, 8, 9), (1, 2, 3)]


def test_a_step_without_drafts_has_a_token_for_each_request() -> None:
    joined = torch.cat((ROW_RESULTS, torch.tensor([[50], [51]])), dim=1)  # as ``plain_results`` returns it
    assert joined.shape == (2, num_columns(1))
    results = read_results(joined.tolist(), 1, [0, 0], None)
    assert [result.token_ids for result in results] == [[50], [51]]
    assert [result.logprobs for result in results] == [[None], [None]]
    assert [result.counters for result in results] == COUNTERS
    assert [(result.error, result.has_wrong_row) for result in results] == [("", False), ("WRONG_ROW", True)]
    assert [(result.num_drafted, result.drafts) for result in results] == [(0, []), (0, [])]


def test_a_step_with_drafts_has_the_accepted_ones_and_the_next() -> None:
    num_drafts, num_accepted = torch.tensor([2, 1]), torch.tensor([1, 1])
    tokens, next_drafts = torch.tensor([[10, 11, 12], [20, 21, 22]]), torch.tensor([[13, 14], [23, 24]])
    joined = join_verified(ROW_RESULTS, num_drafts, num_accepted, tokens, next_drafts)
    assert joined.shape == (2, num_columns(3))
    results = read_results(joined.tolist(), 3, [0, 0], None)
    assert [result.token_ids for result in results] == [[10, 11], [20, 21]]
    assert [result.logprobs for result in results] == [[None, None], [None, None]]
    assert [result.counters for result in results] == COUNTERS
    assert [(result.num_drafted, result.drafts) for result in results] == [(2, [13, 14]), (1, [23, 24])]
