"""Writes PyTorch's memory snapshot for https://pytorch.org/memory_viz.

The exporter receives the path and the size. It never reads the file, which is a pickle. This module does not
start or stop the recording of the allocator's history. If a history was recorded, the file contains it.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

from gpumem_client.allocator.allocator import Allocator, attached
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import SnapshotFile
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_client.wire.units import human_bytes

_KEPT_FILES = 64
# The limit of all files together, and the part of the free space that they may take: many systems keep /tmp in memory.
_KEPT_BYTES = 2 << 30
_PART_OF_FREE = 10
# The file keeps this number of the newest history entries per device; an entry with its stack takes kilobytes.
_TRACE_ENTRIES_MAX = 50_000
# memory_viz rejected protocol 5 until May 2026.
_PICKLE_PROTOCOL = 4


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
    allocator = attached("snapshot")
    if allocator is None:
        return None
    target = Path(path)
    write_file(target, allocator.snapshot())
    return target


def snapshot_folder() -> Path:
    """Return GPUMEM_SNAPSHOT_DIR, or a folder of this user's own among the temporary files."""
    folder = os.environ.get("GPUMEM_SNAPSHOT_DIR", "").strip()
    return Path(folder) if folder else _own_folder()


def _own_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"gpumem-snapshots-{os.getuid()}"


def write_snapshot(allocator: Allocator) -> SnapshotFile:
    """Take a snapshot and write it into `snapshot_folder()`, where the last 64 are kept.

    Together they take at most 2 GiB, and at most a tenth of the free space.

    Keeps the GIL for about half a microsecond per block.

    Raises:
        CommandRefusedError: there is no snapshot, the folder is another user's, or the file is too large or cannot be
            written.
    """
    taken = allocator.snapshot()
    taken["device_traces"] = [trace[-_TRACE_ENTRIES_MAX:] for trace in taken.get("device_traces", ())]
    try:
        file = _next_file(snapshot_folder())
        space = os.statvfs(file.parent)
        most = min(_KEPT_BYTES, space.f_bavail * space.f_frsize // _PART_OF_FREE)
        size = write_file(file, taken, most)
        _remove_old(file, most)
    except _TooLargeError:
        raise CommandRefusedError(
            f"the snapshot is larger than {human_bytes(most)}, which snapshots may take in {file.parent}: 2 GiB, or a "
            "tenth of the free space if that is less; set GPUMEM_SNAPSHOT_DIR to a larger file system",
            ReasonCode.SNAPSHOT_NOT_WRITTEN,
        ) from None
    except OSError as error:
        raise CommandRefusedError(f"the snapshot cannot be written: {error}", ReasonCode.SNAPSHOT_NOT_WRITTEN) from None
    blocks = [block for segment in taken["segments"] for block in segment["blocks"]]
    return SnapshotFile(
        path=str(file.absolute()).encode("utf-8", "replace").decode(),
        size_bytes=size,
        segments=len(taken["segments"]),
        blocks=len(blocks),
        has_frames=any(block.get("frames") for block in blocks),
    )


def _next_file(folder: Path) -> Path:
    """Return a name for a new file in the folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder == _own_folder():
        # Another user may have created the path before: as a folder that others may write to, or as a link.
        owner = folder.lstat()
        alone = owner.st_uid == os.getuid() and not stat.S_IMODE(owner.st_mode) & 0o077
        if not (alone and stat.S_ISDIR(owner.st_mode)):
            raise CommandRefusedError(
                f"{folder} is not a private folder of this user; set GPUMEM_SNAPSHOT_DIR to a private folder",
                ReasonCode.SNAPSHOT_NOT_WRITTEN,
            )
    taken = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return folder / f"gpumem-{os.getpid()}-{taken}-{time.monotonic_ns()}.pickle"


def _remove_old(new: Path, most: int) -> None:
    """Remove the oldest files beside a new one, such that the others are within the limits."""
    # Also the parts of processes that were killed while they wrote.
    found = (*new.parent.glob("gpumem-*.pickle"), *new.parent.glob(".gpumem-*.pickle.*.part"))
    kept = [(math.inf, new.stat().st_size, new)]
    for file in {*found} - {new}:
        with contextlib.suppress(OSError):  # another process has removed it
            kept.append((file.stat().st_mtime, file.stat().st_size, file))
    kept_bytes = 0
    for number, (_, size, file) in enumerate(sorted(kept, reverse=True)):
        kept_bytes += size
        if file != new and (number >= _KEPT_FILES or kept_bytes > most):
            with contextlib.suppress(OSError):
                file.unlink()


class _TooLargeError(Exception):
    """A file would exceed its limit."""


class _Bounded:
    """A stream for `pickle.dump` that takes at most `most` bytes."""

    def __init__(self, stream: BinaryIO, most: int) -> None:
        self._stream = stream
        self._left = most

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise _TooLargeError
        return self._stream.write(data)


def write_file(file: Path, taken: dict[str, Any], most: int = sys.maxsize) -> int:
    """Write a complete file that only this user may read, of at most `most` bytes. Returns its bytes.

    Raises:
        OSError: the file cannot be written.
        _TooLargeError: it would be longer.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            pickle.dump(taken, _Bounded(stream, most), protocol=_PICKLE_PROTOCOL)
            size = stream.tell()
        part.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return size
