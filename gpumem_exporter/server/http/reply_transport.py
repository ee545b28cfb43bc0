"""The transport of a connection, with what uvicorn lacks: replies in one packet, and a close that loses none.

uvicorn writes the head and the body of a reply one after the other, and uvloop sends each at once: the client wakes up
twice. Here, the head waits for the body.

If a socket is closed while bytes are unread, the kernel sends a reset, and the client's kernel discards the reply. So
the exporter first ends its own direction only, and reads what else arrives, for a bounded time and amount.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["ReplyTransport"]

READ_AWAY_SECONDS = 2.0
READ_AWAY_BYTES = 4 << 20
UNREAD_SECONDS = 30.0
"""The time for a client to read the end of its last reply, after which the connection is closed without it."""

_HEAD, _END_OF_HEAD = b"HTTP/1.1 ", b"\r\n\r\n"


class ReplyTransport(asyncio.Transport):
    """A transport that sends a reply in one packet, and whose `close()` lets the client read the reply first.

    TLS has no half of a connection that could be closed; there, the client closes it after the reply.

    Args:
        transport: the transport of the connection.
        loop: the event loop.
        unfinished: returns whether the client may still send, because the last request has not arrived completely.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, unfinished: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._unfinished = unfinished
        self._left_bytes = READ_AWAY_BYTES
        self._timer: asyncio.TimerHandle | None = None
        """Runs while the transport reads away what arrives."""
        self._head = b""
        """The head of a reply, which waits for the body until the event loop has nothing else to do."""
        self._send_head: asyncio.Handle | None = None

    def close(self) -> None:
        """Close the connection, after its client had the time to read the reply."""
        if self.is_closing():
            return
        self._flush()
        if not self._unfinished():
            self._end()
            return
        self._timer = self._loop.call_later(READ_AWAY_SECONDS, self._end)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _end(self) -> None:
        """Close the connection once the client has read what was sent; uvloop would wait for that for ever."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._timer = self._loop.call_later(UNREAD_SECONDS, self._transport.abort)

    def reads_away(self, size: int) -> bool:
        """Return whether received bytes are to be dropped, because the connection is being closed."""
        if self._timer is None:
            return self._transport.is_closing()
        self._left_bytes -= size
        if self._left_bytes < 0:
            self.close_now()
        return True

    def close_now(self) -> None:
        """Close the connection without waiting for the client."""
        self.stop()
        self._transport.close()

    def stop(self) -> None:
        """Stop the timer: the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def is_closing(self) -> bool:
        """Return whether `close()` has been called."""
        return self._timer is not None or self._transport.is_closing()

    def write(self, data: Any) -> None:
        """Write; nothing is written after `close()` or `abort()`, for which uvloop would raise."""
        if self.is_closing():
            return
        if self._send_head is not None:
            self._send_head.cancel()
            self._send_head, data = None, self._head + data
        elif data.startswith(_HEAD) and data.endswith(_END_OF_HEAD):
            self._head = data
            self._send_head = self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        """Send a head whose body has not come."""
        if self._send_head is not None:
            self.write(b"")

    def abort(self) -> None:
        """Close the connection at once."""
        self.stop()
        self._transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the connection."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Stop reading, unless what arrives is read away."""
        if self._timer is None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the client has not read."""
        return self._transport.get_write_buffer_size() + len(self._head if self._send_head else b"")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the sizes at which writing is paused and resumed."""
        self._transport.set_write_buffer_limits(high, low)
