"""Servers with several workers: each worker reports the model that it serves, the server's parent does not report."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gpumem_client.wire.http import Connection
from tests.support.library_programs import PYTHON, StartLibrary
from tests.support.waiting import patient

SERVERS = {
    "gunicorn": "--workers 2 --preload --config python:served_model --bind unix:{} served_model:wsgi",
    "uvicorn": "--workers 2 --uds {} served_model:asgi",
}


@pytest.mark.parametrize("server", SERVERS)
def test_each_worker_of_a_server_reports(start_library: StartLibrary, tmp_path: Path, server: str) -> None:
    socket = tmp_path / "server.sock"
    program = start_library(PYTHON, "-m", server, *SERVERS[server].format(socket).split())
    workers = program.compare(worker=2)["worker"]
    assert program.popen.pid not in [made.pid for made in workers]
    for made in workers:
        assert "parameters" in {row["kind"] for row in program.profiles[made.pid]["rows"]}
    connection = Connection(f"unix://{socket}", timeout_seconds=patient(30))
    answer = connection.request("GET", "/", None, {})
    connection.close()
    assert (answer.status, answer.body.replace(b" ", b"")) == (200, b"[4,256]")
    program.end(signal.SIGTERM)
