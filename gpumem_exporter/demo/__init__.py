"""A simulated GPU node for `serve --demo`: devices, and PyTorch processes that report through the real HTTP API."""

from gpumem_exporter.demo.node import DemoNode
from gpumem_exporter.demo.workloads import workloads_of

__all__ = ["DemoNode", "workloads_of"]
