"""The headers of `http_server_config` in `--web.config.file`."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["ResponseHeaders"]


class ResponseHeaders:
    """An application that sets headers on every reply, in place of those with the same name.

    Args:
        app: the next application.
        headers: the values by name.
    """

    def __init__(self, app: ASGIApp, headers: Mapping[str, str]) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._names = {name for name, _ in self._headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [(name, value) for name, value in message["headers"] if name.lower() not in self._names]
                message = {**message, "headers": [*others, *self._headers]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
