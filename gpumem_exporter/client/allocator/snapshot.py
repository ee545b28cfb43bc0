"""Writes the allocator's snapshot to a file, for https://pytorch.org/memory_viz."""

from __future__ import annotations

import os
from pathlib import Path

from gpumem_exporter.client.allocator.attached import attached, no_cuda
from gpumem_exporter.client.allocator.snapshot_file import write_file

__all__ = ["snapshot"]


def snapshot(path: str | os.PathLike[str]) -> Path | None:
    """Write every segment and block of the allocator, and the history if it is recorded. Returns the file's path.

    The file is a pickle as `torch.cuda.memory._dump_snapshot` writes it: open it at https://pytorch.org/memory_viz or
    with `python -m torch.cuda._memory_viz`. The file is complete or missing, never partial. The call keeps the GIL for
    about 1.5 µs per block, and for seconds with a long history of stacks. Without CUDA it writes nothing and returns
    None.

    Raises:
        OSError: the file cannot be written.
        CommandRefusedError: this allocator has no snapshot.
    """
    allocator = attached()
    if allocator is None:
        no_cuda("snapshot")
        return None
    target = Path(path)
    write_file(target, allocator.snapshot())
    return target
