"""The release of torch that the tests run with, for features that older releases lack."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import pytest


@cache
def torch_release() -> tuple[int, int]:
    """Return torch's major and minor version.

    A function, because the quick tier imports this module and has no torch.
    """
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def since_torch(release: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Skip a test with releases of torch that lack a feature."""
    return pytest.mark.skipif(release > torch_release(), reason=reason)


def with_the_planners_kernels(test: Callable[..., Any]) -> Callable[..., Any]:
    """Skip a test of the planner's rules, unless they follow the kernels of this release of torch."""
    return since_torch((2, 15), "the planner's rules follow the kernels of torch 2.15")(test)
