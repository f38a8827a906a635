"""Settings of ``hisparse-pd bench serve``: the endpoint, the load, and what its requests ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from hisparse_pd.base.settings import FrozenSettings, Secs

DEFAULT_URL = "http://127.0.0.1:8000/v1"
OPEN_LOOP_REQUESTS = 100
Count = Annotated[int, Field(ge=1)]


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


class ServingSettings(FrozenSettings):
    url: str = Field("", description=f"up to and with /v1; default: {DEFAULT_URL}")
    model: str = Field("", description="name in requests; default: the endpoint's first")
    api_key_env: str = Field("OPENAI_API_KEY", description="variable that holds the key")
    metrics_url: tuple[str, ...] = Field(
        (), description="/metrics of a decode node, for hit rate and swap-in; repeatable"
    )
    start_pair: Path | None = Field(
        None, description="checkpoint with which a pair is started on this machine, and stopped", title="DIR"
    )
    pair_options: str = Field("", description='of that pair, as in "--page-size 64"')

    concurrency: tuple[Count, ...] = Field(
        (), description="clients of closed loops; default: 1 2 4 8 16", title="N"
    )
    request_rate: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="instead: requests a second of open loops, at Poisson arrivals", title="RATE"
    )
    num_requests: Count | None = Field(
        None,
        description=f"of a point; default: 4 a client, 8 at least; {OPEN_LOOP_REQUESTS} in an open loop",
        title="INT",
    )
    duration_secs: Secs | None = Field(
        None, description="instead: start requests for so long, in seconds", title="FLOAT"
    )
    hisparse: tuple[Literal["true", "false", "auto", "none"], ...] = Field(
        ("none",),
        description="the request's field, several to compare point by point; none: leave it out",
        title="{true,false,auto,none}",
    )
    warmup: int = Field(2, ge=0, description="requests before each point")
    timeout_secs: Secs = Field(600.0, description="of a whole request, in seconds")
    seed: int = Field(0, ge=0, description="of prompts and arrivals")

    input_tokens: int = Field(1024, ge=1, description="of a prompt")
    output_tokens: int = Field(128, ge=1, description="of an answer")
    prompt_format: Literal["ids", "text"] = Field(
        "ids", description="text: words, about a token each, for endpoints that take no token ids"
    )
    token_range: tuple[int, int] = Field(
        (3, 250),
        description="LOW END: random ids are LOW to END - 1; every model has those of the default",
        title="ID",
    )
    distinct_prompts: int = Field(
        0,
        ge=0,
        description="send so many prompts in turns in all points, for a prefix cache to find; 0: all differ",
    )
    temperature: float = Field(0.0, ge=0, description="of requests")
    ignore_eos: bool = Field(
        True, description="send ignore_eos, for answers of exact length; off for endpoints that refuse it"
    )
    extra_body: Annotated[dict[str, Any], BeforeValidator(_json)] = Field(
        {}, description="further fields of a request", title="JSON"
    )
    out: Path | None = Field(
        None, description="JSON and PNG, without suffix; default: serving, in out/ of a checkout"
    )

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        low, end = self.token_range
        url = urlsplit(self.url or DEFAULT_URL)
        for holds, problem in (
            (
                not (self.concurrency and self.request_rate),
                "--concurrency and --request-rate exclude each other: a loop is closed or open",
            ),
            (
                not (self.num_requests and self.duration_secs),
                "--num-requests and --duration-secs exclude each other",
            ),
            (
                not (self.start_pair and self.url),
                "--start-pair and --url exclude each other: the pair is the endpoint",
            ),
            (self.start_pair or not self.pair_options, "--pair-options needs --start-pair"),
            (
                0 <= low < end,
                f"--token-range {low} {end} has no token; END is exclusive and must be above LOW",
            ),
            (
                url.scheme in ("http", "https") and url.netloc,
                f"--url {self.url}: expected http://HOST:PORT/v1",
            ),
        ):
            if not holds:
                raise ValueError(problem)
        return self
