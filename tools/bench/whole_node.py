"""Measures a whole decode node on its GPUs: memory, links, collectives and steps of a model of full size.

    python -m tools.bench.whole_node [--layers 61] [--seconds 570] [--out STEM]

It uses as many ranks as there are GPUs, and DeepSeek-V3.2's published sizes with dummy weights in fp8 and an
MTP layer. Four GPUs hold ``--layers 30``. ``--model-path DIR`` takes the sizes of the model in DIR; if it has
none, the measured config is written there, so that nodes can serve the same. First it measures the links,
each alone and all at once, the ranks' agreement, the load, and collectives by tokens a rank and by transport
(``--collectives-only`` measures these alone). Then it times the second pass of one prompt's prefill, and the
steps of ``tools.bench.decode_step``. A *cell* has one value of each of ``--batch``, ``--context``,
``--jitter``, ``--drafts`` and ``--modes``; the most valuable cells, whose values stand first, come first. The
JSON is written after every cell, and the call ends by its own clock, whatever hangs.

A batch that does not fit becomes the largest that does, by a decode node's plan for the GPU and by the main
memory that there is for all ranks. Dummy weights accept no drafts: tokens a second "as accepted" assume the
accepted drafts of other measurements. Hit rates follow from ``--jitter`` and are measured. Milliseconds are
the first rank's, and so are "distinct tokens", which its requests enter the last step with: requests with the
same token read the same experts. A step's parts are those of ``decode_step``.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import MAX_DRAFTS, Mode, RankPlace
from hisparse_pd.core.memory.device import DeviceMemory, use_device
from hisparse_pd.core.memory.free import free_memory
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import place_ranks
from hisparse_pd.core.memory.numa_binding import bind_threads
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.decode_node.drafting import full_buffer
from tools.bench.dummy_locality import DummyLocality
from tools.bench.exchange import measure_collectives
from tools.bench.facts import OUT
from tools.bench.rank_agreement import agreement_us
from tools.bench.report import REPORT_WIDTH, make_console, table_of, write_json
from tools.bench.step_bench import slots_of_all, slots_of_one
from tools.bench.step_memory import MemoryByPart, planned_pools
from tools.bench.step_options import add_node_options, load_shared_spec, make_settings
from tools.bench.step_prompt import Prefilled, prefill, synchronize
from tools.bench.step_report import measure, print_steps, shared_report
from tools.checkpoints.make_synthetic import write_published

ACCEPTED = {0: 1.0, 1: 1.7, 3: 2.65}
"""Tokens that a step yields, by its number of drafts, as docs/models.md assumes."""
MAIN_MEMORY_SHARE = 0.9
"""Share of the free main memory that the host pools of all ranks may take."""
GRACE_SECS = 5.0
"""How long ranks have to end by themselves before they are killed."""
LINK_REPEATS = 8
"""Copies that are timed together."""
AGREEMENTS = 200
"""Timed agreements of the ranks."""


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all cells to measure, most valuable first: the lower the places of a cell's settings in the
    options add up, the earlier. A cell has one of each option's values, by the option's name, so one mode as
    "modes"."""
    options = {name: getattr(arguments, name) for name in ("batch", "context", "jitter", "drafts", "modes")}
    found = []
    for places in product(*(range(len(values)) for values in options.values())):
        cell = {name: values[i] for (name, values), i in zip(options.items(), places, strict=True)}
        if cell["modes"] == "hisparse" or cell["jitter"] == arguments.jitter[0]:  # dense steps have no hits
            found.append((sum(places), cell))
    return [cell for _, cell in sorted(found, key=lambda item: item[0])]


def largest_batch(spec: ModelSpec, cell: argparse.Namespace, device: torch.device) -> int:
    """Return the largest batch, up to the cell's, that fits the free memory; 0 if not even one request does.
    ``cell``: all options, those that list settings replaced by the cell's own."""
    free_gb = DeviceMemory.read(device).free_bytes / 1e9 if device.type == "cuda" else float("inf")
    free = free_memory(Machine())
    host_gb = float("inf") if free is None else MAIN_MEMORY_SHARE * free.num_bytes / 1e9
    for batch in range(cell.batch, 0, -1):
        settings = make_settings(cell, batch, cell.drafts)
        need = slots_of_one(spec, settings, Mode(cell.modes), cell.context, cell.steps)
        totals = slots_of_all(need, batch)
        needed_gb = sum(planned_pools(settings, spec, totals).values())
        needed_host_gb = cell.dp_size * totals.host * spec.num_kv_layers * spec.item_bytes / 1e9
        if needed_gb <= free_gb and needed_host_gb <= host_gb:
            return batch
    return 0


def as_accepted(row: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """Return tokens a second of a user, a GPU and the node, with as many tokens a step as ACCEPTED says."""
    tokens_a_step = ACCEPTED.get(row["num_drafts"])
    user_tokens = None if tokens_a_step is None else 1e3 * tokens_a_step / row["step_ms"]
    gpu_tokens = user_tokens and row["batch"] * user_tokens
    return {
        "as_accepted_a_user": user_tokens,
        "as_accepted_a_gpu": gpu_tokens,
        "as_accepted_node": gpu_tokens and num_ranks * gpu_tokens,
    }


def measure_cells(
    arguments: argparse.Namespace,
    model: Any,
    locality: DummyLocality,
    prompt: Prefilled,
    ranks: RankGroup,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all cells, which all ranks measure together.

    A cell is left out on all ranks if one has no room for it, or if less time is left than it will probably
    take: as long as the quickest cell that was at least as large, or without one, as the slowest so far.
    """
    done: set[tuple[Any, ...]] = set()
    secs_by_tokens: list[tuple[int, float]] = []  # tokens of a measured cell, and its time
    for cell in cells(arguments):
        buffer = max(arguments.buffer, full_buffer(cell["drafts"], model.spec.index_topk))
        cell_arguments = argparse.Namespace(**{**vars(arguments), **cell, "buffer": buffer})
        gc.collect()
        ranks.agree(0)  # all ranks have freed the previous cell
        batch = min(most for (most,) in ranks.agree(largest_batch(model.spec, cell_arguments, model.device)))

        num_tokens = batch * cell["context"]
        as_large = [secs for tokens, secs in secs_by_tokens if tokens >= num_tokens]
        expected_secs = min(as_large, default=max((secs for _, secs in secs_by_tokens), default=0.0))
        has_time = time.monotonic() + expected_secs < arguments.ends_at
        key = (batch, *(cell[name] for name in ("context", "jitter", "drafts", "modes")))
        if batch == 0 or key in done:  # the same on all ranks
            continue
        if not all(has_time_there for (has_time_there,) in ranks.agree(int(has_time))):
            continue

        done.add(key)
        started = time.monotonic()
        locality.set_jitter(cell["jitter"])
        cut = prompt.up_to(cell["context"])
        mode = Mode(cell["modes"])
        row = measure(model, cell_arguments, cut, mode, batch, num_drafts=cell["drafts"], grammar=None)
        secs = time.monotonic() - started
        secs_by_tokens.append((num_tokens, secs))
        asked = {"asked": cell["batch"], "context": cell["context"], "jitter": cell["jitter"], "secs": secs}
        yield {**asked, **row, **as_accepted(row, ranks.size)}


def run(arguments: argparse.Namespace, place: RankPlace) -> None:
    """Run one rank: links, agreement, load, collectives, prefill, then the steps of all cells."""
    # This rank's process is set up as an engine's start does it.
    console = Console(width=REPORT_WIDTH, quiet=place.rank > 0)
    settings = DecodeSettings(
        model_path=arguments.model_path, device=arguments.device, dp_size=place.size
    ).of_rank(place.rank)
    placement = place_ranks(settings.numa, settings.devices_here(place.rank), Machine())[place.rank]
    bind_threads(placement)
    arguments.device = settings.device
    use_device(arguments.device)
    device = torch.device(arguments.device)
    spec = load_shared_spec(arguments, max(arguments.drafts))
    ranks = RankGroup(place, device, agree_secs=300.0, forward_secs=300.0)
    report = {**shared_report(arguments, spec), "num_ranks": place.size, "rows": []}
    report["placement"] = str(placement)

    # The report grows part by part, because the call may end at any time.
    def keep(**found: Any) -> None:
        report.update(found)
        if place.rank == 0:
            write_json(arguments.out.with_suffix(".json"), report)

    def keep_collectives() -> None:
        found = []
        for row in measure_collectives(ranks, device, spec.hidden_size, arguments.collectives):
            found.append(row)
            keep(collectives=found)

    if arguments.collectives_only:
        keep_collectives()
        ranks.leave()
        return

    keep(links=measure_links(ranks, device, arguments.link_bytes))
    keep(agreement=agreement_us(ranks, AGREEMENTS))

    used = MemoryByPart(device)
    used.mark("CUDA and collectives")
    locality = DummyLocality(spec)
    started = time.monotonic()
    model = load_model(arguments.model_path, spec, arguments.device, ranks, draw_weight=locality.draw_weight)
    ranks.meet("loaded")
    used.mark("weights")
    keep(load_secs=time.monotonic() - started, memory_gb=used.gb, planned_weights_gb=locality.num_bytes / 1e9)
    keep_collectives()

    # One prompt for all cells: the longest that is computed, which can end at each shorter context.
    locality.set_jitter(arguments.jitter[0])
    computed = min(max(arguments.context), arguments.computed_tokens)
    cuts = [context for context in arguments.context if context <= computed]
    prompt = prefill(spec, model, make_settings(arguments, 1), arguments.chunk, computed, cuts)
    keep(prefill_tokens_a_second=prompt.tokens_a_second, prefill_ends_at=time.monotonic() - started)
    if max(arguments.context) > computed:
        prompt = prompt.repeated(max(arguments.context) // computed)

    for row in measure_cells(arguments, model, locality, prompt, ranks):
        report["rows"].append(row)
        keep()
        console.print(
            f"{row['mode']} {row['batch']}, {row['context']} tokens, jitter {row['jitter']}, "
            f"{row['num_drafts']} drafts: {row['step_ms']:.3f} ms; {row['secs']:.1f} s",
            highlight=False,
        )
    ranks.leave()


# --- links to the host, collectives ------------------------------------------------------------------------


def measure_links(ranks: RankGroup, device: torch.device, num_bytes: int) -> list[dict[str, Any]]:
    """Return the GB/s of every rank's copies from pinned memory and back, alone and while all copy."""
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    dev = torch.empty_like(host, device=device, pin_memory=False)

    def copies(target: torch.Tensor, source: torch.Tensor) -> int:
        """Return the rate of copies in MB/s, an integer, because ranks tell each other integers."""
        started = time.perf_counter()
        for _ in range(LINK_REPEATS):
            target.copy_(source, non_blocking=True)
        synchronize(device)
        return round(LINK_REPEATS * num_bytes / (time.perf_counter() - started) / 1e6)

    rows: list[dict[str, Any]] = [{"rank": rank} for rank in range(ranks.size)]
    for name, target, source in (("to_device", dev, host), ("to_host", host, dev)):
        copies(target, source)  # the first copies take longer
        for active in (*range(ranks.size), None):  # the rank that copies; None: all of them
            ranks.agree(0)
            mb_s = copies(target, source) if active in (ranks.rank, None) else 0
            for row, (found,) in zip(rows, ranks.agree(mb_s), strict=True):
                if active in (row["rank"], None):
                    row[f"{name}_{'all' if active is None else 'alone'}_gb_s"] = found / 1e3
    return rows


# --- the command ----------------------------------------------------------------------------------------


def print_report(report: dict[str, Any], console: Console) -> None:
    title = f"{report['num_ranks']} ranks, {report['num_layers']} layers, {report['device']}: "
    for name in ("links", "collectives"):
        console.print(table_of(title + name, report.get(name, [])))
    if not report["rows"]:  # with --collectives-only
        return
    for name in ("agreement", "load_secs", "memory_gb", "planned_weights_gb", "prefill_tokens_a_second"):
        console.print(f"{name}: {report.get(name)}", highlight=False)
    names = ("mode", "batch", "context", "num_drafts", "hit_rate", "distinct_tokens", "step_ms")
    more = ("tokens_a_step", "swap_in_gb_s")
    users = ("as_accepted_a_user", "as_accepted_a_gpu", "as_accepted_node")
    print_steps(f"{title}steps, and tokens a second", report["rows"], console, (*names, *more, *users))


def wait_for(processes: Sequence[BaseProcess], until: float) -> bool:
    """Wait for processes, and kill the rest at ``until`` or when one of them fails, because they wait for it.

    Returns whether one has failed.
    """
    running = list(processes)
    while running and not any(process.exitcode for process in processes):
        left_secs = until - time.monotonic()
        if left_secs <= 0:
            break
        wait([process.sentinel for process in running], left_secs)
        running = [process for process in running if process.is_alive()]
    has_failed = any(process.exitcode for process in processes)
    for process in processes:
        process.kill()
        process.join()
    return has_failed


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    arguments = parse(argv)
    # A time of the monotonic clock, which the processes of all ranks share.
    arguments.ends_at = started + arguments.seconds - GRACE_SECS
    written = arguments.out.with_suffix(".json")
    written.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        arguments.model_path = arguments.model_path or Path(directory) / "model"
        if not (arguments.model_path / "config.json").exists():
            write_published(
                arguments.model_path,
                "deepseek_v32",
                num_hidden_layers=arguments.layers,
                num_nextn_predict_layers=1,
                in_fp8=True,
                in_int4=arguments.int4 is not None,
                rounds_tokens=arguments.int4 == "w4a8",
            )
        size = arguments.dp_size
        places = [RankPlace(rank, size, f"{directory}/ranks") for rank in range(size)]
        processes = [get_context("spawn").Process(target=run, args=(arguments, place)) for place in places]
        for process in processes:
            process.start()
        has_failed = wait_for(processes, started + arguments.seconds)
    if written.exists():
        print_report(json.loads(written.read_text()), make_console())
    return int(has_failed or not written.exists())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model-path", type=Path, help="directory with the config.json to use; written if it has none"
    )
    add_node_options(parser)
    parser.set_defaults(
        load_format="dummy", kv_cache_dtype="fp8_e4m3", chunk=2048, modes=["hisparse", "dense"]
    )
    # ``make_settings`` reads no_graphs, which is an option of decode_step alone.
    parser.set_defaults(micro_batch_min_bs=0, no_graphs=False)
    if torch.cuda.is_available():
        parser.set_defaults(device="cuda:0")  # the first GPU; collectives need its number
    parser.add_argument(
        "--layers", type=int, default=61, help="layers of DeepSeek-V3.2, where --model-path has no model"
    )
    parser.add_argument(
        "--int4",
        nargs="?",
        const="w4a16",
        choices=["w4a16", "w4a8"],
        help="routed experts in four bits, all others in fp8; w4a8: with inputs rounded to fp8",
    )
    parser.add_argument("--dp-size", type=int, default=torch.cuda.device_count() or 2, help="number of ranks")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[64, 8, 1, 32, 16], help="requests of each rank"
    )
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[32768, 65536],
        help="tokens of each prompt, multiples of --chunk",
    )
    parser.add_argument(
        "--computed-tokens",
        type=int,
        default=1 << 20,
        help="most tokens of the prompt that are computed; a longer context repeats their KV",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        nargs="+",
        default=[0.1, 0.27],
        help="jitter of the scores; the defaults give 90%% and 67%% hits at 32k",
    )
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3, 1], choices=range(MAX_DRAFTS + 1))
    parser.add_argument(
        "--collectives",
        type=int,
        nargs="+",
        default=[1, 8, 16, 32, 64, 128, 256, 2048],
        help="tokens of each rank",
    )
    parser.add_argument("--collectives-only", action="store_true", help="stop after the collectives")
    parser.add_argument("--link-bytes", type=int, default=1 << 30, help="bytes of a copy")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=570.0, help="time limit of the whole call")
    parser.add_argument("--out", type=Path, default=OUT / "whole_node", help="JSON file, without its suffix")
    arguments = parser.parse_args(argv)
    if uneven := [context for context in arguments.context if context % arguments.chunk]:
        parser.error(f"--context {uneven[0]} is no multiple of --chunk {arguments.chunk}")
    if uneven := [
        c for c in arguments.context if c > arguments.computed_tokens and c % arguments.computed_tokens
    ]:
        parser.error(f"--context {uneven[0]} is no multiple of --computed-tokens {arguments.computed_tokens}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
