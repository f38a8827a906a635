"""Whether a prefill node that this node registered with is alive, as far as can be known. Pure.

It answers heartbeats between two forwards, so one that computes for long falls silent. Its front, another
process, does not: when a heartbeat stays unanswered the bootstrap endpoint is asked, and the peer is lost
only when that does not say either that the run is alive, and has had all its time to. It does not say so of
an engine that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass

SUSPECT_AFTER_HEARTBEATS = 1.25
"""Silence, in heartbeat intervals, after which no room is entrusted to a peer until it is heard of again.

Early enough for the bootstrap endpoint to answer before a second heartbeat fails.
"""
_NEVER = float("inf")


@dataclass
class Liveness:
    """Times of ``time.monotonic``. Each event may come at any time and in any order."""

    heartbeat_interval_secs: float
    heartbeat_timeout_secs: float
    heard_at: float = 0.0
    """When the peer's last message came."""
    _confirmed_at: float = 0.0
    """When the bootstrap endpoint last said that the registered run is alive."""
    _denied_at: float = 0.0
    """When the last look-up began that did not confirm it: silence counts only with one that began in it."""
    _beat_at: float = 0.0
    _num_beats: int = 0
    unanswered_since: float = _NEVER
    """When the first heartbeat left that nothing followed: this node's own pauses are nobody's silence."""

    def heard(self, now: float) -> None:
        self.heard_at, self.unanswered_since = now, _NEVER

    def confirmed(self, now: float) -> None:
        self._confirmed_at, self.unanswered_since = now, _NEVER

    def denied(self, asked_at: float) -> None:
        self._denied_at = asked_at

    def beat(self, now: float) -> int | None:
        """The number of the heartbeat that is due now; None: none is."""
        if now - self._beat_at < self.heartbeat_interval_secs:
            return None
        self._beat_at = now
        self.unanswered_since = min(self.unanswered_since, now)
        self._num_beats += 1
        return self._num_beats

    def silence(self, now: float) -> float:
        """Seconds since the peer was last known to be alive."""
        return now - self._alive_at

    def is_suspect(self, now: float) -> bool:
        return self.silence(now) >= SUSPECT_AFTER_HEARTBEATS * self.heartbeat_interval_secs

    def is_lost(self, now: float, *, is_being_asked: bool) -> bool:
        """``is_being_asked``: a look-up is under way, which may confirm it yet."""
        had_time = now - self.unanswered_since >= self.heartbeat_timeout_secs - self.heartbeat_interval_secs
        is_denied = not is_being_asked and self._denied_at > self._alive_at
        return self.silence(now) >= self.heartbeat_timeout_secs and had_time and is_denied

    @property
    def _alive_at(self) -> float:
        return max(self.heard_at, self._confirmed_at)
