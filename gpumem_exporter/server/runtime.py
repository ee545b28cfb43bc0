"""The composition root: builds the parts of the exporter and connects them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from gpumem_exporter import __version__
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.limits import RateLimits
from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.collectors.exposition import Exposition
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.samples import NodeReading, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.events import Event, EventLog, Recorder, Storage, last_ooms
from gpumem_exporter.host import Host
from gpumem_exporter.host.pid_namespaces import DriverPids
from gpumem_exporter.host.pod_resources import PodResources
from gpumem_exporter.nvml.poller import Poller
from gpumem_exporter.nvml.provider import Provider
from gpumem_exporter.server.api.audit import Audit
from gpumem_exporter.server.api.rendering import Renderer
from gpumem_exporter.server.api.reports import ReportsRoute
from gpumem_exporter.server.background.presence import Presence
from gpumem_exporter.server.http.addresses import parse_listen_address
from gpumem_exporter.server.http.held_requests import HeldRequests
from gpumem_exporter.server.http.listeners import SocketFile
from gpumem_exporter.server.security.access_rules import Callers, OwnNames, Rule
from gpumem_exporter.server.security.peer_places import PeerPlaces
from gpumem_exporter.server.security.report_sender import ReportSenders
from gpumem_exporter.server.security.tokens import TokenFile
from gpumem_exporter.server.settings import Settings
from gpumem_exporter.server.web.history import History

if TYPE_CHECKING:
    from gpumem_exporter.server.background.policy_runner import PolicyRunner
    from gpumem_exporter.server.security.web_access import WebAccess

__all__ = ["Runtime", "build_runtime"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The exporter's parts. Only the event loop uses them; the poller's thread also writes to `store` and `events`."""

    settings: Settings
    source: str
    version: str
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    store: Store
    snapshot: Callable[[], Snapshot]
    """Returns the current snapshot."""
    poller: Poller
    dispatcher: Dispatcher
    exposition: Exposition
    instruments: Instruments
    presence: Presence
    events: Recorder
    audit: Audit
    held_requests: HeldRequests
    history: History
    reports: ReportsRoute
    renderer: Renderer
    own_names: OwnNames
    reports_rule: Rule
    callers: Callers
    policies: PolicyRunner | None
    """None without `--policy.file`."""
    web: WebAccess | None
    """None without `--web.config.file`."""
    socket_file: SocketFile | None
    """None without a unix socket."""


def build_runtime(
    settings: Settings,
    *,
    provider: Provider,
    host: Host,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    registry: CollectorRegistry,
    pods: PodResources | None = None,
    driver_pids: DriverPids | None = None,
    socket_file: SocketFile | None = None,
) -> Runtime:
    """Build every part and connect them; starts nothing.

    It is longer than other functions because each part has its line, in the order in which they depend on each other.
    """
    instruments, held_requests = Instruments(), HeldRequests()
    instruments.show_held_requests(held_requests.__len__)
    state = CurrentState(_store(settings), clock, wall_clock)
    events = _recorder(settings, state, instruments)
    poller = Poller(
        provider,
        host,
        NodeFeed(driver_pids, pods, events, state.store).take_reading,
        interval_seconds=settings.collect_interval,
        clock=clock,
        wall_clock=wall_clock,
    )
    record_end = partial(_record_action_end, instruments)
    audit = Audit(events, durable=bool(settings.storage_path), wall_clock=wall_clock, on_lost=record_end)
    dispatcher = _dispatcher(settings, state, host, audit, ActionEnds(record_end, audit, poller), held_requests)
    presence = Presence(
        state.store,
        dispatcher,
        host,
        clock=clock,
        report_interval_seconds=settings.report_interval,
        on_ended=events.processes_ended,
    )
    exposition = Exposition(
        instruments,
        registry,
        version=__version__,
        source=provider.source,
        hide_identities=settings.web_hide_identities,
    )
    peer_places = PeerPlaces()
    reports = ReportsRoute(
        state.store,
        ReportSenders(host, clock=clock, max_known=2 * settings.report_max_processes, places=peer_places),
        presence,
        events,
        dispatcher,
        held_requests,
        instruments,
        clock=clock,
        wall_clock=wall_clock,
        report_interval_seconds=settings.report_interval,
    )
    return Runtime(
        settings=settings,
        source=provider.source,
        version=__version__,
        clock=clock,
        wall_clock=wall_clock,
        store=state.store,
        snapshot=state.snapshot,
        poller=poller,
        dispatcher=dispatcher,
        exposition=exposition,
        instruments=instruments,
        presence=presence,
        events=events,
        audit=audit,
        held_requests=held_requests,
        history=History(reading_expiry_seconds=state.store.reading_expiry_seconds),
        reports=reports,
        renderer=Renderer(),
        own_names=OwnNames(_own_names(settings)),
        reports_rule=_rule("reports", "--report.token-file", settings.report_token_file),
        callers=Callers(_rule("actions", "--action.token-file", settings.action_token_file), places=peer_places),
        policies=_policies(settings, state, dispatcher, instruments, events.log),
        web=_web_access(settings),
        socket_file=socket_file,
    )


@dataclass(frozen=True, slots=True)
class CurrentState:
    """The store, read and written at the current time."""

    store: Store
    clock: Callable[[], float]
    wall_clock: Callable[[], float]

    def snapshot(self) -> Snapshot:
        """Return the current snapshot."""
        return self.store.snapshot(self.clock())

    def put_ooms(self, ooms: Sequence[Event]) -> None:
        """Store new out-of-memory errors."""
        self.store.put_ooms(last_ooms(ooms, self.clock(), self.wall_clock()))


@dataclass(frozen=True, slots=True)
class NodeFeed:
    """Takes the readings of the poller, in the poller's thread."""

    driver_pids: DriverPids | None
    pods: PodResources | None
    events: Recorder
    store: Store

    def take_reading(self, reading: NodeReading) -> None:
        """Drop pids that are not this namespace's, name the pods, derive the events, and store the reading.

        The events are derived before the reading is stored. So the event of a process that ends contains every value
        that the page has shown.
        """
        if self.driver_pids is not None:
            reading = self.driver_pids.check(reading)
        if self.pods is not None:
            reading = self.pods.name(reading)
        try:
            self.events.take_reading(reading)
        finally:
            self.store.put_reading(reading)


@dataclass(frozen=True, slots=True)
class ActionEnds:
    """Handles the actions that the dispatcher has finished."""

    record: Callable[[Action], None]
    audit: Audit
    poller: Poller

    def finished(self, action: Action) -> None:
        """Record a finished action, and poll the driver so that its reading is as new as the reports."""
        self.record(action)
        self.audit.finished(action)
        if not action.dry_run:
            self.poller.poll_soon()


def _store(settings: Settings) -> Store:
    return Store(
        report_expiry_seconds=settings.report_expiry,
        # Each poll replaces the reading. After three missed polls it no longer describes the node.
        reading_expiry_seconds=max(3 * settings.collect_interval, 5.0),
        max_processes=settings.report_max_processes,
    )


def _recorder(settings: Settings, state: CurrentState, instruments: Instruments) -> Recorder:
    storage = Storage(
        Path(settings.storage_path) if settings.storage_path else None,
        retention_seconds=settings.storage_retention,
        max_bytes=settings.storage_max_bytes,
        wall_clock=state.wall_clock,
    )
    log = EventLog(
        storage,
        clock=time.monotonic,  # its thread waits in real time, whatever clock the other parts use
        on_dropped=instruments.count_events_dropped,
        on_committed=instruments.count_events,
    )
    return Recorder(
        log,
        report_expiry_seconds=settings.report_expiry,
        reading_expiry_seconds=state.store.reading_expiry_seconds,
        wall_clock=state.wall_clock,
        on_ooms=state.put_ooms,
        on_left_out=instruments.count_events_dropped,
    )


def _dispatcher(
    settings: Settings,
    state: CurrentState,
    host: Host,
    audit: Audit,
    ends: ActionEnds,
    held_requests: HeldRequests,
) -> Dispatcher:
    limits = RateLimits(
        per_caller=settings.action_caller_limit, per_process=settings.action_process_limit, clock=state.clock
    )
    return Dispatcher(
        state.store,
        allowed=frozenset(settings.action_allow),
        clock=state.clock,
        wall_clock=state.wall_clock,
        on_finished=ends.finished,
        terminator=Terminator(host),
        limits=limits,
        record=audit.record,
        wake=held_requests.wake,
        call_later=lambda seconds, function: asyncio.get_running_loop().call_later(seconds, function),
        hide_identities=settings.web_hide_identities,
    )


def _policies(
    settings: Settings, state: CurrentState, dispatcher: Dispatcher, instruments: Instruments, log: EventLog
) -> PolicyRunner | None:
    if not settings.policy_file:
        return None
    from gpumem_exporter.server.background.policy_runner import PolicyRunner  # loaded only if there is a policy

    return PolicyRunner(
        Path(settings.policy_file),
        allowed=frozenset(settings.action_allow),
        dispatcher=dispatcher,
        snapshot=state.snapshot,
        # A sample that two reports in a row did not contain no longer describes the process.
        stale_seconds=max(3 * settings.report_interval, 5.0),
        instruments=instruments,
        log=log,
        wall_clock=state.wall_clock,
    )


def _web_access(settings: Settings) -> WebAccess | None:
    if not settings.web_config_file:
        return None
    from gpumem_exporter.server.security.web_access import WebAccess  # loaded only if there is a web configuration

    return WebAccess(Path(settings.web_config_file))


def _rule(what: str, flag: str, token_file: str) -> Rule:
    return Rule(what, flag, TokenFile(Path(token_file)) if token_file else None)


def _own_names(settings: Settings) -> list[str]:
    machine = socket.gethostname()
    listening = [parse_listen_address(address).host for address in settings.web_listen_address]
    return [machine, machine.partition(".")[0], *listening]


def _record_action_end(instruments: Instruments, action: Action) -> None:
    """Count and log a finished action."""
    instruments.observe_action(action)
    outcomes: dict[str, int] = {}
    for result in action.results:
        outcomes[result.outcome] = outcomes.get(result.outcome, 0) + 1
    _log.info(
        "action finished",
        extra={
            "fields": {
                "id": action.id,
                "action": action.action,
                "state": action.state,
                "target": action.target.describe(),
                "requested_by": action.requested_by,
                "reason": action.reason,
                "dry_run": str(action.dry_run).lower(),
                "outcomes": ",".join(f"{outcome}:{count}" for outcome, count in sorted(outcomes.items())),
                "freed_bytes": action.freed_bytes,
                "duration_seconds": action.duration_seconds,
            }
        },
    )
