"""What a capability adds to the exporter. Runtime, application, settings and commands loop over the list of features.

A feature imports nothing of another one: what two of them share, such as the profile of an event, is a slot of `Node`
that one fills and the other one reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpumem_exporter.core.recorders import ErrorRecorder, Journal, ProcessRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from pathlib import Path

    from fastapi import APIRouter

    from gpumem_client.wire.protocol import Report
    from gpumem_exporter.actions.dispatcher import Dispatcher
    from gpumem_exporter.cli.program import Listed
    from gpumem_exporter.core.caller import Caller
    from gpumem_exporter.core.event import Event
    from gpumem_exporter.core.history_series import Past
    from gpumem_exporter.core.samples import KvCachePeak, LastOom, ProcessKey, Snapshot
    from gpumem_exporter.core.store import Store
    from gpumem_exporter.edge.fair_queue import HeldRequests
    from gpumem_exporter.edge.replies import Renderer
    from gpumem_exporter.edge.request_guard import Callers, OwnNames
    from gpumem_exporter.metrics.collector_types import Collector
    from gpumem_exporter.metrics.instruments import Registry
    from gpumem_exporter.node.host import Host
    from gpumem_exporter.page.findings import FindingsOf
    from gpumem_exporter.page.health import Check
    from gpumem_exporter.page.live import NodeView
    from gpumem_exporter.reports.report_sender import ReportSenders
    from gpumem_exporter.settings import Settings


@dataclass(frozen=True, slots=True)
class Parts:
    """What a feature runs. Everything is optional; `start` and `stop` are called once."""

    routers: Sequence[APIRouter] = ()
    body_limits: Mapping[str, int] = field(default_factory=dict)
    """The size of the largest body by path, where it is not `MAX_BODY_BYTES` of the request guard."""
    collectors: Sequence[Collector] = ()
    findings: Sequence[FindingsOf] = ()
    checks: Mapping[str, Callable[[], Check]] = field(default_factory=dict)
    """By name: the checks of /health."""
    chores: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    """By name: done once a second on the event loop."""
    each_second: Mapping[str, Callable[[Snapshot], None]] = field(default_factory=dict)
    """By name: done once a second with a new snapshot, in a thread of the exporter."""
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Started with the exporter and cancelled at its end."""
    start: Callable[[], None] | None = None
    stop: Callable[[], object] | None = None
    """Called in a thread at the end of the exporter; takes at most two seconds."""
    reload: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Called on SIGHUP."""


@dataclass(slots=True, eq=False)
class Node:
    """The exporter's parts that features use."""

    settings: Settings
    folder: Path | None
    """Of `--storage.path`."""
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    host: Host
    real_processes: bool
    """Whether the processes are of this machine, and not simulated ones."""
    past: Past
    poll_soon: Callable[[], None]
    """Lets the driver be read soon."""
    store: Store
    dispatcher: Dispatcher
    registry: Registry
    """Of the metrics of the exporter itself."""
    senders: ReportSenders
    renderer: Renderer
    held_requests: HeldRequests
    callers: Callers
    own_names: OwnNames
    view: NodeView
    facts: dict[str, object]
    """What `node` of the live document has besides; it never changes after the start."""
    complete_report: Callable[[Report, ProcessKey], Report] = lambda report, _: report
    """Adds to the report of a process what only its engine's server knows."""
    last_ooms: Callable[[float], tuple[LastOom, ...]] = lambda _: ()
    """Returns the out-of-memory errors for a snapshot of a time, the oldest first. Thread-safe."""
    journal: Journal = field(default_factory=Journal)
    processes: ProcessRecorder = field(default_factory=ProcessRecorder)
    errors: ErrorRecorder = field(default_factory=ErrorRecorder)
    """Without a feature that replaces them, these three record nothing."""
    profile_of_error: Callable[[Caller, Event], str | None] = lambda _, __: None
    """Returns the id of the profile of an out-of-memory error, if the caller sees it."""
    profiles_of: Callable[[Caller, str], Sequence[Mapping[str, Any]]] = lambda _, __: ()
    """Returns the profiles of a job's errors that a caller sees, as documents, the newest first."""
    kv_cache_peaks: Callable[[], Mapping[tuple[str, str], Mapping[str, KvCachePeak]]] = dict
    """Returns the peaks of key-value caches for snapshots. Thread-safe."""

    def snapshot(self) -> Snapshot:
        """Return the current snapshot."""
        now = self.clock()
        return self.store.snapshot(now, ooms=self.last_ooms(now), kv_cache_peaks=self.kv_cache_peaks())

    @property
    def hide_identities_from(self) -> Callers | None:
        """Whose rights decide what others' processes show; None without `--web.hide-identities`."""
        return self.callers if self.settings.web_hide_identities else None


@dataclass(frozen=True, slots=True)
class Feature:
    """One capability. Its functions import what they need, so that a command loads no server."""

    build: Callable[[Node], Parts] | None = None
    """Called when the sockets are bound, before a thread starts and a request is answered. Raises GpumemError if a file
    or a folder of a setting cannot be used. None for a feature with commands only."""
    settings: str = ""
    """The model in the feature's module of settings, whose fields are settings of `serve`."""
    commands: Mapping[str, Listed] = field(default_factory=dict)
    """The commands of the terminal, by name."""
