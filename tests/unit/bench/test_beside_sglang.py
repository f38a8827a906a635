"""The benchmark beside SGLang, without a GPU: the log, turns, comparison, HTTP, model, and the archive."""

from __future__ import annotations

import json
import lzma
import math
import shutil
import tarfile
import time
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.types import Send

from hisparse_pd.commands.cli import NOT_SETTINGS, make_parser
from hisparse_pd.commands.pair import pair_settings
from hisparse_pd.core.model.spec import load_spec
from tests.unit.router.cluster import FakeNode, answer, serving, start, write
from tests.waiting import WAIT_SECS
from tools.bench.beside_sglang import __main__ as beside_sglang
from tools.bench.beside_sglang import carry, guest, over_http
from tools.bench.beside_sglang.comparison import (
    beside,
    http_beside,
    http_table,
    our_cells,
    prefill_beside,
    sglang_cells,
    steps_table,
)
from tools.bench.beside_sglang.environment import GuestMissing, check_guest, versions
from tools.bench.beside_sglang.guest import GuestTurn, engine_arguments, server_arguments
from tools.bench.beside_sglang.model import main as write_model
from tools.bench.beside_sglang.model import tokens_of_step
from tools.bench.beside_sglang.over_http import STOP_SECS, http_turn, measure_points, pair_options
from tools.bench.beside_sglang.prewarm import Warming, jobs_of, outcomes, products
from tools.bench.beside_sglang.run import Run
from tools.bench.beside_sglang.scheduler_log import CELL, DONE, prefill_rate, read_cells
from tools.bench.beside_sglang.turns import Engine, Mode, Turn, limits, plan

TURN = Turn("sglang", "hisparse", 32768, (2, 64))


def decode_line(running: int, rate: float, time: str = "08:00:01") -> str:
    return (
        f"[2026-11-28 {time}] Decode batch, #running-req: {running}, #token: 98432, token usage: 0.60, "
        f"cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 0"
    )


def prefill_line(new: int, rate: float) -> str:
    return (
        f"[2026-11-28 08:00:00] Prefill batch, #new-seq: 1, #new-token: {new}, #cached-token: 0, token "
        f"usage: 0.10, #running-req: 0, #queue-req: 3, #pending-token: 0, cuda graph: False, input "
        f"throughput (token/s): {rate:.2f}"
    )


def log_of(batch: int, running: list[tuple[int, float]], pcie: float | None = None) -> list[str]:
    measured = {"batch": batch, "pcie_bytes_a_second": pcie}
    mark = CELL + json.dumps({"batch": batch})
    return [mark, *(decode_line(*line) for line in running), DONE + json.dumps(measured)]


def test_a_step_is_the_median_of_full_batches_without_the_first() -> None:
    [cell] = read_cells(log_of(2, [(1, 10.0), (2, 3.0), (2, 400.0), (2, 500.0), (2, 1000.0), (1, 9.0)]))
    assert cell.problem == ""
    assert cell.step_ms() == pytest.approx(1e3 * 2 / 500)


def test_a_batch_that_was_never_full_is_dropped_with_a_line() -> None:
    lines = log_of(64, [(63, 900.0)] * 9) + log_of(2, [(2, 100.0)] * 3) + log_of(2, [(2, 100.0)] * 4)
    cells, dropped = sglang_cells(TURN, read_cells(lines), 656)
    assert [cell["batch"] for cell in cells] == [2]
    assert dropped == [
        "sglang hisparse 64 at 32768: dropped, at most 63 of 64 requests ran at once",
        "sglang hisparse 2 at 32768: dropped, 2 lines of full batches, fewer than 3",
    ]


def test_lines_before_the_first_cell_and_of_a_cell_that_did_not_end() -> None:
    lines = [decode_line(2, 1.0), *log_of(2, [(2, 100.0)] * 5)[:-1], "Scheduler hit an exception"]
    [cell] = read_cells(lines)
    assert cell.decode == [(2, 100.0, 1.0)] * 5
    assert cell.measured is None
    [found], _ = sglang_cells(TURN, [cell], 656)
    assert found["step_ms"] == pytest.approx(20.0)
    assert found["misses_a_token"] is None


def test_misses_are_bytes_over_pcie_in_a_step() -> None:
    lines = log_of(2, [(2, 200.0)] * 5, pcie=656 * 1e3)
    [hisparse], _ = sglang_cells(TURN, read_cells(lines), 656)
    assert hisparse["mb_a_step"] == pytest.approx(656 * 10 / 1e6)
    assert hisparse["misses_a_token"] == pytest.approx(5)
    [dense], _ = sglang_cells(Turn("sglang", "dense", 32768, (2,)), read_cells(lines), 656)
    assert dense["misses_a_token"] is None


def test_prefill_is_the_median_of_whole_chunks_without_the_first() -> None:
    rates = [(8192, 1.0), (8192, 100.0), (300, 7.0), (8192, 300.0), (8192, 200.0)]
    cells = read_cells([CELL + '{"batch": 1}', *(prefill_line(*line) for line in rates)])
    assert prefill_rate(cells, 8192) == 200.0
    assert prefill_rate(cells, 4096) is None


def test_turns_go_by_context_mode_and_engine() -> None:
    turns = plan([32768, 65536], {"dense": [16, 1], "hisparse": []})
    assert turns == [
        Turn("sglang", "dense", 32768, (1, 16)),
        Turn("ours", "dense", 32768, (1, 16)),
        Turn("sglang", "dense", 65536, (1, 16)),
        Turn("ours", "dense", 65536, (1, 16)),
    ]

    def most(turn: Turn) -> float:
        return 100.0 if turn.engine == "sglang" else 50.0

    assert [secs for _, secs in limits(turns, most, 300.0)] == [100.0, 50.0, 100.0, 50.0]
    assert [secs for _, secs in limits(turns, most, 240.0)] == [100.0, 50.0, 40.0, 50.0]
    assert [secs for _, secs in limits(turns, most, 220.0)] == [100.0, 50.0, 0.0, 50.0]
    names = [turn.name for turn in plan([32768], {"dense": [1]}, over_http=True)]
    assert names == ["http-sglang-dense-32768", "http-ours-dense-32768"]


def cell(engine: str, batch: int, step_ms: float) -> dict[str, Any]:
    figures = {"step_ms": step_ms, "tokens_a_second": 1e3 * batch / step_ms, "misses_a_token": None}
    figures["tokens_a_step"] = 1.0
    return {
        "engine": engine,
        "mode": "dense",
        "context": 32768,
        "batch": batch,
        "mb_a_step": None,
        **figures,
    }


def test_rows_have_both_engines_and_the_ratio_of_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    rows = beside([cell("sglang", 16, 4.0), cell("sglang", 1, 3.0), cell("ours", 16, 2.0)])
    assert [row["batch"] for row in rows] == [1, 16]
    assert [row["ratio"] for row in rows] == [None, 2.0]
    assert rows[0]["ours_step_ms"] is None
    assert rows[0]["sglang_step_ms"] == 3.0
    Console(width=190).print(steps_table("some GPU", rows))
    printed = capsys.readouterr().out
    assert "sglang step ms" in printed
    assert [line.split() for line in printed.splitlines() if "dense" in line][1] == [
        *("32,768", "dense", "16", "2.00", "4.00", "2.00", "1.00", "1.00", "8,000", "4,000"),
    ]


def test_both_ratios_above_one_say_that_ours_is_faster() -> None:
    rates = {"ours": 300.0, "sglang": 200.0}
    shared = {"mode": "dense", "context": 32768}
    cells = [{"engine": name, "prefill_tokens_a_second": rate, **shared} for name, rate in rates.items()]
    [row] = prefill_beside(cells)
    assert row["ratio"] == pytest.approx(1.5)
    assert row["ours_prefill_tokens_a_second"] == 300.0


CONTEXT = 2048
NUM_CACHED = 1984
"""Whole pages of a prompt before its last token."""


@dataclass
class Server(FakeNode):
    """A server that has the prompts cached which it has seen, and that fails requests when it is told to."""

    is_caching: bool = True
    num_until_failing: int = 10**6
    prompts: list[list[int]] = field(default_factory=list)


async def serves(node: FakeNode, send: Send) -> None:
    assert isinstance(node, Server)
    body = node.body()
    num_cached = NUM_CACHED if node.is_caching and body["prompt"] in node.prompts else 0
    node.prompts.append(body["prompt"])
    if len(node.prompts) > node.num_until_failing:
        await answer(send, b"full", 503)
        return
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    events: list[dict[str, Any]] = [{"choices": [{"text": text}]} for text in ("a", "bc")]
    await start(send)
    for event in (*events, {"choices": [{"text": "", "finish_reason": "length"}]}, {"usage": usage}):
        await write(send, b"data: " + json.dumps(event).encode() + b"\n\n")
    await write(send, b"data: [DONE]\n\n", more=False)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run that has measured nothing, with a model's config."""
    (tmp_path / "config.json").write_text('{"vocab_size": 32768}')
    words = ["--guest", str(tmp_path / "site"), "--model", str(tmp_path), "--logs", str(tmp_path / "logs")]
    options = beside_sglang.parse([*words, "--output-tokens", "3", "--http-clients", "1", "2"])
    return Run(options, Console(quiet=True), time.monotonic() + WAIT_SECS)


@pytest.fixture(autouse=True)
def client_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of these tests answer at once, so that their client does most of the work."""
    monkeypatch.setattr(over_http, "BUSY_SHARE", math.inf)


async def measured(run: Run, server: Server, engine: Engine = "ours", mode: Mode = "dense") -> None:
    turn = Turn(engine, mode, CONTEXT, (1, 2), over_http=True)
    async with serving(server) as url:
        await measure_points(run, turn, url, run.deadline)


@pytest.mark.anyio
async def test_both_servers_are_asked_the_same_first_new_and_then_cached_prompts(run: Run) -> None:
    ours, sglang = Server(serves), Server(serves)
    await measured(run, ours)
    await measured(run, sglang, "sglang")
    assert run.notes == []
    figures = ("engine", "cached", "clients", "num_requests", "cached_tokens")
    assert [tuple(cell[name] for name in figures) for cell in run.http] == [
        (engine, cached, clients, num_requests, num_cached)
        for engine in ("ours", "sglang")
        for cached, clients, num_requests, num_cached in (
            ("nothing", 1, 3, 0.0),
            ("nothing", 2, 3, 0.0),
            ("all", 1, 8, NUM_CACHED),
            ("all", 2, 8, NUM_CACHED),
        )
    ]
    assert len(ours.prompts) == 4 + 3 + 3 + 2 * (8 + 8), "a warm-up, new prompts, and cached ones twice"
    # How often a prompt is asked follows from which client is free first.
    assert set(map(tuple, ours.prompts)) == set(map(tuple, sglang.prompts))
    assert [ours.body()["hisparse"], "hisparse" in sglang.body()] == [False, False]
    rows = http_beside(run.http)
    assert [row["ours_num_requests"] == row["sglang_num_requests"] for row in rows] == [True] * 4
    assert all(row["ours_tokens_a_second"] > 0 and row["tokens_ratio"] > 0 for row in rows)


@pytest.mark.anyio
async def test_points_with_failures_and_points_that_were_not_cached_are_dropped(run: Run) -> None:
    await measured(run, Server(serves, is_caching=False))
    assert [cell["cached"] for cell in run.http] == ["nothing", "nothing"]
    reason = "dropped, 0.0% of the prompts' tokens were cached"
    names = [f"http-ours-dense-2048, all cached, {number} clients" for number in (1, 2)]
    assert run.notes == [f"{name}: {reason}" for name in names]
    run.http, run.notes = [], []
    await measured(run, Server(serves, num_until_failing=4 + 3 + 1))
    assert [(cell["cached"], cell["clients"]) for cell in run.http] == [("nothing", 1)]
    failed = "2 clients: dropped, 2 of 3 requests failed, 2 x HTTP 503: full"
    assert run.notes[0] == f"http-ours-dense-2048, nothing cached, {failed}"


@pytest.mark.anyio
async def test_a_busy_client_is_noted_beside_the_figures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_http, "BUSY_SHARE", -1.0)
    await measured(run, Server(serves))
    assert len(run.http) == 4
    assert ["the client was busy for" in note for note in run.notes] == [True] * 4


@pytest.mark.anyio
async def test_sglang_has_no_cached_prompts_with_hisparse(run: Run) -> None:
    await measured(run, Server(serves), "sglang", "hisparse")
    assert [cell["cached"] for cell in run.http] == ["nothing", "nothing"]
    assert ["no points with cached prompts" in note for note in run.notes] == [True]
    ours = Server(serves)
    await measured(run, ours, "ours", "hisparse")
    assert ours.body()["hisparse"] is True
    assert len(run.http) == 6


@pytest.mark.anyio
async def test_a_turn_at_its_limit_measures_no_more(run: Run) -> None:
    run.deadline = time.monotonic()
    await measured(run, Server(serves))
    assert run.http == []
    assert run.notes == ["http-ours-dense-2048, nothing cached, 2 clients: the turn reached its limit"]


def test_a_server_that_does_not_start_is_a_line(run: Run) -> None:
    http_turn(run, Turn("sglang", "dense", CONTEXT, (1,), over_http=True), STOP_SECS + WAIT_SECS)
    assert "No module named" in run.notes[0]
    assert run.secs.keys() == {"http-sglang-dense-2048"}
    http_turn(run, Turn("ours", "dense", CONTEXT, (1,), over_http=True), STOP_SECS)
    assert run.notes[1].endswith("router: not healthy after 0 s")


def http_cell_of(engine: str, **figures: float) -> dict[str, Any]:
    shared = {"context": 32768, "mode": "dense", "cached": "all", "clients": 16}
    return {"engine": engine, **shared, "ttft_p99_ms": 900.0, **figures}


def test_ratios_over_http_above_one_say_that_ours_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    ours = http_cell_of("ours", ttft_p50_ms=100.0, tokens_a_second=3000.0)
    sglang = http_cell_of("sglang", ttft_p50_ms=250.0, tokens_a_second=2000.0)
    [row] = http_beside([sglang, ours])
    assert (row["ttft_ratio"], row["tokens_ratio"]) == (2.5, 1.5)
    [alone] = http_beside([ours])
    assert (alone["ttft_ratio"], alone["tokens_ratio"], alone["sglang_ttft_p50_ms"]) == (None, None, None)
    Console(width=190).print(http_table("some GPU", [row]))
    [line] = [line.split() for line in capsys.readouterr().out.splitlines() if "dense" in line]
    assert line == [
        *("32,768", "dense", "all", "16", "100.0", "250.0", "900.0", "900.0", "3,000", "2,000"),
        *("2.50", "1.50"),
    ]


def test_our_cells_are_those_of_decode_steps_report() -> None:
    row = {"batch": 16, "step_ms": 2.0, "misses_a_token": 3.0, "mb_a_step": 4.0, "tokens_a_step": 2.5}
    [found] = our_cells(Turn("ours", "dense", 32768, (16,)), {"rows": [row]})
    assert found["tokens_a_second"] == 20_000.0
    assert found["misses_a_token"] == 3.0


def test_the_model_has_v32s_width_for_both_engines(tmp_path: Path) -> None:
    assert write_model(["--out", str(tmp_path), "--config-only"]) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV32ForCausalLM"]
    sizes = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "index_topk")
    assert [config[name] for name in sizes] == [7168, 128, 1536, 512, 2048]
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["topk_method"] == "noaux_tc"  # SGLang asks for it
    assert config["num_nextn_predict_layers"] == 0
    drafting = tmp_path / "drafting"
    assert write_model(["--out", str(drafting), "--config-only", "--draft-agreement", "0.7"]) == 0
    assert json.loads((drafting / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert not list(tmp_path.rglob("*.safetensors"))
    for cache_dtype, item_bytes in beside_sglang.ITEM_BYTES.items():
        spec = load_spec(tmp_path, "bfloat16", cache_dtype, device="cpu", load_format="dummy")
        assert (spec.num_layers, spec.item_bytes) == (5, item_bytes)
    assert (7168, 16384) in products(config)
    assert (2112, 7168) in products(config)


def turn_of(mode: str, *batches: int) -> GuestTurn:
    return GuestTurn("DIR", mode, 32768, batches, 160, 4096, 32768)


def test_sglangs_pools_hold_more_than_the_largest_batch() -> None:
    dense = engine_arguments(turn_of("dense", 1, 128))
    assert dense["max_running_requests"] > 128, "its estimate would keep the last one out"
    assert dense["max_total_tokens"] > (128 + 4) * (32768 + 160)
    assert dense["cuda_graph_bs_decode"] == [1, 128]
    assert "enable_hisparse" not in dense
    hisparse = engine_arguments(turn_of("hisparse", 16, 128))
    settings = json.loads(hisparse["hisparse_config"])
    assert hisparse["max_total_tokens"] > 128 * 4096 + 2 * 32768
    assert hisparse["max_total_tokens"] < dense["max_total_tokens"] / 4
    assert settings["host_to_device_ratio"] * hisparse["max_total_tokens"] >= dense["max_total_tokens"]


def test_drafts_and_the_dtype_of_kv_are_those_of_our_node() -> None:
    plain = engine_arguments(turn_of("dense", 1))
    assert plain["kv_cache_dtype"] == "fp8_e4m3"
    assert not [name for name in plain if name.startswith(("speculative", "dsa"))]
    turn = replace(turn_of("dense", 1), kv_cache_dtype="bfloat16", num_drafts=3)
    drafting = engine_arguments(turn)
    assert drafting["kv_cache_dtype"] == "bfloat16"
    assert (drafting["speculative_num_steps"], drafting["speculative_num_draft_tokens"]) == (3, 4)
    assert tokens_of_step(3, 0.5) == 1 + 0.5 + 0.25 + 0.125
    assert tokens_of_step(0, None) == tokens_of_step(3, None) == 1.0


def test_drafts_without_an_mtp_layer_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        beside_sglang.parse(["--guest", "DIR", "--drafts", "3"])
    assert "--draft-agreement" in capsys.readouterr().err


def test_a_step_with_drafts_makes_several_tokens() -> None:
    lines = log_of(2, [(2, 1000.0)] * 5)
    accepted = [
        line.replace("cuda graph", "accept len: 2.50, accept rate: 0.50, cuda graph") for line in lines
    ]
    [found], _ = sglang_cells(TURN, read_cells(accepted), 656)
    assert found["step_ms"] == pytest.approx(1e3 * 2 * 2.5 / 1000)
    assert found["tokens_a_step"] == 2.5
    assert found["tokens_a_second"] == pytest.approx(1000.0)


def test_both_servers_pools_hold_the_same_requests() -> None:
    turn = GuestTurn("DIR", "dense", 32768, (1, 64), 160, 4096, 32768, port=30000, stream_interval=8)
    sglang = server_arguments(turn)
    assert (sglang["port"], sglang["skip_tokenizer_init"], sglang["enable_cache_report"]) == (
        30000,
        False,
        True,
    )
    options = beside_sglang.parse(["--guest", "DIR", "--http", "--stream-interval", "8"])
    words = pair_options(options, Turn("ours", "dense", 32768, (1, 64), over_http=True))
    ours = dict(word.removeprefix("--").split("=") for word in words if word != "--mps")
    num_tokens = sglang["max_total_tokens"]
    assert num_tokens > (64 + 4) * (32768 + 160)
    pools = ("kv-pool-tokens", "device-pool-tokens", "host-pool-tokens")
    assert [int(ours[name]) for name in pools] == [num_tokens] * 3
    assert int(ours["stream-interval"]) == sglang["stream_interval"] == 8
    given = vars(make_parser().parse_args(["pair", "--model-path", "DIR", *words]))
    pair, prefill, decode, _ = pair_settings({k: v for k, v in given.items() if k not in NOT_SETTINGS})
    assert pair.mps, "both nodes are on one GPU"
    assert (prefill.kv_pool_tokens, decode.device_pool_tokens) == (num_tokens, num_tokens)


def test_kernels_are_compiled_for_every_batch_and_for_chunks() -> None:
    config = dict.fromkeys(("num_attention_heads", "v_head_dim", "index_head_dim"), 128)
    names = ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "intermediate_size")
    more = ("moe_intermediate_size", "n_shared_experts", "qk_nope_head_dim", "index_n_heads", "index_topk")
    config |= dict.fromkeys((*names, *more), 64)
    jobs = jobs_of(Warming("DIR", (1, 16, 8192), 656, 4096, 8, 60.0), config)
    assert [job[1] for job in jobs if job[0] == "paged logits"] == [1, 16]
    assert sum(job[0] == "product" for job in jobs) == 3 * len(products(config))
    assert json.loads(json.dumps(jobs)) == [list(job) for job in jobs]
    lines = "a warning\ncompiled ['norm'] in 3.0 s\nfailed OSError: 'x' ['jit'] in 1.0 s\n"
    assert outcomes(lines) == (1, ["failed OSError: 'x' ['jit'] in 1.0 s"])


def test_a_missing_guest_is_named_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sglang").mkdir()
    with pytest.raises(GuestMissing, match=r"without sgl_kernel, deep_gemm.*beside_sglang\.carry"):
        check_guest(tmp_path)
    assert beside_sglang.main(["--guest", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "carry" in capsys.readouterr().out
    (tmp_path / "sglang-0.5.17.dist-info").mkdir()
    assert versions(tmp_path) == {"sglang": "0.5.17"}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder that has a file for each pattern of what is left out, and one that stays."""
    for pattern in carry.DROPPED:
        path = tmp_path / "site" / pattern.replace("*", ".so")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10))
    (tmp_path / "site" / "sglang" / "srt" / "kept.py").write_text("kept\n")
    return tmp_path / "site"


def test_what_is_not_called_is_left_out(site: Path) -> None:
    assert dict(carry.remove_dropped(site)) == dict.fromkeys(carry.DROPPED, 10)
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert files == {"sglang/srt/kept.py", *carry.STANDING_IN}
    with pytest.raises(carry.CarryError, match="not in these wheels"):
        list(carry.remove_dropped(site))


def test_an_archive_is_the_same_for_the_same_files(site: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.xz", tmp_path / "second.xz"
    assert carry.pack(site, first) == first.stat().st_size
    for path in site.rglob("*"):
        path.touch()
    carry.pack(site, second)
    assert first.read_bytes() == second.read_bytes()
    with lzma.open(first) as file, tarfile.open(fileobj=file) as archive:
        assert "./sglang/srt/kept.py" in archive.getnames()


def test_our_packages_are_links_into_the_archive(site: Path) -> None:
    for name in carry.OUR_PACKAGES:
        (site / name).mkdir(exist_ok=True)
    own = site / carry.OURS / "starlette"
    own.mkdir(parents=True)
    carry.link_ours(site)
    links = {path.name: path.resolve() for path in (site / carry.OURS).iterdir() if path != own}
    assert links == {name: (site / name).resolve() for name in carry.OUR_PACKAGES}
    shutil.rmtree(site / carry.OURS)
    (site / "zmq").rmdir()
    with pytest.raises(carry.CarryError, match="zmq: not in these wheels"):
        carry.link_ours(site)


def test_wheels_are_unpacked_into_one_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            archive.writestr(f"{name}/__init__.py", "")
    carry.unpack(sorted(tmp_path.glob("*.whl")), tmp_path / "site")
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["one", "two"]


def test_dummy_weights_are_not_rounded_away() -> None:
    import torch

    model = torch.nn.Module()
    fp8 = torch.zeros(256, 128, dtype=torch.float8_e4m3fn)
    for name, value in {
        "proj_weight": fp8,
        "proj_weight_scale_inv": torch.zeros(2, 1),
        "norm_weight": torch.zeros(8),
        "gate_bias": torch.ones(8),
        "table": torch.zeros(64, 64, dtype=torch.bfloat16),
    }.items():
        model.register_buffer(name, value)
    guest.draw_weights(model)
    drawn = dict(model.named_buffers())
    assert (drawn["proj_weight"].float() != 0).float().mean() > 0.99
    assert torch.equal(drawn["proj_weight_scale_inv"], torch.full((2, 1), 128**-0.5))
    assert torch.equal(drawn["norm_weight"], torch.ones(8))
    assert torch.equal(drawn["gate_bias"], torch.zeros(8))
    assert drawn["table"].float().std() == pytest.approx(64**-0.5, rel=0.1)


def test_a_batch_reads_the_experts_that_are_drawn_for_its_places() -> None:
    import torch

    class Gate(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.new_zeros((len(hidden_states), 32))

    forward = guest.drawn_experts(Gate.forward, 64)
    first, second = Gate(), Gate()
    alike = torch.ones(64, 8)
    logits = forward(first, alike)
    assert torch.equal(forward(first, alike[:5]), logits[:5])
    assert not torch.equal(forward(second, alike), logits)
    assert len(logits.argmax(dim=1).unique()) > 20
    assert len(torch.sigmoid(logits).flatten().unique()) == 64 * 32, "no scores are equal"
