"""Claims about PyTorch, the exporter and the driver together, measured on an emulated node or on a real device.

Each claim returns values with the values of an independent source. Tests pass them to `values.require`, and
`tests.gpu.report` shows those of an emulated node beside those of a real device.
"""
