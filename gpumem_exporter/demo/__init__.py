"""A simulated GPU node for `serve --demo`: devices, and PyTorch processes that report through the real HTTP API."""

from gpumem_exporter.demo.node import DemoNode

__all__ = ["DemoNode"]
