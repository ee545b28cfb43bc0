"""The errors that only the toolkit raises."""

from __future__ import annotations

from gpumem_client.wire.errors import GpumemError


class NoBatchSizeError(GpumemError):
    """Every batch size that was tried runs out of memory; the message lists them.

    The exception's cause is the error of the last batch size.
    """


class RankFailedError(GpumemError):
    """Another rank of the process group failed or exited, so this rank cannot continue."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The global ranks that failed; empty when unknown."""
