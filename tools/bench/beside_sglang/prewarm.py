"""Compiles the kernels of the guest, SGLang, before its turns, in parallel processes.

    python -m tools.bench.beside_sglang.prewarm WARMING

``__main__.py`` runs this command with the guest's packages; ``WARMING`` is the JSON of a ``Warming``. Each of
the processes runs it again, with ``--jobs`` and its share of the jobs. By itself SGLang's engine would
compile the kernels one after the other, while it starts and at the first request of each shape. It still
compiles what is missing, so a job that fails costs time and nothing else. DeepGEMM compiles a kernel for a
shape when it is called with it; SGLang's own modules are compiled by the functions that load them.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.bench.beside_sglang.environment import guest_command

Job = tuple[Any, ...]
"""A kernel to compile, as JSON takes it: a kind, and the sizes or names that ``run_job`` matches behind it.
For example, ("product", 16, 7168, 2048) is a linear layer of 16 rows with 7168 outputs and 2048 inputs."""
JIT_MODULES: Final[tuple[Job, ...]] = (
    ("activation.activation", "activation_module", "bfloat16"),
    ("attention.clamp_position", "_jit_clamp_position_module", "int64"),
    ("attention.concat_mla", "_jit_concat_mla_absorb_q_module"),
    ("attention.concat_mla", "_jit_concat_mla_k_module"),
    ("attention.dsv4.elementwise", "_jit_main_q_indexer_rope_first_quant_module", "bfloat16"),
    ("attention.dsv4.topk", "_jit_topk_v2_module"),
    ("attention.fused_metadata_copy", "_jit_fused_metadata_copy_module", 0, True, True),
    ("attention.fused_store_index_cache", "_jit_dsa_fused_store_module", "bfloat16", "int64", 64),
    ("attention.rope", "_jit_fused_rope_module", False, 64, "bfloat16", "bfloat16"),
    ("attention.rope", "_jit_rotary_embedding_module"),
    ("kvcache.set_mla_kv_buffer", "set_mla_kv_buffer_module", 528, 128, True),
    ("moe.moe_align", "_jit_moe_align_module", "int32"),
    ("moe.moe_fused_gate", "_jit_moe_fused_gate_module"),
    ("quantization.dsv32.elementwise", "_jit_k_indexer_norm_rope_module", "bfloat16"),
    ("quantization.dsv32.elementwise", "_jit_k_indexer_norm_rope_store_module", "bfloat16", 64),
    ("quantization.hadamard", "_jit_hadamard_module", "bfloat16"),
    ("quantization.per_token_group_quant_8bit_v2", "_jit_module", "bfloat16", "float8_e4m3fn", True),
)
"""Modules below ``sglang.kernels.ops``, the functions that load them, and their arguments; a name of a dtype
stands for it."""
SWAP_IN_THREADS: Final = 960
"""Threads of a block of SGLang's swap-in kernel, its default."""
_DTYPES: Final = ("bfloat16", "float8_e4m3fn", "int32", "int64")


@dataclass(frozen=True)
class Warming:
    """The shapes that are compiled, by how many processes, and for how long."""

    model: str
    rows: tuple[int, ...]
    """Numbers of tokens of a forward: those of steps, and the largest one, that of a prompt's chunk."""
    item_bytes: int
    buffer: int
    """Entries of a hot buffer."""
    num_processes: int
    secs: float


def products(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return outputs and inputs of the linear layers that DeepGEMM computes."""
    hidden, heads, query = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    dense, expert = config["intermediate_size"], config["moe_intermediate_size"]
    shared = expert * config["n_shared_experts"]
    return [
        (query + latent, hidden),
        (heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]), query),
        (hidden, heads * config["v_head_dim"]),
        indexer_queries(config),
        (config["index_head_dim"], hidden),
        (2 * dense, hidden),
        (hidden, dense),
        (2 * shared, hidden),
        (hidden, shared),
    ]


def indexer_queries(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return outputs and inputs of the indexer's queries."""
    return config["index_n_heads"] * config["index_head_dim"], config["q_lora_rank"]


def jobs_of(warming: Warming, config: Mapping[str, Any]) -> list[Job]:
    """Return the jobs, those that take longest first."""
    swap_in = ("kvcache.hisparse", "_jit_sparse_module", warming.item_bytes)
    sizes = (SWAP_IN_THREADS, config["index_topk"], warming.buffer, True)
    jobs: list[Job] = [("norm",), ("jit", *swap_in, *sizes), *(("jit", *job) for job in JIT_MODULES)]
    most = max(warming.rows)
    jobs.append(("prompt logits", most, 2 * most))
    for rows in warming.rows:
        if rows < most:  # a decode step's
            jobs.append(("paged logits", rows))
            jobs.append(("half product", rows, *indexer_queries(config)))
        jobs += [("product", rows, *each) for each in products(config)]
    return jobs


def run_job(job: Job) -> None:
    """Compile one kernel, in a process of the guest. Raises whatever SGLang's code raises."""
    import torch

    match job:
        case ("jit", str(module), str(function), *arguments):
            loaded = importlib.import_module(f"sglang.kernels.ops.{module}")
            values = [getattr(torch, str(each)) if each in _DTYPES else each for each in arguments]
            getattr(loaded, function)(*values)
        case ("norm",):
            from flashinfer.norm import rmsnorm

            row = torch.ones(1, 7168, device="cuda", dtype=torch.bfloat16)
            rmsnorm(row, row[0])
        case ("product" | "half product" as kind, rows, outputs, inputs):
            import deep_gemm

            num_sms = deep_gemm.get_num_sms()
            if kind == "half product":  # queries are computed beside keys, each on half of the GPU
                deep_gemm.set_num_sms(8 * math.ceil(num_sms // 2 / 8))
            left = _fp8(rows, inputs), torch.ones(rows, inputs // 128, device="cuda")
            scales = torch.ones(-(-outputs // 128), inputs // 128, device="cuda")
            out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
            deep_gemm.fp8_gemm_nt(left, (_fp8(outputs, inputs), scales), out)
            deep_gemm.set_num_sms(num_sms)
        case ("paged logits", rows):
            _paged_logits(rows)
        case ("prompt logits", rows, num_keys):
            import deep_gemm

            starts = torch.zeros(rows, device="cuda", dtype=torch.int32)
            keys = _fp8(num_keys, 128), torch.ones(num_keys, device="cuda")
            weights = torch.ones(rows, 64, device="cuda")
            query, ends = _fp8(rows, 64, 128), torch.full_like(starts, num_keys)
            deep_gemm.fp8_mqa_logits(query, keys, weights, starts, ends, clean_logits=False)
        case _:
            raise ValueError(f"job {job}")
    torch.cuda.synchronize()


def _paged_logits(rows: int) -> None:
    """Compile the indexer's scores of a decode step with ``rows`` tokens, and the plan of their work."""
    import deep_gemm
    import torch

    num_pages, context = 640, 32768
    lengths = torch.full((rows, 1), context, device="cuda", dtype=torch.int32)
    pages = torch.zeros(rows, num_pages, device="cuda", dtype=torch.int32)
    keys = torch.zeros(num_pages, 64, 1, 132, device="cuda", dtype=torch.uint8)
    planned = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, deep_gemm.get_num_sms())
    query, weights = _fp8(rows, 1, 64, 128), torch.ones(rows, 64, device="cuda")
    inputs = query, keys, weights, lengths, pages, planned, 64 * num_pages
    deep_gemm.fp8_paged_mqa_logits(*inputs, clean_logits=False)


def _fp8(*sizes: int) -> Any:
    import torch

    return torch.zeros(*sizes, device="cuda", dtype=torch.float8_e4m3fn)


def outcomes(output: str) -> tuple[int, list[str]]:
    """Return how many kernels were compiled, and the lines of those that failed."""
    lines = output.splitlines()
    failed = [line for line in lines if line.startswith("failed ")]
    return sum(line.startswith("compiled ") for line in lines), failed


def warm(warming: Warming) -> int:
    """Compile everything within ``warming.secs``. ``Run.process``, which started this process, kills its
    group when it ends, and with it the jobs that still run."""
    config = json.loads((Path(warming.model) / "config.json").read_text())
    jobs = jobs_of(warming, config)
    deadline = time.monotonic() + warming.secs
    shares = [jobs[number :: warming.num_processes] for number in range(warming.num_processes)]
    processes = [
        subprocess.Popen(guest_command("prewarm", "--jobs", json.dumps(share))) for share in shares if share
    ]
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    return 0


def run_jobs(jobs: Sequence[Job]) -> int:
    """Run the jobs one after the other, and print a line for each, which ``outcomes`` reads."""
    for job in jobs:
        started = time.perf_counter()
        try:
            run_job(tuple(job))
            outcome = "compiled"
        except Exception as error:  # the engine compiles the kernel itself, if it needs it
            outcome = f"failed {type(error).__name__}: {str(error)[:300]!r}"
        print(f"{outcome} {job} in {time.perf_counter() - started:.1f} s", flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    if argv[0] == "--jobs":
        return run_jobs(json.loads(argv[1]))
    found = json.loads(argv[0])
    return warm(Warming(**{**found, "rows": tuple(found["rows"])}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
