"""The errors of the KV transport, apart from the modules that raise them so that each can import them."""

from __future__ import annotations

from hisparse_pd.base.vocabulary import StartError


class TransferError(Exception):
    """A write or a registration failed.

    ``may_still_land``: bytes were handed to the transport, and some may reach the peer's memory after this
    error. That memory must not be reused until the transport's timeouts have passed.
    """

    def __init__(self, message: str, *, may_still_land: bool = False) -> None:
        super().__init__(message)
        self.may_still_land = may_still_land


class TransferSetupError(TransferError, StartError):
    """The engine cannot start: a package, system library, host or RDMA device is missing or wrong."""
