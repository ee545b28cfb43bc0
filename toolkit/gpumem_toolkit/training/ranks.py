"""The ranks that train together, and the exchange of a number."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.errors import RankFailedError


class Ranks:
    """The members of a process group with their global numbers, or this process alone.

    `gather` is collective: every rank calls it. Raises RankFailedError if a rank exited, or did not answer within the
    group's timeout. Not thread-safe.
    """

    def __init__(self) -> None:
        self.size = 1
        self.numbers: tuple[int, ...] = (0,)
        self._group: Any = None
        self._rank = 0
        self._device = torch.device("cpu")
        self._row: Any = None

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """Return the members of a group, by default of the default group; this process alone if there is no group."""
        ranks = cls()
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise ConfigurationError("the process group needs torch.distributed, which is not initialized")
            return ranks
        ranks._group, ranks._rank = group, dist.get_rank(group)
        if ranks._rank < 0:
            raise ConfigurationError(f"rank {dist.get_rank()} does not belong to the given process group")
        ranks.numbers = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        ranks.size = len(ranks.numbers)
        kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]  # "cpu:gloo,cuda:nccl"
        ranks._device = torch.device("cpu" if "cpu" in kinds else kinds[0])
        return ranks

    def gather(self, value: float) -> dict[int, float]:
        """Return the value of each rank by its global number. Only the first call allocates on a device."""
        if self.size == 1:
            return {self.numbers[0]: value}
        if self._row is None:
            # A sum of rows is a gather that every backend has. Numbers up to 2^53 are exact in this type.
            self._row = torch.empty(self.size, dtype=torch.float64, device=self._device)
        self._row.zero_()
        self._row[self._rank] = value
        try:
            dist.all_reduce(self._row, group=self._group)
        except RuntimeError as error:  # a closed connection or a timeout
            raise RankFailedError(f"the all-reduce over ranks {list(self.numbers)} failed: {error}") from error
        return dict(zip(self.numbers, self._row.tolist(), strict=True))
