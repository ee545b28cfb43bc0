"""The sources of `top`: an exporter, or the driver if no exporter answers and no address was given; or a fleet."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

from gpumem_client.wire.errors import ExporterError, ExporterUnreachableError
from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.node_view import Node, read_live, require_known, selected
from gpumem_exporter.errors import NvmlError

if TYPE_CHECKING:
    from gpumem_exporter.cli.top.driver import DriverReader

T = TypeVar("T")

# Seconds between attempts to reach an exporter while NVML is the fallback source.
_RETRY_SECONDS = 3.0


class NodeSource(Protocol):
    """One exporter, or the exporters of a fleet."""

    warnings: tuple[str, ...]

    def read(self) -> list[Node]:
        """Read the nodes. Raises GpumemError if there is nothing to read."""


class Source:
    """Reads the part of the node that a target selects. Not thread-safe.

    `open_driver` is None if the user chose an exporter, because then the driver is no substitute.
    """

    warnings: tuple[str, ...] = ()
    """A single node has none."""

    def __init__(
        self,
        open_api: Callable[[], ExporterApi],
        target: Target,
        *,
        open_driver: Callable[[], DriverReader] | None = None,
        details: str = "none",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_api, self._open_driver = open_api, open_driver
        self._target, self._details, self._clock = target, details, clock
        self._api = open_api()
        self._driver: DriverReader | None = None
        # Why the exporter did not answer.
        self._failure = ""
        self._next_attempt = -float("inf")
        self._target_checked = False

    def read(self) -> list[Node]:
        """Read the exporter. If it does not answer, read the driver, unless the user chose an exporter.

        Raises ExporterError if the exporter does not answer, and the driver cannot replace it. The first reading raises
        TargetNotFoundError if a name of the target is unknown. Later, its process may exit.
        """
        live, url = self._read()
        if not self._target_checked:
            require_known(live, self._target)
            self._target_checked = True
        return [Node(selected(live, self._target), url)]

    def close(self) -> None:
        """Close the API and the driver."""
        self._api.close()
        self._release_driver()

    def _read(self) -> tuple[Document, str]:
        """Return the node, and the exporter's address; without an address, the driver was read."""
        if self._driver is None or self._clock() >= self._next_attempt:
            try:
                live = read_live(self._api, self._details)
            except ExporterError as error:
                self._failure = str(error)
                # Another address may answer the next time, from another exporter.
                self._api.close()
                self._api = self._open_api()
                if self._open_driver is None:
                    raise
                self._next_attempt = self._clock() + _RETRY_SECONDS
                self._driver = self._driver or self._open_driver()
            else:
                self._release_driver()
                return live, self._api.url
        try:
            return self._driver.read(self._failure), ""
        except NvmlError as error:
            self._release_driver()
            raise ExporterUnreachableError(
                f"{self._failure}. The driver alone cannot be read either: {error}"
            ) from error

    def _release_driver(self) -> None:
        if self._driver is not None:
            self._driver.release()
            self._driver = None


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
