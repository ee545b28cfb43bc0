"""The sources of `top`: an exporter, the driver alone, or a fleet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from gpumem_client.wire.errors import ExporterError
from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.node_view import Node, read_live, require_known, selected

T = TypeVar("T")


class NodeSource(Protocol):
    """One exporter, or the exporters of a fleet."""

    warnings: tuple[str, ...]

    def read(self) -> list[Node]:
        """Read the nodes. Raises GpumemError if there is nothing to read."""


class Source:
    """Reads the part of an exporter's node that a target selects. Not thread-safe."""

    warnings: tuple[str, ...] = ()
    """A single node has none."""

    def __init__(self, api: ExporterApi, target: Target, *, details: str = "none") -> None:
        self._api, self._target, self._details = api, target, details
        self._target_checked = False

    def read(self) -> list[Node]:
        """Read the node. The first reading raises TargetNotFoundError if a name of the target is unknown.

        Later, its process may exit.
        """
        live, url = self._live()
        if not self._target_checked:
            require_known(live, self._target)
            self._target_checked = True
        return [Node(selected(live, self._target), url)]

    def _live(self) -> tuple[Document, str]:
        try:
            return read_live(self._api, self._details), self._api.url
        except ExporterError:
            self._api.close()  # another address may answer the next time, from another exporter
            raise


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a daemon thread."""
    # Not `asyncio.to_thread`, whose threads delay the exit while one of them hangs.
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a task that no longer waits leaves the future alone

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting task raises it
            done.set_exception(error)

    threading.Thread(target=run, name="gpumem-live", daemon=True).start()
    return await asyncio.wrap_future(done)
