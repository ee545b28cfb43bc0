"""The ranks that train together, and what they tell each other: a few figures, in one all-reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gpumem_exporter.errors import ConfigurationError, RankFailedError

__all__ = ["Ranks"]


class Ranks:
    """The members of a process group, or this process alone. `of` makes one of a group.

    `gather` and `total` are collective: every rank calls them, in the same order. They wait for the others no longer
    than the group's own timeout. Not thread-safe.

    Attributes:
        size: how many there are.
        numbers: the global rank of each.
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
        """The members of a group, by default of the default group; this process alone where there is none.

        Raises:
            ConfigurationError: this process does not belong to the group, or there can be none.
        """
        ranks = cls()
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise ConfigurationError("a process group is given, but torch.distributed is not initialised")
            return ranks
        ranks._group, ranks._rank = group, dist.get_rank(group)
        if ranks._rank < 0:
            raise ConfigurationError(f"rank {dist.get_rank()} does not belong to the process group that is given")
        ranks.numbers = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        ranks.size = len(ranks.numbers)
        kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]  # "cpu:gloo,cuda:nccl"
        ranks._device = torch.device("cpu" if "cpu" in kinds else kinds[0])
        return ranks

    def gather(self, value: float) -> dict[int, float]:
        """What each rank gives, by its global rank. Allocates on a device only the first time.

        Raises:
            RankFailedError: a rank has gone, or did not answer within the group's timeout.
        """
        if self.size == 1:
            return {self.numbers[0]: value}
        if self._row is None:
            self._row = torch.empty(self.size, dtype=torch.float64, device=self._device)
        self._row.zero_()
        self._row[self._rank] = value
        self._reduce(self._row)
        return dict(zip(self.numbers, self._row.tolist(), strict=True))

    def total(self, value: float) -> Any:
        """The sum over the ranks: a number where they speak through the host's memory, else a tensor on the device.

        Nobody has waited for that tensor.

        Raises:
            RankFailedError: as `gather`.
        """
        if self.size == 1:
            return value
        total = torch.full((), value, dtype=torch.float64, device=self._device)
        self._reduce(total)
        return total.item() if self._device.type == "cpu" else total

    def _reduce(self, tensor: Any) -> None:
        try:
            dist.all_reduce(tensor, group=self._group)
        except RuntimeError as error:  # a connection that closed, a timeout
            raise RankFailedError(f"the ranks {list(self.numbers)} cannot agree: {error}") from error
