"""The names of `torch_access` under which `measure`, `oom` and `leaks` still import them."""

from gpumem_exporter.client.allocator.torch_access import Statistics
from gpumem_exporter.client.allocator.torch_access import initialized_torch as initialised_torch

__all__ = ["Statistics", "initialised_torch"]
