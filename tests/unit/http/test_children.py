"""Reports of a node's first process about its children."""

from __future__ import annotations

import logging
import multiprocessing.connection
import signal
import time
from collections.abc import Iterator

import pytest

from hisparse_pd.serving.http.children import Children
from tests.waiting import WAIT_SECS


def leave(status: int, after: multiprocessing.connection.Connection) -> None:
    after.poll(WAIT_SECS)
    raise SystemExit(status)


def stay() -> None:
    time.sleep(10 * WAIT_SECS)


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    for process in started.processes:
        process.kill()
        process.join()


def test_the_log_names_all_that_fail_in_the_order_of_their_ends(
    children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that is killed may end later than the one that notices."""
    caplog.set_level(logging.INFO)
    end, own = multiprocessing.connection.Pipe()
    children.spawn("rank 0", leave, 1, own)
    children.spawn("rank 1", stay)
    assert children.exits() == ""
    end.send_bytes(b"now")
    multiprocessing.connection.wait(children.sentinels, WAIT_SECS)
    assert children.exits() == "rank 0 exited with status 1"
    children.processes[1].kill()
    children.wait()
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 1 exited with status {-signal.SIGKILL}, too"
    ]
