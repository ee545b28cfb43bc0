"""Runs the exporter: sockets, server, signals, exit code."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gpumem_exporter.app import create_app
from gpumem_exporter.edge.connections import Limits
from gpumem_exporter.edge.listeners import Listeners, bind, take_systemd_sockets
from gpumem_exporter.edge.uvicorn_server import LimitedServer
from gpumem_exporter.housekeeping import keeping_hangup
from gpumem_exporter.logs import configure_logging
from gpumem_exporter.node.linux import LinuxHost
from gpumem_exporter.node.pid_namespaces import DriverPids
from gpumem_exporter.node.pod_resources import PodResources
from gpumem_exporter.runtime import Runtime
from gpumem_exporter.settings import Settings

# The time for running requests when the exporter stops. Requests that wait for a command end at once.
_STOP_SECONDS = 1

# The number of file descriptors for everything except open connections: closing ones, /proc, the driver.
_SPARE_FILES = 128

# The limit of open files that is set where the hard limit allows more: connections are counted, so more is no use.
_MAX_FILES = 8192

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}

_log = logging.getLogger(__name__)


@keeping_hangup()
def run(settings: Settings, *, demo: bool = False, demo_processes: int | None = None) -> int:
    """Run the exporter until SIGTERM or SIGINT. Return 0 after a signal, 1 if the application fails to start.

    `demo` simulates a node, with `demo_processes` processes, or with its own number for None.

    Configures the logging and the signals of the process: call it from the main thread. Raises GpumemError if a file, a
    folder or an address of the settings cannot be used.
    """
    configure_logging(settings.log_level, settings.log_format)
    # FastAPI tries this import for each parameter of a route, also with the first request, to recognize models of
    # pydantic's version 1. It continues without them, which saves 30 ms of CPU and 2 MB.
    sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type]
    if settings.action_allow and "empty_cache" not in settings.action_allow:
        allowed = ", ".join(settings.action_allow)
        _log.warning("action.allow turns empty_cache off", extra={"fields": {"allowed": allowed, "fix": "add default"}})
    with contextlib.ExitStack() as stack:
        if settings.web_systemd_socket:
            listeners = stack.enter_context(take_systemd_sockets())
            found = {"web_listen_address": listeners.addresses, "web_listen_socket": listeners.unix_path}
            settings = settings.model_copy(update=found)
        else:
            listeners = stack.enter_context(bind(settings.web_listen_address, settings.web_listen_socket))
        runtime, on_started = _demo(settings, listeners, demo_processes, stack) if demo else _node(settings, listeners)
        server = build_server(runtime, listeners, on_started=on_started)
        _limit_heaps()
        # The objects of imports stay for ever. Without them, a full collection takes milliseconds and not 90 on the
        # event loop. A collection before would find about 1,000 small objects, and take 40 ms of the start.
        gc.freeze()
        gc.enable()
        # The longest time that another thread, such as the renderer of replies, keeps the event loop waiting for
        # Python's lock. The default is 5 ms, for each of the ten callbacks of a request.
        sys.setswitchinterval(0.001)
        return server.run_until_signal(listeners.sockets)


def _node(settings: Settings, listeners: Listeners) -> tuple[Runtime, Callable[[], None]]:
    """Return the parts for this machine, and what to call when requests are answered."""
    from gpumem_exporter.node.pynvml_provider import PynvmlProvider

    runtime = Runtime(
        settings,
        provider=PynvmlProvider(),
        host=LinuxHost(),
        pods=PodResources.of_this_node(),
        driver_pids=DriverPids.of_this_exporter(),
        socket_file=listeners.socket_file,
        real_processes=True,
    )
    return runtime, lambda: None


def _demo(
    settings: Settings, listeners: Listeners, processes: int | None, stack: contextlib.ExitStack
) -> tuple[Runtime, Callable[[], None]]:
    """Return the same for a simulated node, which ends with the stack."""
    from gpumem_exporter.demo import DemoNode, workloads_of

    if not listeners.unix_path:
        # Where the simulated processes can report without a certificate and a password.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpumem-demo-"))
        listeners.add_unix(f"{folder}/exporter.sock")
    node = DemoNode() if processes is None else DemoNode(workloads=workloads_of(processes))
    # The past of many processes would take seconds.
    past = node.past if processes is None else lambda _: ()
    runtime = Runtime(settings, provider=node.provider, host=node.host, socket_file=listeners.socket_file, past=past)
    token = runtime.reports_rule.token
    report_token = token.value.decode() if token is not None else None
    stack.callback(node.stop, 0.5)
    return runtime, partial(node.start, f"unix://{listeners.unix_path}", report_token=report_token)


def build_server(
    runtime: Runtime,
    listeners: Listeners,
    *,
    on_started: Callable[[], None] = lambda: None,
    limits: Limits | None = None,
) -> LimitedServer:
    """Return the server of an exporter.

    By default, the limits of clients are derived from `--report.max-processes` and the open files.
    """
    app, settings = create_app(runtime), runtime.settings
    limits = limits or Limits(max_connections=_max_connections(2 * settings.report_max_processes + 256))
    # A reporter sends its next request after one interval, a scraper usually within a minute.
    limits = replace(limits, idle_seconds=max(limits.idle_seconds, int(2 * settings.report_interval) + 1))
    web = runtime.web
    tls = web.tls if web is not None else lambda: None

    def started() -> None:
        names = ",".join(listeners.names(tls=tls() is not None))
        _log.info("listening", extra={"fields": {"addresses": names, "version": app.version}})
        if listeners.on_all_addresses:
            fields = {"loopback_only": "--web.listen-address 127.0.0.1:9844"}
            _log.info("listening on every address: other machines can read the page", extra={"fields": fields})
        on_started()

    return LimitedServer(
        app,
        limits=limits,
        tls=tls,
        on_started=started,
        on_stopping=runtime.held_requests.stop,
        headers=_HEADERS,
        configured_headers=web.headers if web is not None else {},
        timeout_graceful_shutdown=_STOP_SECONDS,
    )


def _max_connections(wanted: int) -> int:
    """Raise the limit of open files as far as allowed; return the number of connections that it permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # neither is infinite: Linux has fs.nr_open
    allowed = min(max(_MAX_FILES, wanted + _SPARE_FILES), hard)
    if soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    return max(8, min(wanted, soft - _SPARE_FILES))


def _limit_heaps() -> None:
    """Keep the free memory of the heaps small. glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)  # imports left a quarter of the process' memory free
        # Long bodies stay out of the heap, so that their memory is returned when they are freed. By default, glibc puts
        # blocks of up to 32 MiB into the heap, once a block of that size has been freed.
        m_mmap_threshold, m_trim_threshold, m_arena_max = -3, -1, -8
        libc.mallopt(m_mmap_threshold, 256 << 10)
        # Threads, none of which runs yet, share two heaps: Python's lock lets one of them run, and each further heap
        # would keep free memory.
        libc.mallopt(m_arena_max, 2)
        # Each heap keeps the memory of a usual page of metrics for the next one. `release_free_memory` returns it.
        libc.mallopt(m_trim_threshold, 4 << 20)
