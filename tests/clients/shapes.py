"""Schemas for the untrained model: its text is arbitrary, so only a grammar gives it a shape.

All are bounded, so that an answer with a token a byte ends before ``MAX_TOKENS``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

MAX_TOKENS = 1024
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 7}
"""Options that draw tokens, since a greedy untrained model may repeat itself."""


class Ticket(BaseModel):
    """One ticket of a desk."""

    kind: Literal["fault", "request", "question"]
    priority: Annotated[int, Field(ge=1, le=5)]
    room: Annotated[str, Field(max_length=8)]
    urgent: bool


class Mark(BaseModel):
    """One that is bounded without words for bounds, which some clients turn into prose for the model."""

    kind: Literal["fault", "request", "question"]
    urgent: bool


class Weather(BaseModel):
    """Look up the weather of a city."""

    city: Literal["Oslo", "Lima", "Accra"]
    days: Annotated[int, Field(ge=1, le=9)]


class Time(BaseModel):
    """Look up the time in a city."""

    city: Literal["Oslo", "Lima", "Accra"]


def tool_type(name: str) -> type[BaseModel]:
    """Return the shape of a tool's arguments."""
    tools: dict[str, type[BaseModel]] = {"Weather": Weather, "Time": Time}
    return tools[name]


QUESTION = "What will the weather be in Oslo?"
