"""Builds the application: routes, guards and the parts that run beside requests. Nothing is built at import."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, FastAPI

from gpumem_client.wire.protocol import REPORTS_PATH
from gpumem_exporter import __version__
from gpumem_exporter.actions.action_routes import ActionRoutes
from gpumem_exporter.actions.nvml_route import nvml_router
from gpumem_exporter.edge.listeners import parse_listen_address
from gpumem_exporter.edge.problems import install_problem_handlers
from gpumem_exporter.edge.request_guard import MAX_REPORT_BYTES, Guard
from gpumem_exporter.edge.watched_files import refreshing
from gpumem_exporter.housekeeping import keep_house, keeping_records, release_free_memory, reloading_on_hangup
from gpumem_exporter.metrics.metrics_route import MetricsRoute
from gpumem_exporter.page.health import health_router
from gpumem_exporter.page.page_routes import Page, page_router
from gpumem_exporter.page.runbooks import runbook_router
from gpumem_exporter.page.state_routes import StateRoutes
from gpumem_exporter.runtime import Runtime

POLLER_STOP_SECONDS = 0.5
"""A poller that hangs in the driver is abandoned: its thread is a daemon."""


def create_app(runtime: Runtime) -> FastAPI:
    """Build the application, whose lifespan starts and stops the exporter's parts."""
    app = FastAPI(
        title="gpumem-exporter",
        version=__version__,
        description="Shows where the GPU memory of PyTorch processes goes, and releases it on request.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lambda _: _lifespan(runtime),
        # Older versions of FastAPI ignore this argument.
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    settings = runtime.settings
    routers = _routers(runtime)
    for router in routers:
        app.include_router(router)
    paths = (getattr(route, "path", "") for router in routers for route in router.routes)
    install_problem_handlers(app, [REPORTS_PATH, settings.web_telemetry_path, *paths])
    app.add_middleware(
        Guard,
        routes={
            REPORTS_PATH: runtime.reports,
            settings.web_telemetry_path: MetricsRoute(runtime.exposition, runtime.snapshot),
        },
        own_names=runtime.own_names,
        reports=runtime.reports_rule,
        callers=runtime.callers,
        on_report_refused=runtime.instruments.count_report,
        body_limits={
            REPORTS_PATH: MAX_REPORT_BYTES,
            **{path: size for parts in runtime.features.values() for path, size in parts.body_limits.items()},
        },
        loopback_only=all(parse_listen_address(each).is_loopback for each in settings.web_listen_address),
        web=runtime.web,
    )

    @functools.cache
    def described() -> dict[str, Any]:
        from gpumem_exporter.openapi import describe

        return describe(app, settings.web_telemetry_path)

    app.openapi = described  # type: ignore[method-assign]  # as FastAPI documents it
    return app


def _routers(runtime: Runtime) -> list[APIRouter]:
    settings, snapshot, dispatcher, audit = runtime.settings, runtime.snapshot, runtime.dispatcher, runtime.audit
    held_requests, renderer = runtime.held_requests, runtime.renderer
    page = Page(__version__, demo=runtime.source == "demo", telemetry_path=settings.web_telemetry_path)
    state = StateRoutes(
        runtime.view,
        renderer,
        snapshot=snapshot,
        health=runtime.health,
        facts=runtime.facts,
        page_digest=lambda: page.digest,
        hide_identities_from=runtime.hide_identities_from,
        clock=runtime.clock,
        wall_clock=runtime.wall_clock,
    )
    return [
        state.router(),
        ActionRoutes(dispatcher, audit, held_requests, renderer, snapshot, runtime.callers).router(),
        nvml_router(
            poller=runtime.poller,
            dispatcher=dispatcher,
            audit=audit,
            held_requests=held_requests,
            clock=runtime.clock,
        ),
        health_router(health=runtime.health, snapshot=snapshot),
        *(router for parts in runtime.features.values() for router in parts.routers),
        page_router(page),
        runbook_router(),
    ]


@contextlib.asynccontextmanager
async def _lifespan(runtime: Runtime) -> AsyncIterator[None]:
    web, pods, features = runtime.web, runtime.pods, tuple(runtime.features.values())
    if pods is not None:
        pods.start()
    runtime.poller.start()
    for parts in features:
        if parts.start is not None:
            parts.start()
    chores = {
        "beat": lambda: runtime.store.beat(runtime.clock()),
        "expire_actions": runtime.dispatcher.expire,
        "remove_ended_processes": runtime.presence.sweep,
        **{name: chore for parts in features for name, chore in parts.chores.items()},
    }
    records = {name: chore for parts in features for name, chore in parts.each_second.items()}
    work = [keep_house(chores), release_free_memory(), runtime.audit.restore(runtime.dispatcher)]
    tasks = [asyncio.ensure_future(each) for each in (*work, *(task() for parts in features for task in parts.tasks))]
    files = (runtime.reports_rule.token, runtime.callers.rule.token, web)
    reloads = [None if web is None else web.reload_on_hangup, *(parts.reload for parts in features)]
    try:
        with (
            keeping_records(
                runtime.snapshot,
                {**records, "health": runtime.note_health},
                clock=runtime.clock,
                wall_clock=runtime.wall_clock,
            ),
            refreshing([file.refresh for file in files if file is not None]),
            reloading_on_hangup([reload for reload in reloads if reload is not None]),
        ):
            yield
    finally:
        runtime.presence.close()
        for task in tasks:
            task.cancel()
        if pods is not None:
            pods.stop()
        await asyncio.to_thread(runtime.poller.stop, POLLER_STOP_SECONDS)
        # The poller records events until it has stopped, so the features stop after it.
        await asyncio.gather(*(asyncio.to_thread(parts.stop) for parts in features if parts.stop is not None))
