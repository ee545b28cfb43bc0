"""The log of the node: errors, devices, processes and actions."""

from __future__ import annotations

from functools import partial

from gpumem_exporter.cli.program import LOOK, Listed
from gpumem_exporter.features.feature import Feature, Node, Parts

STOP_SECONDS = 1.0
"""The time for storing the queued events at the exit."""


def _build(node: Node) -> Parts:
    from gpumem_exporter.features.events.event_log import EventLog
    from gpumem_exporter.features.events.event_recorder import Recorder
    from gpumem_exporter.features.events.event_routes import events_router
    from gpumem_exporter.features.events.event_storage import Storage
    from gpumem_exporter.features.events.events_settings import EventsSettings
    from gpumem_exporter.reports.process_liveness import SILENT_SECONDS
    from gpumem_exporter.settings import PROFILES_SHARE

    settings = node.settings
    storage = Storage(
        node.folder,
        retention_seconds=settings.of(EventsSettings).storage_retention,
        # Without the share of the profiles.
        max_bytes=settings.storage_max_bytes - settings.storage_max_bytes // PROFILES_SHARE,
        wall_clock=node.wall_clock,
    )
    log = EventLog(storage, node.registry)
    recorder = Recorder(log, node.store, wall_clock=node.wall_clock)
    node.journal, node.processes = log, recorder
    router = events_router(
        log,
        recorder,
        node.renderer,
        profile_of=node.profile_of_error,
        profiles_of=node.profiles_of,
        hide_identities=settings.web_hide_identities,
    )
    return Parts(
        routers=[router],
        checks={"events": log.check},
        chores={"record_expired_reports": lambda: recorder.sweep(node.snapshot())},
        tasks=[partial(recorder.restore_ends, node.host, clock=node.clock, silent_seconds=SILENT_SECONDS)],
        start=log.start,
        stop=partial(log.stop, STOP_SECONDS),
    )


FEATURE = Feature(
    build=_build,
    settings="EventsSettings",
    commands={
        "events": Listed(LOOK, "Show what happened on the node, oldest first.", "log_commands"),
        "actions": Listed(LOOK, "Show the actions that were requested, and cancel them.", "log_commands"),
    },
)
