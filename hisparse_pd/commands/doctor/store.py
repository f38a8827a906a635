"""Tries the cluster's store as a prefill node uses it: an object is written, read and removed.

``command.py`` makes the check if ``--kv-store`` names a store.
"""

from __future__ import annotations

import secrets
from contextlib import closing

import numpy as np

from hisparse_pd.base.access import PeerList
from hisparse_pd.commands.doctor.checks import Check, Status, failed
from hisparse_pd.commands.doctor.settings import DoctorSettings
from hisparse_pd.transfer.errors import TransferError
from hisparse_pd.transfer.page_store import MooncakeStore, Pieces, Result, StoreError
from hisparse_pd.transfer.transport import Transport

_TRIAL_BYTES = 1 << 20
_LENT_BYTES = 16 << 20
"""Memory that the doctor lends meanwhile, so that a store without nodes can take the object."""
_REMEDY = "start mooncake_master there, open its port to this machine, or correct --kv-store"


class _Trial:
    """The memory of an object: its first half is written, and read into the second."""

    def __init__(self) -> None:
        self.bytes = np.zeros(2 * _TRIAL_BYTES, np.uint8)
        self.bytes[:_TRIAL_BYTES] = np.frombuffer(secrets.token_bytes(_TRIAL_BYTES), np.uint8)

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    def data_ptr(self) -> int:
        return int(self.bytes.ctypes.data)

    def is_contiguous(self) -> bool:
        return True

    def half(self, number: int) -> Pieces:
        return Pieces([self.data_ptr() + number * _TRIAL_BYTES], [_TRIAL_BYTES])

    @property
    def has_arrived(self) -> bool:
        return bool(np.array_equal(self.bytes[:_TRIAL_BYTES], self.bytes[_TRIAL_BYTES:]))


def check_store(settings: DoctorSettings, transport: Transport) -> Check:
    """Check the store at ``settings.kv_store``."""
    name, key, trial = f"store {settings.kv_store}", f"hisparse-pd/doctor/{secrets.token_hex(8)}", _Trial()
    try:
        store = MooncakeStore(
            settings.kv_store,
            settings.reachable_host,
            memory=[trial],
            lent_bytes=_LENT_BYTES,
            transport=transport,
            allowed=PeerList.parse(settings.allowed_peers),
        )
        store.connect()
        with closing(store):
            results = [*store.put([key], [trial.half(0)]), *store.get([key], [trial.half(1)])]
            store.remove([key])
    except TransferError as error:
        return failed(name, error)
    except StoreError as error:
        return Check(name, Status.FAIL, str(error), _REMEDY)
    if results != [Result.DONE, Result.DONE]:
        found = (
            f"an object of {_TRIAL_BYTES} bytes was written ({results[0].name}) and read ({results[1].name})"
        )
        remedy = "let nodes lend memory (--kv-store-gib), and open their ports to each other"
        return Check(name, Status.FAIL, found, remedy)
    if not trial.has_arrived:
        return Check(
            name, Status.FAIL, "an object came back with other bytes", "look at its machines' memory"
        )
    return Check(name, Status.OK, f"an object was written, read and removed over {transport.protocol}")
