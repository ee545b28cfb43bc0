"""The default process group of `torch.distributed` in this process."""

from __future__ import annotations

import sys

__all__ = ["rank_and_size"]


def rank_and_size() -> tuple[int, int] | None:
    """Return the rank of this process and the number of ranks; None without a process group. Any thread may call this.

    Does not import `torch.distributed`.
    """
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
    except (AttributeError, RuntimeError, ValueError):  # another thread is creating or destroying the group
        pass
    return None
