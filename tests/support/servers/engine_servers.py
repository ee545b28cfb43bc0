"""Stand-ins for engines that serve HTTP: `tests/programs/engine_server.py`, as a server and the process it serves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.waiting import patient


class Served(NamedTuple):
    """A running server and the process that it serves."""

    popen: subprocess.Popen[str]
    port: int
    worker: int

    def requests(self, count: int) -> list[tuple[str, str, str, dict[str, str]]]:
        """Return the next requests. Ends the server, and fails, if they do not come."""
        assert self.popen.stdout is not None
        overdue = threading.Timer(patient(10), self.popen.kill)
        overdue.start()
        try:
            lines = [self.popen.stdout.readline() for _ in range(count)]
        finally:
            overdue.cancel()
        assert all(lines), f"{count} requests were expected, and these came: {lines}"
        return [tuple(json.loads(line)) for line in lines]


@contextlib.contextmanager
def engine_servers() -> Iterator[Any]:
    """Yield a function that starts a server: `serve("vllm", answers, *options)`."""
    started = []

    def start(name: str, answers: Mapping[str, Any], *options: str, **environment: str) -> Served:
        script = str(REPOSITORY / "tests" / "programs" / "engine_server.py")
        popen = subprocess.Popen(
            [sys.executable, script, name, json.dumps(answers), *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PORT": str(free_port()), **environment},
        )
        started.append(popen)
        assert popen.stdout is not None
        return Served(popen, *json.loads(popen.stdout.readline()))

    try:
        yield start
    finally:
        for popen in started:
            popen.kill()
            popen.communicate()
