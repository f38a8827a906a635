"""The guest of the benchmark in a process of its own: SGLang's offline engine, or its HTTP server.

    python -m tools.bench.beside_sglang.guest TURN

``run.py`` starts and ends it. ``TURN`` is the JSON of a ``GuestTurn``. With a port the process serves until
it is ended (``over_http.py``). Without one it measures a cell for each batch size: all requests are sent at
once, and SGLang prefills what waits before it decodes, so that decode steps have the full batch. Figures come
from the scheduler's log (``scheduler_log.py``); beside it the process writes what a client sees and how fast
the GPU receives over PCIe.

Three things are not stock, and hold in the engine's own processes as well, which import this module anew:

- Dummy weights are drawn from a normal distribution, with norms at 1. SGLang's lie within 0.001, which fp8
  rounds to 0 nearly everywhere.
- A token's experts are drawn for its place in the batch. With dummy weights all requests soon generate the
  same token, and a batch would read the weights of a few experts only.
- The main memory that seems to be free is ``BESIDE_SGLANG_HOST_BYTES``: on a virtual machine whose memory
  grows when it is used, SGLang would refuse the host pool.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from tools.bench.beside_sglang.environment import HOST_BYTES, gpu_number
from tools.bench.beside_sglang.scheduler_log import CELL, DONE

PAGE_SIZE: Final = 64
TOP_K: Final = 2048
CHUNK: Final = 8192
NUM_SPARE: Final = 8
"""Requests beyond the largest batch that may run and that the pools have room for: SGLang admits by an
estimate of what running requests will still need, and might otherwise admit fewer than the batch."""
FIRST_ID: Final = 16
NUM_LAST_IDS: Final = 256
"""Token ids at the beginning and the end of the vocabulary that no prompt has."""
_SAMPLE_SECS: Final = 0.02


@dataclass(frozen=True)
class GuestTurn:
    """The task of the guest's process."""

    model: str
    mode: str
    """``dense`` or ``hisparse``."""
    context: int
    """Tokens of each prompt."""
    batches: tuple[int, ...]
    """Requests of each cell."""
    num_output_tokens: int
    buffer: int
    """Entries of a hot buffer; not used if dense."""
    vocabulary: int
    """Number of the model's token ids."""
    port: int = 0
    """Port of the HTTP server; 0: no server."""
    stream_interval: int = 1
    """Tokens of a chunk that the server sends."""
    kv_cache_dtype: str = "fp8_e4m3"
    """Dtype of KV, in our node's words."""
    num_drafts: int = 0
    """Tokens that the MTP layer guesses for a request in a step."""


def tokens_of_request(context: int, num_output_tokens: int) -> int:
    """Return the tokens that pools have for one request: whole pages, and one more."""
    return PAGE_SIZE * (math.ceil((context + num_output_tokens) / PAGE_SIZE) + 1)


def engine_arguments(turn: GuestTurn) -> dict[str, Any]:
    """Return the arguments of SGLang's engine."""
    largest = max(turn.batches)
    of_request = tokens_of_request(turn.context, turn.num_output_tokens)
    num_tokens = (largest + NUM_SPARE) * of_request
    arguments: dict[str, Any] = {
        "model_path": turn.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "context_length": turn.context + CHUNK,  # an answer is shorter than a chunk
        "max_running_requests": largest + NUM_SPARE,
        "max_total_tokens": num_tokens,
        "mem_fraction_static": 0.85,
        "chunked_prefill_size": CHUNK,
        "cuda_graph_bs_decode": sorted(turn.batches),
        "cuda_graph_backend_prefill": "disabled",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "kv_cache_dtype": turn.kv_cache_dtype,
        "decode_log_interval": 20,
        "random_seed": 1,
        "log_level": "info",
    }
    if turn.kv_cache_dtype == "bfloat16":
        arguments["dsa_decode_backend"] = "flashmla_sparse"  # the archive lacks FlashAttention 3
    if turn.num_drafts:
        arguments |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": turn.num_drafts,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": turn.num_drafts + 1,
        }
    if turn.mode == "hisparse":
        # Hot buffers with a page of each request, and prompts that are on their way to the host pool.
        device = largest * (turn.buffer + PAGE_SIZE) + 4 * of_request
        ratio = max(2, math.ceil(num_tokens / device))
        settings = {"top_k": TOP_K, "device_buffer_size": turn.buffer, "host_to_device_ratio": ratio}
        arguments |= {
            "enable_hisparse": True,
            "disable_radix_cache": True,
            "max_total_tokens": PAGE_SIZE * math.ceil(device / PAGE_SIZE),
            "hisparse_config": json.dumps(settings),
        }
    return arguments


def server_arguments(turn: GuestTurn) -> dict[str, Any]:
    """Return the arguments of SGLang's server, whose answers have text and say what was cached."""
    return engine_arguments(turn) | {
        "skip_tokenizer_init": False,
        "host": "127.0.0.1",
        "port": turn.port,
        "stream_interval": turn.stream_interval,
        "enable_cache_report": True,
    }


def draw_weights(model: Any) -> None:
    """Fill the parameters of SGLang's model in place, the same in every run."""
    import torch

    state = model.state_dict()
    for number, (name, value) in enumerate(state.items()):
        if not torch.is_floating_point(value) or "cos_sin" in name:
            continue
        if name.endswith("_scale_inv"):
            weight = state[name.removesuffix("_scale_inv")]
            value.fill_(weight.shape[-1] ** -0.5)
        elif value.dim() < 2:
            value.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            generator = torch.Generator(value.device).manual_seed(number)
            is_fp8 = value.dtype.itemsize == 1
            scale = 1.0 if is_fp8 or "embed" in name else value.shape[-1] ** -0.5
            for part in value.flatten(0, -2).split(8192):
                drawn = torch.randn(part.shape, device=value.device, generator=generator)
                part.copy_(drawn.mul_(scale).to(value.dtype))


def drawn_experts(forward: Callable[..., Any], num_tokens: int) -> Callable[..., Any]:
    """Return a gate's ``forward`` that computes its logits, and returns drawn ones: a token's experts follow
    from its place among up to ``num_tokens``, in each layer others."""
    import torch

    drawn: dict[int, Any] = {}

    def of_places(gate: Any, hidden_states: Any, *arguments: Any, **options: Any) -> Any:
        logits = forward(gate, hidden_states, *arguments, **options)
        if id(gate) not in drawn:
            generator = torch.Generator(logits.device).manual_seed(len(drawn))
            shape = num_tokens, logits.shape[1]
            drawn[id(gate)] = torch.randn(shape, device=logits.device, generator=generator).to(logits.dtype)
        return drawn[id(gate)][: len(logits)]

    return of_places


def adapt_sglang() -> None:
    """Change in this process what the module's docstring names."""
    import psutil

    importlib.import_module("sglang.srt.entrypoints.engine")  # first, as in SGLang's own start
    loader = importlib.import_module("sglang.srt.model_loader.loader")
    vars(loader)["initialize_dummy_weights"] = draw_weights
    gate = importlib.import_module("sglang.srt.models.deepseek_v2").MoEGate
    gate.forward = drawn_experts(gate.forward, CHUNK)
    if host_bytes := int(os.environ.get(HOST_BYTES, "0")):
        measured = psutil.virtual_memory

        def seen() -> Any:
            return measured()._replace(available=host_bytes, total=host_bytes)

        psutil.virtual_memory = seen


class PcieRate:
    """Samples, in a thread, how many bytes a second the GPU receives over PCIe."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._is_on = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def start(self) -> None:
        self.samples = []
        self._is_on.set()

    def stop(self) -> float | None:
        """Return the median since ``start``, or None where the driver has no counter."""
        self._is_on.clear()
        return sorted(self.samples)[len(self.samples) // 2] if self.samples else None

    def _sample(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(gpu_number())
            while self._is_on.wait():
                kilobytes = pynvml.nvmlDeviceGetPcieThroughput(gpu, pynvml.NVML_PCIE_UTIL_RX_BYTES)
                self.samples.append(1024.0 * kilobytes)
                time.sleep(_SAMPLE_SECS)
        except Exception as error:  # the figure is an extra one: the cell stands without it
            print(f"no PCIe counter: {error!r}", flush=True)


def run_cell(engine: Any, turn: GuestTurn, batch: int, rate: PcieRate) -> dict[str, Any]:
    """Run ``batch`` requests to their end, and return what a client sees of it."""
    ids = range(FIRST_ID, turn.vocabulary - NUM_LAST_IDS)
    prompts = [random.Random(number).choices(ids, k=turn.context) for number in range(batch)]
    sampling = {"temperature": 0.0, "max_new_tokens": turn.num_output_tokens, "ignore_eos": True}
    arrivals: list[float] = []

    async def ask(prompt: list[int]) -> None:
        await engine.async_generate(input_ids=prompt, sampling_params=sampling)

    async def ask_and_watch(prompt: list[int]) -> None:
        """Ask for the last prompt's answer, whose tokens show when all prompts are prefilled."""
        stream = await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
        async for _ in stream:
            arrivals.append(time.perf_counter())
            if len(arrivals) == 2:
                rate.start()

    async def run() -> None:
        others = [asyncio.ensure_future(ask(prompt)) for prompt in prompts[:-1]]
        await asyncio.gather(*others, asyncio.ensure_future(ask_and_watch(prompts[-1])))

    started = time.perf_counter()
    engine.loop.run_until_complete(run())
    return {
        "batch": batch,
        "secs": time.perf_counter() - started,
        "last_ttft_secs": arrivals[0] - started,
        "pcie_bytes_a_second": rate.stop(),
    }


def serve(turn: GuestTurn) -> int:
    """Run SGLang's HTTP server until this process is ended."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    print(f"turn {asdict(turn)}, arguments {server_arguments(turn)}", flush=True)
    launch_server(ServerArgs(**server_arguments(turn)))
    return 1  # a server that ends by itself has failed


def main(argv: list[str]) -> int:
    found = json.loads(argv[0])
    turn = GuestTurn(**{**found, "batches": tuple(found["batches"])})
    started = time.perf_counter()
    adapt_sglang()
    if turn.port:
        return serve(turn)
    from sglang.srt.entrypoints.engine import Engine

    print(f"turn {asdict(turn)}, arguments {engine_arguments(turn)}", flush=True)
    engine = Engine(**engine_arguments(turn))
    start_secs = time.perf_counter() - started
    rate = PcieRate()
    for batch in turn.batches:
        print(CELL + json.dumps({"batch": batch}), flush=True)
        measured = run_cell(engine, turn, batch, rate) | {"start_secs": start_secs}
        time.sleep(0.2)  # the scheduler's last lines come before the mark
        print(DONE + json.dumps(measured), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the engine's processes are ended by the runner, with their group


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
if __name__ == "__mp_main__":
    adapt_sglang()
