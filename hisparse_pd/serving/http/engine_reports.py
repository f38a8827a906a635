"""The last reports of one rank's engine about itself, and whether it still makes progress.

``RankLink`` has one ``EngineReports``, and ``EngineLink`` notes each report in it. Health checks and status
pages are answered from it.
"""

from __future__ import annotations

import time

from hisparse_pd.base.settings import STARTUP_TIMEOUT_SECS
from hisparse_pd.engine.messages import EngineLoading, EngineReady, EngineStats


class EngineReports:
    """The latest reports of one engine."""

    def __init__(self) -> None:
        self.loading: EngineLoading | None = None
        """Latest progress of an engine that loads; None once it is ready."""
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.has_stats_since_stop = True
        """False from ``EngineLink.stop_accepting`` until the next ``stats`` come; true before and after."""
        self.last_stats_at = self.last_progress_at = time.monotonic()

    def note(self, report: EngineLoading | EngineReady | EngineStats) -> None:
        now = time.monotonic()
        match report:
            case EngineLoading():
                if report != self.loading:
                    self.last_progress_at = now
                self.loading = report
            case EngineReady():
                self.ready, self.loading = report, None
                self.last_stats_at = self.last_progress_at = now
            case EngineStats():
                # A running request takes no steps only while its grammar compiles. If any other takes none,
                # the engine stands still.
                has_to_step = report.num_running > report.num_without_grammar
                if self.stats is None or report.step != self.stats.step or not has_to_step:
                    self.last_progress_at = now
                self.last_stats_at = now
                self.stats, self.has_stats_since_stop = report, True

    @property
    def has_begun(self) -> bool:
        """Whether the engine has reported anything."""
        return self.ready is not None or self.loading is not None

    @property
    def num_rooms(self) -> int:
        """Rooms of the engine by its last report, and one more if that came before the node's shutdown: the
        engine may have begun a room since."""
        if self.stats is None:
            return 0
        return self.stats.num_running + self.stats.num_waiting + (not self.has_stats_since_stop)

    @property
    def trouble(self) -> str:
        """The reason for which the engine does not serve, by its own report; an empty string if there is
        none."""
        return "" if self.stats is None else self.stats.trouble

    def stall(self, health_timeout_secs: float) -> str | None:
        """Return why the engine makes no progress, None while it does. Loading is progress, too."""
        now = time.monotonic()
        if self.ready is None:
            still_secs = now - self.last_progress_at
            if still_secs <= STARTUP_TIMEOUT_SECS:
                return None
            return f"loading has stood still for {still_secs:.0f} s, at: {self.loading or 'the beginning'}"
        if now - self.last_stats_at > health_timeout_secs:
            return f"the engine has been silent for {now - self.last_stats_at:.0f} s"
        if now - self.last_progress_at > health_timeout_secs:
            return f"the engine has made no progress for {now - self.last_progress_at:.0f} s"
        return None
