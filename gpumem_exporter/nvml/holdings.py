"""What of the driver this process has open: what would keep an administrator from unloading or replacing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["driver_holdings"]

_LIBRARY = "libnvidia-ml.so"
_DEVICE_FILES = "/dev/nvidia"
_PATH_COLUMN = 5
"""Of a line of /proc/PID/maps: address, permissions, offset, device, inode, path."""


def driver_holdings(process: Path = Path("/proc/self")) -> tuple[str, ...]:
    """The driver's device files that are open or mapped, and its library if it is loaded; each once, sorted.

    Args:
        process: its folder in /proc.

    Raises:
        OSError: the folder cannot be read.
    """
    return tuple(sorted({path for path in (*_open_files(process), *_mapped_files(process)) if _is_drivers(path)}))


def _is_drivers(path: str) -> bool:
    return path.startswith(_DEVICE_FILES) or path.rpartition("/")[2].startswith(_LIBRARY)


def _open_files(process: Path) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        try:
            yield str(descriptor.readlink())
        except FileNotFoundError:  # closed since it was listed
            continue


def _mapped_files(process: Path) -> Iterator[str]:
    for line in (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines():
        columns = line.split(maxsplit=_PATH_COLUMN)
        if len(columns) > _PATH_COLUMN:
            yield columns[_PATH_COLUMN]
