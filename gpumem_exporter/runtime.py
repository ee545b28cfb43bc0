"""The composition root: builds the parts of the exporter and connects them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_exporter import __version__
from gpumem_exporter.actions.audit import Audit
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.history_series import Past
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.recorders import Journal
from gpumem_exporter.core.samples import ProcessKey, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.edge.fair_queue import HeldRequests
from gpumem_exporter.edge.listeners import SocketFile, parse_listen_address
from gpumem_exporter.edge.peer import PeerPlaces
from gpumem_exporter.edge.replies import Renderer
from gpumem_exporter.edge.request_guard import Callers, OwnNames, Rule
from gpumem_exporter.edge.watched_files import TokenFile
from gpumem_exporter.features import features
from gpumem_exporter.features.feature import Node
from gpumem_exporter.metrics.exposition import Exposition
from gpumem_exporter.metrics.instruments import Instruments, Registry
from gpumem_exporter.node.host import Host
from gpumem_exporter.node.pid_namespaces import DriverPids
from gpumem_exporter.node.pod_resources import PodResources
from gpumem_exporter.node.poller import Poller
from gpumem_exporter.node.provider import Provider
from gpumem_exporter.page.health import Check, Health, error_check, failed_checks
from gpumem_exporter.page.live import NodeView
from gpumem_exporter.reports.process_liveness import Presence
from gpumem_exporter.reports.report_route import ReportsRoute
from gpumem_exporter.reports.report_sender import ReportSenders
from gpumem_exporter.settings import COLLECTORS, Settings

if TYPE_CHECKING:
    from gpumem_exporter.edge.web_access import WebAccess


class Runtime(Node):
    """The exporter's parts. Only the event loop changes them.

    The poller's thread also writes to the store and to the recorder of processes, and it opens, uses and closes the
    driver (`provider`). `pods` is None without a kubelet, `driver_pids` if every pid of the driver is of this PID
    namespace, and `socket_file` without a unix socket. `real_processes` is false for simulated ones; these have
    a `past`. The constructor starts nothing. Features get the runtime as their `Node`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        provider: Provider,
        host: Host,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        pods: PodResources | None = None,
        driver_pids: DriverPids | None = None,
        socket_file: SocketFile | None = None,
        real_processes: bool = False,
        past: Past = lambda _: (),
    ) -> None:
        # A long function, where each part has its line, in the order in which they depend on each other.
        self.source = provider.source
        self.pods = pods
        self._driver_pids = driver_pids
        self.socket_file = socket_file
        registry, held_requests, places = Registry(), HeldRequests(), PeerPlaces()
        self.instruments = Instruments(registry)
        self.instruments.show_held_requests(held_requests.__len__)
        store = Store(
            report_expiry_seconds=settings.report_expiry,
            # Each poll replaces the reading. After three missed polls it no longer describes the node.
            reading_expiry_seconds=max(3 * settings.collect_interval, 5.0),
            max_processes=settings.report_max_processes,
        )
        self.poller = Poller(
            provider,
            host,
            self._take_reading,
            interval_seconds=settings.collect_interval,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.audit = Audit(
            Journal(),
            durable=bool(settings.storage_path),
            wall_clock=wall_clock,
            count=self.instruments.observe_action,
            # So that the reading of the driver is as new as the reports.
            poll_soon=self.poller.poll_soon,
        )
        dispatcher = Dispatcher(
            store=store,
            allowed=frozenset(settings.action_allow),
            clock=clock,
            wall_clock=wall_clock,
            on_finished=self.audit.finished,
            terminator=Terminator(host),
            limits=RateLimits(
                per_caller=settings.action_caller_limit, per_process=settings.action_process_limit, clock=clock
            ),
            # Without a disk, no later run of the exporter reads the record.
            record=self.audit.record if self.audit.durable else None,
            wake=held_requests.wake,
        )
        self.reports_rule = _rule("reports", "--report.token-file", settings.report_token_file)
        machine = socket.gethostname()
        listening = [parse_listen_address(address) for address in settings.web_listen_address]
        super().__init__(
            settings=settings,
            folder=Path(settings.storage_path) if settings.storage_path else None,
            clock=clock,
            wall_clock=wall_clock,
            host=host,
            real_processes=real_processes,
            past=past,
            poll_soon=self.poller.poll_soon,
            store=store,
            dispatcher=dispatcher,
            registry=registry,
            senders=ReportSenders(host, clock=clock, max_known=2 * settings.report_max_processes, places=places),
            renderer=Renderer(),
            held_requests=held_requests,
            callers=Callers(_rule("actions", "--action.token-file", settings.action_token_file), places=places),
            own_names=OwnNames([machine, machine.partition(".")[0], *(each.host for each in listening)]),
            view=NodeView(clock=clock, wall_clock=wall_clock),
            facts={"host": machine, "allowed_actions": settings.action_allow},
        )
        self.web = _web_access(settings)
        """None without `--web.config.file`."""
        self.features = {name: feature.build(self) for name, feature in features().items() if feature.build}
        self.audit.journal = self.journal
        self.view.findings = [finding for parts in self.features.values() for finding in parts.findings]
        self.presence = Presence(
            self.store,
            self.dispatcher,
            host,
            clock=clock,
            report_interval_seconds=settings.report_interval,
            on_ended=self._note_ends,
        )
        self.exposition = Exposition(
            self.registry,
            [collector for parts in self.features.values() for collector in parts.collectors],
            version=__version__,
            source=provider.source,
            off=[name for name in COLLECTORS if not getattr(settings, f"collector_{name}")],
            hide_identities=settings.web_hide_identities,
        )
        self.reports = ReportsRoute(
            self.store,
            self.senders,
            self.complete_report,
            self.presence,
            self.processes,
            self.errors,
            self.journal,
            self.dispatcher,
            self.held_requests,
            self.instruments,
            clock=clock,
            wall_clock=wall_clock,
            report_interval_seconds=settings.report_interval,
        )
        self.health = Health(
            self.poller,
            source=self.source,
            version=__version__,
            driver_pids=driver_pids,
            checks=self._checks(),
        )

    def _take_reading(self, reading: NodeReading) -> None:
        """Complete a reading, derive its events and store it; in the poller's thread."""
        if self._driver_pids is not None:
            reading = self._driver_pids.check(reading)
        if self.pods is not None:
            reading = self.pods.name(reading)
        # The events come before the reading is stored: so the event of a process that ends has every value that the
        # page has shown.
        try:
            self.processes.take_reading(reading)
        finally:
            self.store.put_reading(reading)

    def _note_ends(self, ended: Sequence[tuple[ProcessKey, str]]) -> None:
        """Record the ends of processes, which the store still has."""
        self.errors.processes_ended(ended)
        self.processes.processes_ended(ended)

    def note_health(self, snapshot: Snapshot) -> None:
        """Export whether each check of /health is ok, and note since when each finding lasts; once a second."""
        health = self.health.document(snapshot)
        # First, so that the metric does not keep an old value if the findings fail.
        self.instruments.show_health({name: check["status"] == "ok" for name, check in health["checks"].items()})
        self.view.notice(snapshot, failed_checks(health))

    def _checks(self) -> dict[str, Callable[[], Check]]:
        """Return the checks of /health that features and files add, by name."""
        checks = {name: check for parts in self.features.values() for name, check in parts.checks.items()}
        if (file := self.socket_file) is not None:
            checks["socket"] = lambda: error_check(file.error(), file.path)
        if tokens := [rule.token for rule in (self.reports_rule, self.callers.rule) if rule.token is not None]:
            checks["tokens"] = lambda: error_check(
                "; ".join(f"{token.path.name}: {token.error}" for token in tokens if token.error)
            )
        if (web := self.web) is not None:
            checks["certificate"] = lambda: error_check(web.error())
        return checks


def _web_access(settings: Settings) -> WebAccess | None:
    if not settings.web_config_file:
        return None
    from gpumem_exporter.edge.web_access import WebAccess  # loaded only if there is a web configuration

    return WebAccess(Path(settings.web_config_file))


def _rule(what: str, flag: str, token_file: str) -> Rule:
    return Rule(what, flag, TokenFile(flag, Path(token_file)) if token_file else None)
