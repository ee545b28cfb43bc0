"""A relay between a reporter and its exporter that loses selected replies."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class Relay:
    """Listens on a unix socket and passes bytes on to the exporter's socket, with one thread per connection.

    Args:
        folder: The folder of the relay's socket.
        exporter: The exporter's unix socket.
    """

    def __init__(self, folder: Path, exporter: Path) -> None:
        self.path = folder / "relay.sock"
        self.url = f"unix://{self.path}"
        self._exporter = exporter
        self._loses: Callable[[bytes], bool] = lambda _: False
        self.lost = threading.Event()
        self._open: set[socket.socket] = set()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.path))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection in both directions, as if the reporter of a held request had died."""
        for end in tuple(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def lose_next(self, answer: Callable[[bytes], bool]) -> None:
        """Drop the next reply for which `answer` is true and break its connection, as if its client had died."""
        self.lost.clear()
        self._loses = answer

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reporter, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=(reporter,), daemon=True).start()

    def _pass_on(self, reporter: socket.socket) -> None:
        exporter = socket.socket(socket.AF_UNIX)
        ends = {reporter: exporter, exporter: reporter}
        with reporter, exporter, contextlib.suppress(OSError):
            exporter.connect(os.fspath(self._exporter))
            self._open.update(ends)
            try:
                while True:
                    for ready in select.select(list(ends), [], [])[0]:
                        part = ready.recv(1 << 20)
                        if not part:
                            return
                        if ready is exporter and self._loses(part):
                            self._loses = lambda _: False
                            self.lost.set()
                            return
                        ends[ready].sendall(part)
            finally:
                self._open.difference_update(ends)
