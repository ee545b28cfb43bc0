"""What is claimed of PyTorch, the exporter and the driver together, measured on any device, real or emulated.

A claim is written once. It answers with figures, each with what must hold of it; tests require that it does
(`figures.require`), and `tests.gpu.report` shows an emulated node's figures beside a real device's.
"""
