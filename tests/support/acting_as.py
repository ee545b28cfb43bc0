"""Connections of another user: the kernel names the effective user that created a socket and connected it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["acting_as"]


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Create and connect sockets as this user. Only root can."""
    before = os.geteuid()
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)
