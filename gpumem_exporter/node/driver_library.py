"""The driver's library in this process: unload it, and list the driver's files that prevent unloading the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The index of the path in a line of /proc/PID/maps: address, permissions, offset, device, inode, path.
_PATH_COLUMN = 5


def unload_library(pynvml: Any) -> None:
    """Make pynvml forget libnvidia-ml, and unload it if it is loaded. The next `nvmlInit` loads it again."""
    # If the driver was replaced while its old library is loaded, `dlopen` keeps returning the old library, with which
    # the exporter can never attach again. Neither pynvml nor ctypes offers to unload it.
    # nvidia-ml-py 12 and 13 keep the library in `nvmlLib` and pointers into it in a private cache.
    library = pynvml.nvmlLib
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001
    if library is not None:
        _dlclose(library._handle)  # noqa: SLF001 - documented: "the system handle used to access the library"


def _dlclose(handle: int) -> None:
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))  # after an error, the library stays loaded


def open_driver_files(process: Path = Path("/proc/self")) -> tuple[str, ...]:
    """Return the driver's device files that are open or mapped, and its loaded library, sorted.

    Raises OSError if the process's folder in /proc cannot be read.
    """
    return tuple(sorted({path for path in (*_open_files(process), *_mapped_files(process)) if _is_driver_file(path)}))


def _is_driver_file(path: str) -> bool:
    return path.startswith("/dev/nvidia") or path.rpartition("/")[2].startswith("libnvidia-ml.so")


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
