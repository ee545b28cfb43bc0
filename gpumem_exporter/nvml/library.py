"""Unload libnvidia-ml, which neither pynvml nor ctypes offers. The only module that uses private parts of pynvml.

If the driver was replaced while its old library is loaded, `dlopen` keeps returning the old library, with which the
exporter can never attach again.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["unload_library"]


def unload_library(pynvml: Any) -> None:
    """Make pynvml forget its library, and unload the library if it is loaded. The next `nvmlInit` loads it again.

    Works with nvidia-ml-py 12 and 13, which keep the library in `nvmlLib` and pointers into it in a private cache.
    """
    library = pynvml.nvmlLib
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001
    if library is not None:
        _dlclose(library._handle)  # noqa: SLF001 - documented: "the system handle used to access the library"


def _dlclose(handle: int) -> None:
    """Close a library; an error means that it stays loaded."""
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))
