"""Clients of the soak: they mix modes, streams and lengths, disconnect early, and check every answer.

A request ends with the right tokens, with an error that has a status and a message, or because its client
left. Everything else is a violation: other tokens, an answer that breaks off without an error, no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.integration.wrong_rows import ROW

REQUEST_TIMEOUT_SECS = 120.0
"""More than all timeouts of the nodes together, so no request may take longer to end."""
LEAVES_BY_ITSELF = 0.15
"""Share of the requests whose client leaves, those in storms not counted."""
ERROR_STATUSES = (502, 503, 504)
MODES: tuple[bool | str, ...] = (True, False, "auto")

Prompt = tuple[int, ...]
Json = dict[str, Any]


def body_of(prompt: Prompt, num_new_tokens: int, hisparse: bool | str, *, stream: bool = False) -> Json:
    params = {"temperature": 0, "max_new_tokens": num_new_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params, "hisparse": hisparse, "stream": stream}


class Violation(Exception):
    """An answer that no node may give."""


@dataclass
class LostStream:
    """A stream that had begun and ended in an error. Times are of the monotonic clock."""

    began_at: float
    ended_at: float
    error: str


@dataclass
class Load:
    """``num_clients`` clients at once. ``expected``: the tokens of each prompt, for the longest request."""

    url: str
    expected: Mapping[Prompt, Sequence[int]]
    num_clients: int
    random: random.Random
    rows_may_be_wrong: bool = False
    """Whether memory is damaged; an error may then name a row, or say that nodes were lost with a request."""
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Number of errors by message, without words that have digits, such as addresses."""
    violations: list[str] = field(default_factory=list)
    lost_streams: list[LostStream] = field(default_factory=list)
    num_tokens: int = 0
    num_storms: int = 0

    def __post_init__(self) -> None:
        self._in_flight: set[asyncio.Task[str]] = set()
        self._over = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_SECS, limits=limits)

    async def run(self) -> None:
        """Run the clients until ``stop``; requests in flight then end by themselves."""
        async with self._http:
            await asyncio.gather(*(self._client() for _ in range(self.num_clients)))

    def stop(self) -> None:
        self._over.set()

    async def storms(self) -> None:
        """Make most clients leave at once, from time to time."""
        while not self._over.is_set():
            await asyncio.sleep(self.random.uniform(1.0, 6.0))
            self.num_storms += 1
            for task in tuple(self._in_flight):
                if self.random.random() < 0.7:
                    task.cancel()

    async def _client(self) -> None:
        while not self._over.is_set():
            task = asyncio.create_task(self._ask())
            self._in_flight.add(task)
            patience = REQUEST_TIMEOUT_SECS
            if self.random.random() < LEAVES_BY_ITSELF:
                patience = self.random.uniform(0.0, 1.5)
            done, _ = await asyncio.wait([task], timeout=patience)
            if not done and patience == REQUEST_TIMEOUT_SECS:
                self.violations.append(f"no end within {patience} s")
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
            self._in_flight.discard(task)
            self._note(task)
            if not task.cancelled() and task.exception() is None and task.result() != "right":
                await asyncio.sleep(self.random.uniform(0.2, 2.0))  # as a client does before it tries again

    def _note(self, task: asyncio.Task[str]) -> None:
        if task.cancelled():
            self.outcomes["client left"] += 1
        elif (error := task.exception()) is not None:
            self.outcomes["violation"] += 1
            self.violations.append(f"{type(error).__name__}: {error}")
        else:
            self.outcomes[task.result()] += 1

    async def _ask(self) -> str:
        prompt = self.random.choice(tuple(self.expected))
        num_new_tokens = self.random.randint(1, len(self.expected[prompt]))
        expected = list(self.expected[prompt][:num_new_tokens])
        is_streamed = self.random.random() < 0.5
        body = body_of(prompt, num_new_tokens, self.random.choice(MODES), stream=is_streamed)
        if is_streamed:
            outcome, tokens = await self._streamed(body)
        else:
            outcome, tokens = await self._whole(body)
        if tokens != expected[: len(tokens)] or (outcome == "right" and tokens != expected):
            raise Violation(f"{body['hisparse']}: tokens {tokens}, expected {expected}")
        self.num_tokens += len(tokens)
        return outcome

    async def _whole(self, body: Json) -> tuple[str, list[int]]:
        answer = await self._http.post(f"{self.url}/generate", json=body)
        if answer.status_code != 200:
            return self._error(answer.status_code, answer.json()), []
        return "right", answer.json()["output_ids"]

    async def _streamed(self, body: Json) -> tuple[str, list[int]]:
        tokens: list[int] = []
        began_at = time.monotonic()
        async with self._http.stream("POST", f"{self.url}/generate", json=body) as answer:
            if answer.status_code != 200:
                return self._error(answer.status_code, json.loads(await answer.aread())), []
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "right", tokens
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        message = event["error"]["message"]
                        if not self._is_of_rows(message):
                            self.lost_streams.append(LostStream(began_at, time.monotonic(), message))
                        return self._error(None, event), tokens
                    tokens = event["output_ids"]
        raise Violation(f"a stream ended after {len(tokens)} tokens without a word")

    def _error(self, status: int | None, body: Json) -> str:
        message = body["error"]["message"]
        is_known = status in (None, *ERROR_STATUSES) or (status == 500 and self._is_of_rows(message))
        if not message or not is_known:
            raise Violation(f"status {status} with {message!r}")
        words = (word for word in message.split() if not any(character.isdigit() for character in word))
        self.errors[" ".join(words)[:100]] += 1
        return f"error {status}" if status else "error in the stream"

    def _is_of_rows(self, message: str) -> bool:
        names = ROW.search(message) is not None or "were lost with this request" in message
        return self.rows_may_be_wrong and names
