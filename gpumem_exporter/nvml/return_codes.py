"""Map NVML's return codes to the errors of this package.

The codes are part of NVML's binary interface and do not change. A code that is not in the table becomes a plain
`NvmlError`. A test fails if pynvml has a code that is not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from gpumem_exporter.errors import (
    NvmlDeviceLostError,
    NvmlError,
    NvmlNotSupportedError,
    NvmlPermissionError,
    NvmlUnavailableError,
)

NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
FUNCTION_NOT_FOUND = 13
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25


class ReturnCode(NamedTuple):
    """A return code: its name in nvml.h without `NVML_ERROR_`, its error class, and its description."""

    name: str
    error: type[NvmlError]
    text: str


RETURN_CODES: Mapping[int, ReturnCode] = MappingProxyType(
    {
        1: ReturnCode("UNINITIALIZED", NvmlUnavailableError, "NVML is not initialized"),
        2: ReturnCode("INVALID_ARGUMENT", NvmlError, "invalid argument"),
        3: ReturnCode("NOT_SUPPORTED", NvmlNotSupportedError, "not supported"),
        4: ReturnCode("NO_PERMISSION", NvmlPermissionError, "no permission"),
        5: ReturnCode("ALREADY_INITIALIZED", NvmlError, "already initialized"),
        NOT_FOUND: ReturnCode("NOT_FOUND", NvmlError, "not found"),
        INSUFFICIENT_SIZE: ReturnCode("INSUFFICIENT_SIZE", NvmlError, "the answer did not fit"),
        8: ReturnCode("INSUFFICIENT_POWER", NvmlError, "external power cables are not attached"),
        9: ReturnCode("DRIVER_NOT_LOADED", NvmlUnavailableError, "the NVIDIA driver is not loaded"),
        10: ReturnCode("TIMEOUT", NvmlError, "timeout in the driver"),
        11: ReturnCode("IRQ_ISSUE", NvmlError, "the kernel reports an interrupt problem with the GPU"),
        12: ReturnCode("LIBRARY_NOT_FOUND", NvmlUnavailableError, "libnvidia-ml.so.1 is not found"),
        FUNCTION_NOT_FOUND: ReturnCode("FUNCTION_NOT_FOUND", NvmlNotSupportedError, "this driver lacks the function"),
        14: ReturnCode("CORRUPTED_INFOROM", NvmlError, "corrupted infoROM"),
        15: ReturnCode("GPU_IS_LOST", NvmlDeviceLostError, "GPU is lost"),
        16: ReturnCode("RESET_REQUIRED", NvmlDeviceLostError, "the GPU needs a reset"),
        17: ReturnCode("OPERATING_SYSTEM", NvmlPermissionError, "the operating system has blocked the request"),
        LIB_RM_VERSION_MISMATCH: ReturnCode(
            "LIB_RM_VERSION_MISMATCH", NvmlUnavailableError, "libnvidia-ml.so.1 and the loaded driver differ in version"
        ),
        19: ReturnCode("IN_USE", NvmlError, "the GPU is in use"),
        20: ReturnCode("MEMORY", NvmlError, "the driver is out of memory"),
        21: ReturnCode("NO_DATA", NvmlNotSupportedError, "no data"),
        22: ReturnCode("VGPU_ECC_NOT_SUPPORTED", NvmlNotSupportedError, "not supported on a vGPU with ECC"),
        23: ReturnCode("INSUFFICIENT_RESOURCES", NvmlError, "the driver is out of resources"),
        24: ReturnCode("FREQ_NOT_SUPPORTED", NvmlNotSupportedError, "the frequency is not supported"),
        ARGUMENT_VERSION_MISMATCH: ReturnCode(
            "ARGUMENT_VERSION_MISMATCH", NvmlNotSupportedError, "this driver lacks this version of the structure"
        ),
        26: ReturnCode("DEPRECATED", NvmlNotSupportedError, "this driver no longer has the function"),
        27: ReturnCode("NOT_READY", NvmlError, "the system is not ready"),
        28: ReturnCode("GPU_NOT_FOUND", NvmlDeviceLostError, "the GPU is not found"),
        29: ReturnCode("INVALID_STATE", NvmlError, "the GPU is in the wrong state"),
        30: ReturnCode("RESET_TYPE_NOT_SUPPORTED", NvmlNotSupportedError, "the kind of reset is not supported"),
        999: ReturnCode("UNKNOWN", NvmlError, "unknown error in the driver"),
    }
)


def error_for_code(code: int, call: str) -> NvmlError:
    """Return the error for a return code; its text has the call, the description and the code."""
    known = RETURN_CODES.get(code)
    if known is None:
        return NvmlError(f"{call}: NVML return code {code}")
    return known.error(f"{call}: {known.text} (NVML_ERROR_{known.name})")
