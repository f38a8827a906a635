"""The command line of the product, with faults and canaries in the engine: ``python -m tests.faults.node``.

Variables of the environment say what is put in; without them this is the product unchanged.

TRANSPORT_FAULTS   JSON of ``FaultRates``, with a ``report`` file: writes to peers fail, are late, and so on
CANARY_REPORT      file: free slots of a decode node hold a pattern, which is verified
CANARY_POOLS       the pools that have canaries; all by default
ROW_FAULTS         file that says which rows are damaged, and how often (``rows.py``)
PATIENT_READS      a prefill node reads what a decode node holds of a prompt, however soon it could
                   compute it, and waits for it however busy the machine is

The engine runs in a spawned child, which imports this module as ``__mp_main__`` before anything else. Faults
are put in there, under names of modules that the engine looks up when it is made.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.waiting import NEVER_SECS


def put_in() -> None:
    if faults := os.environ.get("TRANSPORT_FAULTS"):
        from tests.faults.transport import break_transport

        break_transport(faults)
    if report := os.environ.get("CANARY_REPORT"):
        from tests.faults.canaries import KINDS, keep_canaries

        pools = os.environ.get("CANARY_POOLS", " ".join(KINDS)).split()
        keep_canaries(Path(report), [kind for kind in KINDS if kind in pools])
    if order := os.environ.get("ROW_FAULTS"):
        from tests.faults.rows import put_in_row_faults

        put_in_row_faults(Path(order))
    if os.environ.get("PATIENT_READS"):
        from hisparse_pd.prefill_node import decode_tier

        waits = dict.fromkeys(("LEAST_WAIT_SECS", "LONGEST_WAIT_SECS"), NEVER_SECS)
        vars(decode_tier).update(waits, LEAST_SECS=0.0)


if __name__ == "__mp_main__":
    put_in()

if __name__ == "__main__":
    from hisparse_pd.commands.cli import main

    sys.exit(main())
