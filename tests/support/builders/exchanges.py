"""Requests that have passed the edge."""

from __future__ import annotations

from typing import Any

from gpumem_exporter.edge.connections import Connection, Exchange, Limits
from gpumem_exporter.edge.peer import Peer


def state_from(peer: Peer) -> dict[str, Any]:
    """Return the `state` of the ASGI scope of a request of this peer."""
    return {"exchange": Exchange(Connection(peer, Limits(8)), peer)}
