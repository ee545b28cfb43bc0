"""Access to NVML, and the thread that polls it.

This package does not import `gpumem_exporter.nvml.pynvml_provider`, the only module that imports pynvml. Callers that
need the real driver import that module.
"""

from gpumem_exporter.nvml.poller import Poller, PollerStatus
from gpumem_exporter.nvml.provider import DeviceIdentity, Provider

__all__ = ["DeviceIdentity", "Poller", "PollerStatus", "Provider"]
