"""The driver: its interface, NVML behind it, and the thread that polls it.

Only `pynvml_provider` imports pynvml, so a demo and a machine without a driver do not need it.

Other folders import: `driver_library`, `failures`, `poller`, `provider`, `pynvml_provider`, `reader`.
"""
