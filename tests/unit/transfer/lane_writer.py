"""A process that writes over a lane until it ends: ``python -m tests.unit.transfer.lane_writer``.

It reads a line with a ``LaneOffer`` as hex and a line with the directory of the socket, opens the offer as
the run ``child``, and prints ``open``. Then it fills the first window with one byte value after the other,
without end.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from hisparse_pd.protocol.lane import LaneOffer, encoder
from hisparse_pd.transfer.lane_memory import Mapping
from tests.other_process import OtherProcess


class LaneWriter(OtherProcess):
    """The process, as a test controls it."""

    def __init__(self, offer: LaneOffer, directory: str = "", wrapper: Sequence[str] = ()) -> None:
        super().__init__("tests.unit.transfer.lane_writer", wrapper=wrapper)
        assert self.ask(f"{encoder.encode(offer).hex()} {directory}") == "open"


def main() -> None:
    offer, _, directory = sys.stdin.readline().strip().partition(" ")
    mapping = Mapping(msgspec.msgpack.decode(bytes.fromhex(offer), type=LaneOffer), "child", directory)
    mapping.promise_sole()
    memory = np.frombuffer(mapping.maps[0], np.uint8)
    print("open", flush=True)
    for value in itertools.cycle(range(1, 256)):
        memory[:] = value


if __name__ == "__main__":
    main()
