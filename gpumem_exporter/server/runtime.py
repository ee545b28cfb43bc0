"""The exporter's parts, built once and handed to the routes."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from gpumem_exporter.host.pod_resources import PodResources
from gpumem_exporter.nvml.poller import Poller
from gpumem_exporter.nvml.provider import Provider
from gpumem_exporter.server.api.audit import Audit
from gpumem_exporter.server.background.liveness import Presence
from gpumem_exporter.server.http.addresses import parse_listen_address
from gpumem_exporter.server.http.held_requests import Holds
from gpumem_exporter.server.security.access_rules import OwnNames, Rule
from gpumem_exporter.server.security.tokens import TokenFile
from gpumem_exporter.server.settings import Settings
from gpumem_exporter.server.web.history import History

if TYPE_CHECKING:
    from gpumem_exporter.server.background.policy_runner import PolicyKeeper
    from gpumem_exporter.server.security.web_access import WebAccess

__all__ = ["Runtime", "build_runtime"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the routes work with. For the event loop, but for `store`, which the poller's thread writes to as well."""

    settings: Settings
    source: str
    version: str
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    host: Host
    store: Store
    poller: Poller
    dispatcher: Dispatcher
    exposition: Exposition
    instruments: Instruments
    presence: Presence
    events: Recorder
    audit: Audit
    holds: Holds
    history: History
    own_names: OwnNames
    reports_rule: Rule
    actions_rule: Rule
    policies: PolicyKeeper | None
    """None without `--policy.file`."""
    web: WebAccess | None
    """None without `--web.config.file`."""

    def snapshot(self) -> Snapshot:
        """All that is known now."""
        return self.store.snapshot(self.clock())


def build_runtime(
    settings: Settings,
    *,
    provider: Provider,
    host: Host,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    registry: CollectorRegistry,
    pods: PodResources | None = None,
) -> Runtime:
    """Build every part and connect them; starts nothing."""
    store = Store(
        report_expiry_seconds=settings.report_expiry,
        # A reading is replaced with every poll; one that three were not able to replace is no longer the truth.
        reading_expiry_seconds=max(3 * settings.collect_interval, 5.0),
        max_processes=settings.report_max_processes,
    )
    instruments = Instruments(registry)
    exposition = Exposition(
        registry,
        version=__version__,
        source=provider.source,
    )
    holds = Holds()
    instruments.show_held_requests(holds.__len__)
    events = _recorder(settings, store, instruments, clock, wall_clock)

    def polled(reading: NodeReading) -> None:
        if pods is not None:
            reading = pods.name(reading)
        try:
            events.take_reading(reading)  # first: what a page has shown of a process is in its last row
        finally:
            store.put_reading(reading)

    poller = Poller(
        provider,
        host,
        polled,
        interval_seconds=settings.collect_interval,
        clock=clock,
        wall_clock=wall_clock,
    )

    def ended(action: Action) -> None:
        instruments.observe_action(action)
        _log_action(action)
        audit.finished(action)

    audit = Audit(events, durable=bool(settings.storage_path), wall_clock=wall_clock, on_lost=ended)

    def finished(action: Action) -> None:
        ended(action)
        if not action.dry_run:
            poller.poll_soon()  # or the ledger would set the report from after it against a reading from before it

    dispatcher = Dispatcher(
        store,
        allowed=frozenset(settings.action_allow),
        clock=clock,
        wall_clock=wall_clock,
        on_finished=finished,
        terminator=Terminator(host),
        limits=RateLimits(
            per_caller=settings.action_caller_limit, per_process=settings.action_process_limit, clock=clock
        ),
        before_release=audit.write_down if audit.durable else None,
    )
    return Runtime(
        settings=settings,
        source=provider.source,
        version=__version__,
        clock=clock,
        wall_clock=wall_clock,
        host=host,
        store=store,
        poller=poller,
        dispatcher=dispatcher,
        exposition=exposition,
        instruments=instruments,
        presence=Presence(
            store,
            dispatcher,
            host,
            clock=clock,
            report_interval_seconds=settings.report_interval,
            on_ended=events.processes_ended,
        ),
        events=events,
        audit=audit,
        holds=holds,
        history=History(reading_expiry_seconds=store.reading_expiry_seconds),
        own_names=OwnNames(_own_names(settings)),
        reports_rule=_rule("reports", "--report.token-file", settings.report_token_file),
        actions_rule=_rule("actions", "--action.token-file", settings.action_token_file),
        policies=_policies(settings, store, dispatcher, instruments, events, clock, wall_clock),
        web=_web_access(settings),
    )


def _recorder(
    settings: Settings,
    store: Store,
    instruments: Instruments,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> Recorder:
    storage = Storage(
        Path(settings.storage_path) if settings.storage_path else None,
        retention_seconds=settings.storage_retention,
        max_bytes=settings.storage_max_bytes,
        wall_clock=wall_clock,
    )
    # Its thread waits in real time, whatever clock the rest is given.
    log = EventLog(
        storage,
        clock=time.monotonic,
        on_dropped=instruments.count_events_dropped,
        on_committed=instruments.count_events,
    )

    def show(ooms: Sequence[Event]) -> None:
        store.put_ooms(last_ooms(ooms, clock(), wall_clock()))

    return Recorder(
        log,
        lambda: store.snapshot(clock()),
        report_expiry_seconds=settings.report_expiry,
        reading_expiry_seconds=store.reading_expiry_seconds,
        wall_clock=wall_clock,
        on_ooms=show,
    )


def _policies(
    settings: Settings,
    store: Store,
    dispatcher: Dispatcher,
    instruments: Instruments,
    events: Recorder,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> PolicyKeeper | None:
    if not settings.policy_file:
        return None
    from gpumem_exporter.server.background.policy_runner import PolicyKeeper  # only whoever has a policy pays for it

    return PolicyKeeper(
        Path(settings.policy_file),
        allowed=frozenset(settings.action_allow),
        dispatcher=dispatcher,
        snapshot=lambda: store.snapshot(clock()),
        # One that two reports in a row did not bring is not what the process is like.
        stale_seconds=max(3 * settings.report_interval, 5.0),
        instruments=instruments,
        log=events.log,
        wall_clock=wall_clock,
    )


def _web_access(settings: Settings) -> WebAccess | None:
    if not settings.web_config_file:
        return None
    from gpumem_exporter.server.security.web_access import (
        WebAccess,  # only whoever has such a file pays for what it takes
    )

    return WebAccess(Path(settings.web_config_file))


def _rule(what: str, flag: str, token_file: str) -> Rule:
    return Rule(what, flag, TokenFile(Path(token_file)) if token_file else None, os.geteuid())


def _own_names(settings: Settings) -> list[str]:
    machine = socket.gethostname()
    listening = [parse_listen_address(address).host for address in settings.web_listen_address]
    return [machine, machine.partition(".")[0], *listening]


def _log_action(action: Action) -> None:
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
