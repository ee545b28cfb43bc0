"""The driver files that this process has open, which prevent unloading or replacing the driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["open_driver_files"]

_LIBRARY = "libnvidia-ml.so"
_DEVICE_FILES = "/dev/nvidia"
_PATH_COLUMN = 5
"""The index of the path in a line of /proc/PID/maps: address, permissions, offset, device, inode, path."""


def open_driver_files(process: Path = Path("/proc/self")) -> tuple[str, ...]:
    """Return the driver's device files that are open or mapped and its loaded library, sorted and without duplicates.

    Args:
        process: the process's folder in /proc.

    Raises:
        OSError: the folder cannot be read.
    """
    return tuple(sorted({path for path in (*_open_files(process), *_mapped_files(process)) if _is_driver_file(path)}))


def _is_driver_file(path: str) -> bool:
    return path.startswith(_DEVICE_FILES) or path.rpartition("/")[2].startswith(_LIBRARY)


def _open_files(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        try:
            yield str(descriptor.readlink())
        except FileNotFoundError:  # closed after it was listed
            continue


def _mapped_files(process: Path) -> Iterator[str]:
    for line in (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
        columns = line.split(maxsplit=_PATH_COLUMN)
        if len(columns) > _PATH_COLUMN:
            yield columns[_PATH_COLUMN]
