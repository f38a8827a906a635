"""Where the machines of one node meet."""

from __future__ import annotations

import logging
import time

from hisparse_pd.settings import STARTUP_TIMEOUT_SECS, NodeSettings
from hisparse_pd.vocabulary import StartError
from protocol.names import resolve

log = logging.getLogger(__name__)

_RESOLVE_SECS = 5.0
_RETRY_SECS = 1.0


def meeting_address(settings: NodeSettings) -> str:
    """The address of the first machine, of a node of several; empty for a node of one.

    A cluster may make a machine's name when it starts, so it is waited for. Raises StartError.
    """
    host, _ = settings.meeting
    deadline = time.monotonic() + STARTUP_TIMEOUT_SECS
    while host:
        try:
            return resolve(host, time.monotonic() + _RESOLVE_SECS)[0]
        except OSError as error:
            if time.monotonic() >= deadline:
                raise StartError(
                    f"dist_init_addr {settings.dist_init_addr}: {host} has no address after "
                    f"{STARTUP_TIMEOUT_SECS:g} s: {error}"
                ) from error
            log.info("%s has no address yet: %s", host, error)
        time.sleep(_RETRY_SECS)
    return ""
