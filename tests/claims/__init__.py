"""Claims about PyTorch, the exporter and the driver together, measured on an emulated node or on a real device.

Each claim returns values with the values of an independent source; tests pass them to `values.require`.
"""
