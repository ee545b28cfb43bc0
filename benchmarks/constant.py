"""A server of the exporter's kind with a constant reply: the minimum cost of a request."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from tests.support.waiting import patient


class ConstantServer:
    """FastAPI, one Starlette route, uvicorn on httptools and uvloop, in a process of its own. A context manager.

    Any method on `/metrics` is answered with a body of `length` bytes.

    Args:
        folder: The folder of its unix socket.
        length: Bytes of the body.
    """

    def __init__(self, folder: Path, length: int) -> None:
        path = folder / f"constant{length}.sock"
        receiver, sender = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(length, str(path), sender), daemon=True
        )
        self._process.start()
        if not receiver.poll(patient(60)):
            raise RuntimeError("the constant server did not start in 60 s")
        self.tcp_url = f"http://127.0.0.1:{receiver.recv()}"
        self.unix_url = f"unix://{path}"

    @property
    def pid(self) -> int:
        """Its pid."""
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> ConstantServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()


def _serve(length: int, path: str, answer: Connection) -> None:
    import uvicorn
    from fastapi import FastAPI
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

    body = b"x" * length

    class Constant:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await Response(body, media_type="text/plain")(scope, receive, send)

    app = FastAPI(telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False})
    app.router.routes[:0] = [Route("/metrics", Constant())]
    listening = [socket.socket(), socket.socket(socket.AF_UNIX)]
    listening[0].bind(("127.0.0.1", 0))
    listening[1].bind(path)
    for each in listening:
        each.listen()
    answer.send(listening[0].getsockname()[1])
    config = uvicorn.Config(app, http="httptools", loop="uvloop", ws="none", log_config=None, access_log=False)
    uvicorn.Server(config).run(sockets=listening)
