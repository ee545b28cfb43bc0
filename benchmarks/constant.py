"""The least that a server of the exporter's kind can cost: a body that never changes, behind the same stack."""

from __future__ import annotations

from multiprocessing.connection import Connection

__all__ = ["serve_constant"]


def serve_constant(length: int, answer: Connection) -> None:
    """Serve a body of that many bytes for ever: FastAPI, a Starlette route, uvicorn on httptools and uvloop.

    Answers its port on `answer`; whoever connects from then on is served, though perhaps not at once.
    """
    import socket

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
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    answer.send(listening.getsockname()[1])
    config = uvicorn.Config(app, http="httptools", loop="uvloop", ws="none", log_config=None, access_log=False)
    uvicorn.Server(config).run(sockets=[listening])
