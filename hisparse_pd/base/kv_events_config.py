"""``--kv-events-config``: where a node publishes which pages of KV its prefixes have.

The JSON has the keys of vLLM's and SGLang's option of this name. ``NodeSettings`` checks it;
``protocol/kv_event_sockets.py`` opens what it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator

from hisparse_pd.base.settings import MAX_PORT, FrozenSettings

_TCP = re.compile(r"(tcp://(?:\*|\[[0-9A-Fa-f:.%*]+\]|[^\s:/\[\]]+)):([0-9]{1,5})")
_IPC = re.compile(r"ipc://\S+")
_EXAMPLE = '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'


class KvEventsConfig(FrozenSettings):
    """The parsed JSON. Counts are of batches, each of what one turn of an engine changed, or a part of it."""

    publisher: Literal["null", "zmq"] = "null"
    """null: nothing is published."""
    endpoint: str = "tcp://*:5557"
    """Address of rank 0's PUB socket. With ``*`` or ``::``, and for ipc, the socket binds; else it
    connects."""
    replay_endpoint: str | None = None
    """Address that rank 0's replay socket binds; None: it has none."""
    buffer_steps: int = Field(10_000, ge=1, le=1_000_000)
    """Most batches that can be replayed."""
    hwm: int = Field(1_000, ge=1, le=1_000_000)
    """Most batches that wait for one slow subscriber; further ones are lost to it."""
    max_queue_size: int = Field(1_000, ge=1, le=1_000_000)
    """Most batches that wait to be sent; further ones are dropped."""
    topic: str = Field("", max_length=256)

    @classmethod
    def from_json(cls, text: str) -> KvEventsConfig:
        """Parse the option's value; an empty one means the defaults. Raises ValueError."""
        if not text:
            return cls()
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError("; ".join(map(_in_words, error.errors()))) from error

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None and not _TCP.fullmatch(value) and not _IPC.fullmatch(value):
            raise ValueError(f"{value!r} is neither tcp://HOST:PORT nor ipc://PATH")
        return value

    @property
    def is_on(self) -> bool:
        return self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether subscribers connect to the PUB socket, and not it to them."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")

    def of_rank(self, rank: int) -> Self:
        """Return the configuration with this rank's addresses: its ports are higher by ``rank``."""
        if rank == 0:
            return self
        replay = self.replay_endpoint
        moved = {
            "endpoint": _moved(self.endpoint, rank),
            "replay_endpoint": None if replay is None else _moved(replay, rank),
        }
        return self.model_copy(update=moved)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError unless each of so many ranks has addresses of its own."""
        firsts: list[int] = []
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is None:
                continue
            if (parts := _TCP.fullmatch(endpoint)) is None:
                if num_ranks > 1:
                    raise ValueError(
                        f"{endpoint} with {num_ranks} ranks: give a tcp:// endpoint, whose port each rank "
                        "raises by its number"
                    )
                continue
            first = int(parts[2])
            if not 1 <= first <= MAX_PORT - num_ranks + 1:
                raise ValueError(
                    f"{endpoint} with {num_ranks} ranks takes the ports up to {first + num_ranks - 1}, and "
                    f"they are from 1 to {MAX_PORT}"
                )
            firsts.append(first)
        if self.binds and len(firsts) == 2 and abs(firsts[0] - firsts[1]) < num_ranks:
            raise ValueError(
                f"endpoint {self.endpoint} and replay_endpoint {self.replay_endpoint} with {num_ranks} ranks "
                "take the same port; put them further apart"
            )


def _in_words(problem: Mapping[str, Any]) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return f"{message}; expected a JSON object such as {_EXAMPLE}"
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {name!r}; allowed: {', '.join(KvEventsConfig.model_fields)}"
    return f"{name}: {message}"


def _moved(endpoint: str, rank: int) -> str:
    """Return a tcp endpoint with its port raised by ``rank``; ``check_ranks`` allows no other."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
