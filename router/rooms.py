"""Rooms, and whose they are: a prefill node of several ranks gives rank ``room % num_ranks`` the room."""

from __future__ import annotations

import secrets

NUM_ROOMS = 1 << 63


def draw_room(rank: int = 0, num_ranks: int = 1) -> int:
    """A random room of ``rank``, all of which are equally likely; of one rank, any room."""
    return secrets.randbelow(NUM_ROOMS // num_ranks) * num_ranks + rank
