"""The indexer's kernels: top-k against the reference on the same logits, logits against the reference, and
both together, also in CUDA graphs.

Selections with equal scores are compared position by position on logits that both sides share. Where each
side computes its own logits, in another order of additions, the scores of the chosen positions are compared.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.indexer import index_logits
from hisparse_pd.kernels.kv_format import IndexKeyFormat
from hisparse_pd.kernels.paged_indexer import (
    IndexerScratch,
    paged_index_topk,
)
from hisparse_pd.kernels.selection import ABSENT, select_topk
from hisparse_pd.kernels.topk import NUM_THREADS_OF_MANY
from tests.gpu.index_batch import Batch, stored_keys
from tests.gpu.support import DEVICE, needs_gpu

pytestmark = needs_gpu

INFINITY, NAN = float("inf"), float("nan")


# --- top-k ------------------------------------------------------------------------------------------------


def drawn_logits(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    noise = torch.randn(shape, generator=generator, device=DEVICE)
    match kind:
        case "normal":
            return noise
        case "relu":
            return (noise - 2).relu()
        case "negative relu":
            return -((noise - 2).relu())
        case "few values":
            return (noise * 3).round()
        case "one value":
            return torch.full(shape, 1.5, device=DEVICE)
        case "one bin":
            return 1 + noise.abs() * 1e-6
        case "wide":
            return noise.sign() * torch.exp(noise * 20)
        case "zeros of both signs":
            return torch.where(noise > 2, noise, torch.where(noise > 0, 0.0, -0.0))
        case "not numbers":
            choice = torch.randint(0, 40, shape, generator=generator, device=DEVICE)
            special = torch.where(choice < 13, NAN, torch.where(choice < 26, -INFINITY, -NAN))
            return torch.where(choice < 39, special, torch.where(noise > 1, INFINITY, noise))
        case _:
            raise ValueError(kind)


KINDS = (
    "normal", "relu", "negative relu", "few values", "one value", "one bin", "wide", "zeros of both signs",
    "not numbers",
)  # fmt: skip


def check_topk(
    logits: Tensor, lens: Tensor, top_k: int, cluster_size: int | None, num_threads: int | None = None
) -> None:
    from hisparse_pd.kernels.topk import select

    num_tokens, max_len = logits.shape
    buffer = IndexerScratch.create(num_tokens, max_len, DEVICE).logits.fill_(INFINITY)
    is_seen = torch.arange(max_len, device=DEVICE) < lens[:, None]
    # Positions that a query does not see have the best logits, so that reading them would show.
    buffer[:, :max_len] = torch.where(is_seen, logits, INFINITY)
    out = torch.full((num_tokens, top_k), 1 << 30, dtype=torch.int32, device=DEVICE)
    num_real = torch.tensor([num_tokens], dtype=torch.int32, device=DEVICE)
    select(
        buffer, torch.zeros_like(lens), lens - 1, num_real, out,
        first_token=0, block_tokens=num_tokens, num_rows=1, max_len=max_len, cluster_size=cluster_size,
        num_threads=num_threads,
    )  # fmt: skip
    expected = select_topk(logits, lens, top_k)
    wrong = torch.nonzero((out != expected).any(1)).flatten().tolist()
    assert not wrong, f"queries {wrong[:5]} of lengths {lens[wrong[:5]].tolist()}"


def cluster_sizes() -> tuple[int, ...]:
    return (1, 2, 4, 8) if DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0) else (1,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [1, 3, 64, 2048, 4096])
def test_topk_of_each_distribution(kind: str, top_k: int) -> None:
    max_len = 20011
    lens = torch.tensor(
        [1, 2, 5, top_k - 1, top_k, top_k + 1, 4095, 4096, 4097, 8191, 8192, 8193, 9001, 16384, max_len],
        device=DEVICE,
    )
    for cluster_size in cluster_sizes():
        check_topk(drawn_logits(kind, (len(lens), max_len), top_k), lens, top_k, cluster_size)
    check_topk(drawn_logits(kind, (len(lens), max_len), top_k), lens, top_k, 1, NUM_THREADS_OF_MANY)


@pytest.mark.parametrize("kind", ["normal", "relu"])
@pytest.mark.parametrize(
    ("num_tokens", "max_len"),
    [
        (1, 131072),
        (3, 1 << 20),
        (8, 131072),
        (40, 40000),
        (64, 65536),
        (140, 30000),
        (200, 50000),
        (1000, 3000),
    ],
)
def test_topk_of_each_size(kind: str, num_tokens: int, max_len: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(num_tokens)
    lens = torch.randint(1, max_len + 1, (num_tokens,), generator=generator, device=DEVICE)
    lens[0] = max_len
    check_topk(drawn_logits(kind, (num_tokens, max_len), num_tokens), lens, 2048, None)


# --- logits -----------------------------------------------------------------------------------------------

SHAPES = [
    {"num_heads": 64, "head_dim": 128, "page_size": 64},
    {"num_heads": 64, "head_dim": 128, "page_size": 256},
    {"num_heads": 32, "head_dim": 64, "page_size": 16},
    {"num_heads": 128, "head_dim": 128, "page_size": 64},
    {"num_heads": 1, "head_dim": 16, "page_size": 1},
    {"num_heads": 4, "head_dim": 48, "page_size": 7},
    {"num_heads": 5, "head_dim": 24, "page_size": 64},
    {"num_heads": 5, "head_dim": 12, "page_size": 64},
    {"num_heads": 7, "head_dim": 36, "page_size": 5},
]
TYPES = [
    (key_format, q_dtype)
    for key_format, q_dtype in itertools.product(
        ("float32", "bfloat16", "fp8_e4m3"), (torch.float32, torch.bfloat16)
    )
]


def tolerance(batch: Batch, num_seen: int, token: int) -> float:
    """Return the tolerance of a sum of products in any order: some roundings of each magnitude, to float32 or
    to the 13 bits with which Hopper adds fp8 products up."""
    one = slice(token, token + 1)
    keys = batch.keys(batch.rows[token], num_seen)
    magnitude = index_logits(batch.q_index[one].abs(), batch.weights[one].abs(), keys.abs()).max()
    is_fp8 = batch.key_format == "fp8_e4m3" and batch.q_index.dtype == torch.bfloat16
    return float(magnitude) * (2**-12 if is_fp8 else 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("key_format", "q_dtype"), TYPES, ids=str)
def test_logits(key_format: str, q_dtype: torch.dtype, shape: dict[str, int]) -> None:
    from hisparse_pd.kernels.triton_indexer import write_logits

    lens = (2500, 1, 64, 63, 65, 700, 1024)
    batch = Batch(7, key_format, lens=lens, top_k=1, q_dtype=q_dtype, device=DEVICE, **shape)
    logits = IndexerScratch.create(len(lens), max(lens), DEVICE).logits.fill_(NAN)
    arguments = batch.arguments() | {"top_k": 0}
    write_logits(**arguments, logits=logits, first_token=0, block_tokens=len(lens), max_len=max(lens))
    for token, length in enumerate(lens):
        expected = index_logits(
            batch.query(token), batch.weights[token : token + 1], batch.keys(token, length)
        )[0]
        torch.testing.assert_close(
            logits[token, :length], expected, rtol=0, atol=tolerance(batch, length, token)
        )
        assert logits[token, length:].isnan().all(), "positions that the query does not see were written"


@pytest.mark.I5
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("key_format", "q_dtype"), TYPES, ids=str)
def test_queries_that_share_keys_have_the_bits_of_one(
    key_format: str, q_dtype: torch.dtype, shape: dict[str, int]
) -> None:
    """Requests begin and end at any query of a program; padding, rows out of range and short queries lie
    between others."""
    from hisparse_pd.kernels.triton_indexer import write_logits

    lens, top_k = (2500, 130, 64, 700), 50
    keys = Batch(9, key_format, lens=lens, top_k=top_k, q_dtype=q_dtype, device=DEVICE, **shape)
    rows = [0] * 9 + [1] * 3 + [2, 3, 3, -1, 3, 3, 0, 4, 1, 1, 1, 1, 1]
    seen = torch.Generator().manual_seed(3)
    positions = [
        int(torch.randint(0, lens[row] if 0 <= row < len(lens) else 9, (), generator=seen)) for row in rows
    ]
    positions[4] = positions[11] = top_k - 1
    batch = keys.with_queries(rows, positions)
    batch.num_real -= 2
    for first_token, block_tokens in ((0, len(rows)), (3, 7), (len(rows) - 6, 5)):
        alone, together = (
            IndexerScratch.create(block_tokens, max(lens), DEVICE).logits.fill_(NAN) for _ in range(2)
        )
        for logits, is_prompt in ((alone, False), (together, True)):
            write_logits(
                **batch.arguments(), logits=logits, first_token=first_token, block_tokens=block_tokens,
                max_len=max(lens), is_prompt=is_prompt,
            )  # fmt: skip
        assert torch.equal(alone.view(torch.int32), together.view(torch.int32))
        assert not alone.isnan().all()


@pytest.mark.I5
@pytest.mark.parametrize("page_size", [64, 192])
@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize("is_prompt", [False, True], ids=["steps", "prompts"])
def test_keys_that_are_copied_ahead_give_the_same_bits(
    is_prompt: bool, num_heads: int, page_size: int
) -> None:
    """Shares of blocks begin and end at any tile of any query: few long queries, many short ones, padding,
    rows out of range and queries that select all between others; keys that are infinite or no numbers.
    Requests begin and end anywhere in the group of queries that a prompt's block has."""
    from hisparse_pd.kernels import index_logits, paged_logits, prompt_logits, triton_indexer

    write_logits = (prompt_logits if is_prompt else paged_logits).write_logits

    lens = (70000, 1, 130, 64, 63, 65, 700, 2049, 4096)
    keys = Batch(
        12, "fp8_e4m3", num_heads=num_heads, head_dim=128, page_size=page_size, lens=lens, top_k=1,
        q_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    if not index_logits.takes(keys.q_index, keys.index_pool, page_size, "fp8_e4m3"):
        pytest.skip("the kernel needs a Hopper GPU")
    drawn = torch.Generator().manual_seed(num_heads)
    special = torch.randint(0, len(keys.index_pool), (200,), generator=drawn).to(DEVICE)
    keys.index_pool[special[:100], 128:] = torch.tensor([INFINITY], device=DEVICE).view(torch.uint8)
    keys.index_pool[special[100:], 5] = 0x7F  # NaN
    many = torch.randint(-1, len(lens) + 1, (600,), generator=drawn).tolist()
    for top_k, rows in (
        (0, [0]),
        (0, list(range(len(lens)))),
        (64, [8, 8, 0, 3, -1, 2, len(lens), 5, 7, 7, 1]),
        (50, [8] * 9 + [2] * 3 + [7, 7, -1, 7, 0, len(lens)] + [2] * 5 + [0] * 300 + [8] * 700),
        (2048, many),
    ):
        positions = [
            int(torch.randint(0, lens[row] if 0 <= row < len(lens) else 9, (), generator=drawn))
            for row in rows
        ]
        batch = keys.with_queries(rows, positions)
        batch.q_index[:, 3] = 0
        batch.q_index[0, :, 7] *= 2.0**90
        if len(rows) > 2:
            batch.num_real -= 2
        for first_token, block_tokens in ((0, len(rows)), (len(rows) // 2, (len(rows) + 1) // 2)):
            expected, found = (
                IndexerScratch.create(block_tokens, max(lens), DEVICE).logits.fill_(-7.0) for _ in range(2)
            )
            arguments = batch.arguments() | {
                **{"top_k": top_k, "max_len": max(lens) - 5},
                **{"first_token": first_token, "block_tokens": block_tokens},
            }
            triton_indexer.write_logits(**arguments, logits=expected)
            del arguments["key_format"]
            write_logits(**arguments, logits=found)
            assert torch.equal(expected.view(torch.int32), found.view(torch.int32))
            assert (expected != -7.0).any()


@pytest.mark.I5
@pytest.mark.parametrize("is_prompt", [False, True], ids=["steps", "prompts"])
def test_every_launch_gives_the_same_bits(is_prompt: bool) -> None:
    """Copies overwrite tiles while other warps write scores: a copy that came before a tile was read would
    show in some of many launches."""
    from hisparse_pd.kernels import index_logits, paged_logits, prompt_logits, triton_indexer

    write_logits = (prompt_logits if is_prompt else paged_logits).write_logits
    lens = (70000, 4096)
    keys = Batch(
        12, "fp8_e4m3", num_heads=64, head_dim=128, page_size=64, lens=lens, top_k=50,
        q_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    if not index_logits.takes(keys.q_index, keys.index_pool, 64, "fp8_e4m3"):
        pytest.skip("the kernel needs a Hopper GPU")
    drawn = torch.Generator().manual_seed(64)
    rows = [1] * 9 + [0] * 300 + [1] * 700
    positions = [int(torch.randint(0, lens[row], (), generator=drawn)) for row in rows]
    batch = keys.with_queries(rows, positions)
    for first_token, block_tokens in ((0, len(rows)), (511, 490), (800, 200), (600, 64)):
        arguments = batch.arguments() | {
            **{"first_token": first_token, "block_tokens": block_tokens, "max_len": max(lens)},
        }
        expected, found = (IndexerScratch.create(block_tokens, max(lens), DEVICE).logits for _ in range(2))
        triton_indexer.write_logits(**arguments, logits=expected.fill_(-7.0))
        del arguments["key_format"]
        for _ in range(40):
            write_logits(**arguments, logits=found.fill_(-7.0))
            assert torch.equal(expected.view(torch.int32), found.view(torch.int32))


def test_queries_far_from_one_are_as_exact() -> None:
    """Queries are rounded to fp8 for fp8 keys, but need not fit its range."""
    from hisparse_pd.kernels.triton_indexer import write_logits

    batch = Batch(
        8, "fp8_e4m3", num_heads=64, head_dim=128, page_size=64, lens=(300,), top_k=1,
        q_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    powers = torch.linspace(-100, 100, 64, device=DEVICE).round()
    batch.q_index *= (2.0**powers)[:, None].bfloat16()
    batch.weights *= 2.0**-powers
    logits = IndexerScratch.create(1, 300, DEVICE).logits
    arguments = batch.arguments() | {"top_k": 0}
    write_logits(**arguments, logits=logits, first_token=0, block_tokens=1, max_len=300)
    expected = index_logits(batch.query(0), batch.weights, batch.keys(0, 300))[0]
    torch.testing.assert_close(logits[0, :300], expected, rtol=0, atol=tolerance(batch, 300, 0))


# --- both -------------------------------------------------------------------------------------------------


def check_selection(batch: Batch, selected: Tensor) -> None:
    """Check that the selection is as good as the reference's, in order, and without duplicates."""
    num_real = int(batch.num_real)
    assert (selected[num_real:] == ABSENT).all(), "padding chose something"
    for token in range(num_real):
        num_seen = int(batch.query_positions[token]) + 1
        num_chosen = min(num_seen, batch.top_k)
        chosen = selected[token, :num_chosen].long()
        assert (selected[token, num_chosen:] == ABSENT).all()
        assert (chosen.diff() > 0).all(), "not in order"
        assert 0 <= int(chosen[0]) <= int(chosen[-1]) < num_seen
        one = slice(token, token + 1)
        keys = batch.keys(batch.rows[token], num_seen)
        scores = index_logits(batch.query(token), batch.weights[one], keys)[0]
        torch.testing.assert_close(
            scores[chosen].sort().values, scores.topk(num_chosen).values.sort().values,
            rtol=0, atol=2 * tolerance(batch, num_seen, token),
        )  # fmt: skip


@pytest.mark.parametrize(("key_format", "q_dtype"), TYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 100, 2048])
def test_selection(key_format: str, q_dtype: torch.dtype, top_k: int) -> None:
    batch = Batch(
        top_k, key_format, num_heads=64, head_dim=128, page_size=64, top_k=top_k, q_dtype=q_dtype,
        lens=(5000, 99, 100, 101, 2047, 2048, 2049, 1, 20000), device=DEVICE,
    )  # fmt: skip
    check_selection(batch, batch.call())
    batch.num_real.fill_(4)
    check_selection(batch, batch.call())


def test_a_chunk_in_blocks() -> None:
    """All queries of one row are more than the scratch holds."""
    batch = Batch(
        3, "bfloat16", num_heads=16, head_dim=64, page_size=64, lens=(3000,), top_k=512,
        q_dtype=torch.bfloat16, device=DEVICE,
    ).with_queries(rows=[0] * 300, positions=list(range(2700, 3000)))  # fmt: skip
    whole = batch.call()
    check_selection(batch, whole)
    in_blocks = batch.call(scratch=IndexerScratch.create(64, 3000, DEVICE))
    bounded = batch.call(scratch=IndexerScratch.create(10, 4000, DEVICE), max_len=3000)
    assert torch.equal(bounded, in_blocks)
    check_selection(batch, in_blocks)
    batch.num_real.fill_(100)
    check_selection(batch, batch.call(scratch=IndexerScratch.create(64, 3000, DEVICE)))


def test_exact_zeros_are_ties() -> None:
    """If all heads reject a key, both sides give exactly 0, so the chosen positions must be equal."""
    batch = Batch(
        4, "bfloat16", num_heads=16, head_dim=64, page_size=64, lens=(20000, 9000), top_k=2048,
        q_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    keys = -torch.rand(len(batch.index_pool), 64, device=DEVICE) - 0.1
    liked = torch.arange(0, len(keys), 61, device=DEVICE)
    keys[liked] = 2.0 ** torch.randint(0, 8, (len(liked), 1), device=DEVICE)
    batch.index_pool.copy_(stored_keys(keys, "bfloat16"))
    batch.q_index.fill_(1)
    batch.weights.fill_(0.25)
    assert torch.equal(batch.call(), batch.expected())


def test_graph_follows_lengths_rows_and_padding() -> None:
    batch = Batch(
        6, "fp8_e4m3", num_heads=64, head_dim=128, page_size=64, lens=(30000, 2500, 4000, 700), top_k=256,
        q_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    lens = batch.query_positions + 1
    scratch = IndexerScratch.create(4, 30016, DEVICE)
    batch.call(scratch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.call(scratch)
    for num_real, rows, parts in (
        (4, (0, 1, 2, 3), (1.0, 1.0, 1.0, 1.0)),
        (4, (3, 2, 1, 0), (0.5, 1.0, 0.2, 0.3)),
        (2, (1, 0, -1, 1 << 40), (0.7, 0.9, 1.0, 1.0)),
        (1, (0, 0, 0, 0), (0.001, 1.0, 1.0, 1.0)),
        (0, (0, 0, 0, 0), (1.0, 1.0, 1.0, 1.0)),
    ):
        batch.num_real.fill_(num_real)
        batch.req_rows.copy_(torch.tensor(rows, device=DEVICE))
        seen = [
            max(1, int(part * int(lens[row]))) if 0 <= row < 4 else 7
            for row, part in zip(rows, parts, strict=True)
        ]
        batch.query_positions.copy_(torch.tensor(seen, device=DEVICE) - 1)
        out.fill_(1 << 30)
        scratch.logits.fill_(INFINITY)
        graph.replay()
        torch.cuda.synchronize()
        check_selection(batch, out)


def test_rows_out_of_range_get_nothing() -> None:
    batch = Batch(
        6, "float32", num_heads=4, head_dim=64, page_size=64, lens=(300,) * 4, top_k=8, device=DEVICE
    )
    batch.req_rows.copy_(torch.tensor([0, -1, 4, 3], device=DEVICE))
    batch.query_positions[3] = -5
    selected = batch.call()
    assert (selected[0] >= 0).all()
    assert (selected[1:] == ABSENT).all()


def test_a_pool_beyond_2_gib() -> None:
    page_size, num_pages, head_dim = 64, 300_000, 128
    item_bytes = IndexKeyFormat("fp8_e4m3", head_dim).item_bytes
    pool_bytes = num_pages * page_size * item_bytes
    assert pool_bytes > 1 << 31
    if torch.cuda.mem_get_info()[0] < 2 * pool_bytes:
        pytest.skip(f"less than {2 * pool_bytes >> 30} GiB of GPU memory are free")
    batch = Batch(
        9, "fp8_e4m3", num_heads=64, head_dim=head_dim, page_size=page_size, lens=(3000, 2000), top_k=64,
        q_dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    expected = batch.call()
    num_used = len(batch.index_pool) // page_size
    pool = torch.full((num_pages * page_size, item_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    pool[-num_used * page_size :] = batch.index_pool
    batch.index_pool = pool
    batch.page_table += num_pages - num_used
    assert torch.equal(batch.call(), expected)


def test_no_queries_launch_nothing() -> None:
    batch = Batch(1, "float32", num_heads=2, head_dim=16, page_size=4, lens=(9,), top_k=4, device=DEVICE)
    none = batch.with_queries(rows=[], positions=[])
    assert paged_index_topk(**none.arguments()).shape == (0, 4)
