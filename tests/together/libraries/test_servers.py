"""A server with several workers: each worker reports the model that it serves, the server's parent does not report."""

from __future__ import annotations

import signal
from pathlib import Path

from gpumem_client.wire.http import Connection
from tests.support.library_programs import PYTHON, StartLibrary
from tests.support.waiting import patient


def test_each_forked_worker_of_gunicorn_reports(start_library: StartLibrary, tmp_path: Path) -> None:
    socket = tmp_path / "server.sock"
    words = ("--workers", "2", "--preload", "--config", "python:served_model", "--bind", f"unix:{socket}")
    program = start_library(PYTHON, "-m", "gunicorn", *words, "served_model:wsgi")
    workers = program.compare(worker=2)["worker"]
    assert program.popen.pid not in [made.pid for made in workers]
    for made in workers:
        assert "parameters" in {row["kind"] for row in program.profiles[made.pid]["rows"]}
    connection = Connection(f"unix://{socket}", timeout_seconds=patient(30))
    answer = connection.request("GET", "/", None, {})
    connection.close()
    assert (answer.status, answer.body.replace(b" ", b"")) == (200, b"[4,256]")
    program.end(signal.SIGTERM)
