"""Connections of another user: the kernel names the effective user that created a socket and connected it."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - the socket module imports it later, as another user who cannot read it
import os
from collections.abc import Iterator

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Create and connect sockets as this user. Only root can."""
    before = os.geteuid()
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)
