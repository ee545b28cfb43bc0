"""Writes the allocator's state to a file, for https://pytorch.org/memory_viz."""

from __future__ import annotations

import os
from pathlib import Path

from gpumem_exporter.client.allocator.attached import attached, no_cuda
from gpumem_exporter.client.allocator.snapshot_file import write_file

__all__ = ["snapshot"]


def snapshot(path: str | os.PathLike[str]) -> Path | None:
    """Write every segment and block of the allocator, and its history where one is recorded. Returns the file's path.

    The file is the one that `torch.cuda.memory._dump_snapshot` writes, a pickle: open it at
    https://pytorch.org/memory_viz or with `python -m torch.cuda._memory_viz`. It appears whole or not at all. Holds the
    GIL for about 1.5 µs a block, and seconds where a long history with stacks is recorded. Without CUDA it writes
    nothing and returns None.

    Raises:
        OSError: it cannot be written.
        CommandRefusedError: this allocator gives no snapshot.
    """
    allocator = attached()
    if allocator is None:
        no_cuda("snapshot")
        return None
    target = Path(path)
    write_file(target, allocator.snapshot())
    return target
