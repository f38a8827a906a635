"""How long one request keeps a decode node's front from all others, and its engine from its next step.

    python bench/front_stalls.py

Serves on the CPU with an engine that answers at once, and sends one request after the other from another
process. The lag is how late a timer of 1 ms in the front's event loop fires at the latest; the loop's own
share of it is its CPU time between two such timers, which other processes do not change.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from api.app import Front
from api.text_codec import TextCodec
from checkpoints.make_tiny import write_tokenizer
from decode_node.server import create_decode_app
from service.engine_link import EngineLink
from service.engine_messages import EngineReady, EngineStats, Generate, GenerateGroup, RequestStats, Tokens
from service.engine_sockets import EngineSocket
from service.listening import Listener
from service.metrics import FrontMetrics
from service.settings import DecodeSettings
from vocabulary import FinishReason, Mode, TokenLogprob

CONTEXT = 163_840
TOKENS_PER_MESSAGE = 16
ROOM = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
CHAT = [{"role": "user", "content": "a"}]


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body of each request; nothing else of it stays in memory."""

    def completion(name: str, prompt: object, **options: int) -> tuple[str, str, bytes]:
        body = {"prompt": prompt, "max_tokens": 2, **options, **ROOM}
        return name, "/v1/completions", json.dumps(body, separators=(",", ":")).encode()

    ids = [i % 250 for i in range(131_072)]
    yield completion("a prompt of 5 characters", "hello")
    yield completion("a prompt of 128k ids, n = 128", ids, n=128)
    yield completion("8 prompts of 128k ids", [ids] * 8)
    yield completion("4,096 prompts of 1,000 characters", ["the page pool " * 71] * 4096)
    yield completion("4,096 tokens with 20 logprobs", "a", max_tokens=4096, logprobs=20)
    yield completion("32 prompts of 100k ids, n = 128", [[7] * 100_000] * 32, n=128)
    yield completion("16 MiB of prompts [0]", [[0]] * (4 * (1 << 20) - 100))
    chat = {"messages": CHAT, "max_tokens": 4096, "logprobs": True, "top_logprobs": 20, **ROOM}
    yield "a chat of 4,096 tokens with 20 logprobs", "/v1/chat/completions", json.dumps(chat).encode()


def run_engine(endpoint: str, longest: Any) -> None:
    """Answers each sample at once; keeps in ``longest`` its longest turn of taking messages in."""
    socket = EngineSocket([endpoint])
    socket.send(EngineReady(CONTEXT, CONTEXT, CONTEXT))
    step = 0
    while True:
        began = time.perf_counter()
        groups = [message for message in socket.receive() if isinstance(message, GenerateGroup)]
        longest.value = max(longest.value, time.perf_counter() - began)
        for group in groups:
            for sample in group.samples:
                answer(socket, sample)
        step += 1
        if step % 64 == 1:
            socket.send(EngineStats({}, {}, 0, 0, 0, step))
        if not groups:
            time.sleep(0.001)


def answer(socket: EngineSocket, sample: Generate) -> None:
    num_tokens, num_top = sample.sampling.max_new_tokens, sample.sampling.num_logprobs
    for start in range(0, num_tokens, TOKENS_PER_MESSAGE):
        stop = min(start + TOKENS_PER_MESSAGE, num_tokens)
        token_ids = tuple(97 + i % 26 for i in range(start, stop))
        top = tuple((97 + i, -float(i)) for i in range(num_top or 0))
        logprobs = () if num_top is None else tuple(TokenLogprob(i, -0.5, top) for i in token_ids)
        finish = FinishReason.LENGTH if stop == num_tokens else None
        socket.send(Tokens(sample.request_id, token_ids, logprobs, finish, stats=RequestStats(Mode.DENSE)))


def send(url: str, body: bytes, took: Queue[tuple[int, float]]) -> None:
    began = time.perf_counter()
    status = httpx.post(url, content=body, timeout=300, trust_env=False).status_code
    took.put((status, time.perf_counter() - began))


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tokenizer(directory)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        gc.freeze()  # as a node does
        link = EngineLink([f"ipc://{directory}/engine.ipc"], health_timeout_secs=300.0)
        settings = DecodeSettings(model_path=directory, served_model_name="tiny")
        codec = TextCodec(tokenizer, len(tokenizer))
        front = Front("decode", settings, codec, link, FrontMetrics(), holds_output=True)
        await measure(front, f"ipc://{directory}/engine.ipc")


async def measure(front: Front, endpoint: str) -> None:
    """Serve the requests and print a row for each."""
    processes = multiprocessing.get_context("spawn")
    longest = processes.Value("d", 0.0)
    engine = processes.Process(target=run_engine, args=(endpoint, longest), daemon=True)
    listener = Listener("127.0.0.1", 0)
    server = listener.server(create_decode_app(front))
    front.link.start()
    engine.start()
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    while front.link.ready is None:
        await asyncio.sleep(0.05)
    table = Table("request", "status", "seconds", "lag, ms", "of it the loop's, ms", "engine's intake, ms")
    for name, path, body in bodies():
        longest.value = 0.0
        took: Queue[tuple[int, float]] = processes.Queue()
        url = f"http://127.0.0.1:{listener.port}{path}"
        client = processes.Process(target=send, args=(url, body, took), daemon=True)
        client.start()
        lag = share = 0.0
        while took.empty():
            began, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            lag = max(lag, time.perf_counter() - began - 0.001)
            share = max(share, time.thread_time() - cpu)
        status, secs = took.get()
        client.join()
        figures = (lag * 1e3, share * 1e3, longest.value * 1e3)
        table.add_row(name, str(status), f"{secs:.2f}", *(f"{figure:.0f}" for figure in figures))
    Console(width=140).print(table)
    engine.kill()
    server.should_exit = True
    await serving
    front.link.close()


if __name__ == "__main__":
    asyncio.run(main())
