"""Runs the exporter: sockets, uvicorn, signals, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from gpumem_exporter.collectors.instruments import process_registry
from gpumem_exporter.host import Host, LinuxHost
from gpumem_exporter.host.pod_resources import PodResources
from gpumem_exporter.nvml.provider import Provider
from gpumem_exporter.server.app import create_app
from gpumem_exporter.server.background.hangup import take_over_hangup
from gpumem_exporter.server.http.addresses import ListenAddress
from gpumem_exporter.server.http.connections import GuardedProtocol, Limits
from gpumem_exporter.server.http.listeners import BindError, Listeners, bind
from gpumem_exporter.server.logs import configure_logging
from gpumem_exporter.server.security.tokens import TokenFile
from gpumem_exporter.server.settings import Settings

if TYPE_CHECKING:
    import ssl

__all__ = ["ExporterServer", "run", "serve"]

GRACE_SECONDS = 1.0
"""For answers under way when the exporter is asked to stop; held requests are let go at once."""

DEMO_STOP_SECONDS = 0.5

TLS_SHUTDOWN_SECONDS = 1.0
"""For a client to confirm that a connection ends; there is nothing in it that would be lost."""

_SPARE_FILES = 64
"""File descriptors left to everything but connections."""

_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
]

_log = logging.getLogger(__name__)


def run(settings: Settings, *, demo: bool = False) -> int:
    """Run the exporter until SIGTERM or SIGINT and return the exit code: 0 when asked to stop, 1 when it cannot start.

    Takes over the process' logging and signals: call it from the main thread.
    """
    configure_logging(settings.log_level, settings.log_format)
    if settings.policy_file or settings.web_config_file:
        take_over_hangup()
    try:
        listeners = bind(settings.web_listen_address, settings.web_listen_socket)
    except BindError as error:
        sys.stderr.write(f"gpumem-exporter: {error}\n")
        return 1
    with listeners:
        if demo:
            return _run_demo(settings, listeners)
        from gpumem_exporter.nvml.pynvml_provider import PynvmlProvider

        return serve(settings, listeners, provider=PynvmlProvider(), host=LinuxHost(), pods=PodResources.of_this_node())


def _run_demo(settings: Settings, listeners: Listeners) -> int:
    from gpumem_exporter.demo import DemoNode

    node = DemoNode()
    token = TokenFile(Path(settings.report_token_file)).read().decode() if settings.report_token_file else None
    with demo_url(settings, listeners) as url:
        try:
            return serve(
                settings,
                listeners,
                provider=node.provider,
                host=node.host,
                on_started=lambda: node.start(url, report_token=token),
            )
        finally:
            node.stop(DEMO_STOP_SECONDS)


@contextlib.contextmanager
def demo_url(settings: Settings, listeners: Listeners) -> Iterator[str]:
    """Yield the URL to which simulated processes report; they have no certificate and no password."""
    if not settings.web_config_file:
        yield _loopback_url(listeners)
    elif listeners.unix_path:
        yield f"unix://{listeners.unix_path}"
    else:
        with tempfile.TemporaryDirectory(prefix="gpumem-demo-") as folder:
            listeners.add_unix(f"{folder}/exporter.sock")
            yield f"unix://{listeners.unix_path}"


def serve(
    settings: Settings,
    listeners: Listeners,
    *,
    provider: Provider,
    host: Host,
    pods: PodResources | None = None,
    on_started: Callable[[], None] = lambda: None,
) -> int:
    """Serve on bound sockets until told to stop; may run in a thread, which then takes no signals.

    Args:
        settings: what `serve` was told.
        listeners: where to listen; closed by the caller.
        provider: the driver.
        host: what the operating system says of processes.
        pods: names the pods and containers of processes, where there is a kubelet.
        on_started: called once, when requests are answered.
    """
    app = create_app(settings, provider=provider, host=host, pods=pods, registry=process_registry())
    server = ExporterServer(app, settings, listeners, on_started)
    try:
        server.run(sockets=list(listeners.sockets))
    except SystemExit:
        return 1  # uvicorn's way to say that the application did not start; the log says why
    return 0


class ExporterServer(uvicorn.Server):
    """uvicorn with our protocol, a shutdown that lets held requests go, and signals that end it without a trace.

    Args:
        app: from `create_app`.
        settings: what `serve` was told.
        listeners: named in the log once they answer.
        on_started: called when they do.
        limits: what a client may ask; by default what `--report.max-processes` and the open files allow.
    """

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        listeners: Listeners,
        on_started: Callable[[], None],
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits(max_connections=_max_connections(2 * settings.report_max_processes + 256))
        config = uvicorn.Config(
            app,
            http=functools.partial(GuardedProtocol, limits=limits),  # type: ignore[arg-type]
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=_HEADERS,
            # A reporter's next request comes one interval after the last answer, a scraper's usually within a minute.
            timeout_keep_alive=max(75, int(2 * settings.report_interval) + 1),
            timeout_graceful_shutdown=int(GRACE_SECONDS),
        )
        super().__init__(config)
        self._app = app
        self._limits = limits
        self._listeners = listeners
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        web = self._app.state.runtime.web
        tls = web.context if web is not None else None
        if tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])  # all but the listening: uvicorn knows TLS for all sockets or for none
            await self._listen(sockets or [], tls)
        if self.started:
            _give_back_heap()
            names = self._listeners.names(tls=tls is not None)
            _log.info("listening", extra={"fields": {"addresses": ",".join(names), "version": self._app.version}})
            self._on_started()

    async def _listen(self, sockets: Iterable[socket.socket], tls: ssl.SSLContext) -> None:
        """Take connections: with TLS at TCP addresses, without at the unix socket, which never leaves the machine."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            if sock.family == socket.AF_UNIX:
                server = await loop.create_server(self._protocol, sock=sock, backlog=self.config.backlog)
            else:
                server = await loop.create_server(
                    self._protocol,
                    sock=sock,
                    backlog=self.config.backlog,
                    ssl=tls,
                    ssl_handshake_timeout=self._limits.request_seconds,
                    ssl_shutdown_timeout=TLS_SHUTDOWN_SECONDS,
                )
            self.servers.append(server)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop answering; a reporter that waits for a command is told that there is none."""
        self._app.state.runtime.holds.release()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the server; uvicorn's own would raise them again, which looks like a crash."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _max_connections(wanted: int) -> int:
    """Raise the limit of open files as far as it is needed and allowed; returns how many connections it holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(8, min(wanted, soft - _SPARE_FILES))


def _give_back_heap() -> None:
    """Return what importing took and no longer needs: a quarter of the process' memory. glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _loopback_url(listeners: Listeners) -> str:
    """Where this machine's own processes may report; an address of their own where none of the given ones will do."""
    for name in listeners.names():
        url = name.replace("//[::]:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:")
        if url.startswith(("unix:", "http://127.", "http://[::1]:")):
            return url
    listeners.add_tcp(ListenAddress("127.0.0.1", 0))
    return listeners.names()[-1]
