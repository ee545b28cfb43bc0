"""The driver's side: the one fence round NVML, and the thread that polls it.

`gpumem_exporter.nvml.pynvml_provider` is not imported here: it is the only module that imports pynvml, and only what
composes an exporter on a real driver imports it.
"""

from gpumem_exporter.nvml.poller import Poller, PollerStatus
from gpumem_exporter.nvml.provider import DeviceIdentity, Provider

__all__ = ["DeviceIdentity", "Poller", "PollerStatus", "Provider"]
