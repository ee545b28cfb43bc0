"""The release of torch that the tests run with, for features that older releases lack."""

from __future__ import annotations

from importlib.metadata import version

import pytest

__all__ = ["TORCH_RELEASE", "since_torch", "with_the_planners_kernels"]

TORCH_RELEASE = tuple(int(part) for part in version("torch").split(".")[:2])
"""Major and minor version."""


def since_torch(release: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Skip a test with releases of torch that lack a feature."""
    return pytest.mark.skipif(release > TORCH_RELEASE, reason=reason)


with_the_planners_kernels = since_torch((2, 15), "the planner's rules follow the kernels of torch 2.15")
