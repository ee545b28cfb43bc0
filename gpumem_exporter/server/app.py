"""The composition root: every part of the exporter is built and connected here, and nothing is built at import."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from gpumem_exporter import __version__
from gpumem_exporter.host import Host
from gpumem_exporter.host.pod_resources import PodResources
from gpumem_exporter.nvml.provider import Provider
from gpumem_exporter.server.api.actions import actions_router
from gpumem_exporter.server.api.alerts import alerts_router
from gpumem_exporter.server.api.events import events_router
from gpumem_exporter.server.api.health import health_router
from gpumem_exporter.server.api.metrics import MetricsRoute
from gpumem_exporter.server.api.nvml import nvml_router
from gpumem_exporter.server.api.policy import policy_router
from gpumem_exporter.server.api.reports import ReportsRoute
from gpumem_exporter.server.api.state import state_router
from gpumem_exporter.server.background.hangup import reloading_on_hangup
from gpumem_exporter.server.background.housekeeping import keep_house, recall_ooms
from gpumem_exporter.server.http.problems import install_problem_handlers
from gpumem_exporter.server.runtime import Runtime, build_runtime
from gpumem_exporter.server.security.request_guard import Guard
from gpumem_exporter.server.settings import Settings
from gpumem_exporter.server.web.live import live_router
from gpumem_exporter.server.web.page import Page
from gpumem_exporter.server.web.page_route import page_router
from gpumem_exporter.wire.protocol import REPORTS_PATH

__all__ = ["create_app"]

POLLER_STOP_SECONDS = 0.5
"""A poller that hangs in the driver is left behind: its thread is a daemon."""
EVENTS_STOP_SECONDS = 1.0
"""For events that are not kept yet."""

_DESCRIPTION = "Where every byte of GPU memory went in PyTorch processes, and a way to give it back."


def create_app(
    settings: Settings,
    *,
    provider: Provider,
    host: Host,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    registry: CollectorRegistry | None = None,
    pods: PodResources | None = None,
) -> FastAPI:
    """Build the exporter. Its lifespan starts and stops the poller; `app.state.runtime` holds its parts.

    Args:
        settings: what `serve` was told.
        provider: the driver; opened, used and closed by the poller's thread.
        host: what the operating system says of processes.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
        registry: where the exporter's own counters are registered; its own by default.
        pods: names the pods and containers of processes, where there is a kubelet.
    """
    runtime = build_runtime(
        settings,
        provider=provider,
        host=host,
        clock=clock,
        wall_clock=wall_clock,
        registry=registry if registry is not None else CollectorRegistry(),
        pods=pods,
    )
    app = FastAPI(
        title="gpumem-exporter",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(runtime, pods),
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.state.runtime = runtime
    # First and plain: these two are asked for all the time, and a list of routes is searched from its start.
    app.router.routes[:0] = [
        Route(REPORTS_PATH, ReportsRoute(runtime.ingest), include_in_schema=False),
        Route(settings.web_telemetry_path, MetricsRoute(runtime.exposition, runtime.snapshot), include_in_schema=False),
    ]
    for router in (
        state_router,
        actions_router,
        alerts_router,
        policy_router,
        events_router,
        nvml_router,
        health_router,
    ):
        app.include_router(router(runtime))
    page = Page(__version__, demo=runtime.source == "demo", telemetry_path=settings.web_telemetry_path)
    app.include_router(live_router(runtime, page))
    app.include_router(page_router(page))
    app.add_middleware(
        Guard,
        own_names=runtime.own_names,
        reports=runtime.reports_rule,
        actions=runtime.actions_rule,
        on_report_refused=runtime.instruments.count_report,
    )
    if runtime.web is not None:
        from gpumem_exporter.server.security.basic_auth import BasicAuth

        # Added last, so first asked.
        app.add_middleware(
            BasicAuth,
            access=runtime.web,
            reports=runtime.reports_rule,
            actions=runtime.actions_rule,
            on_report_refused=runtime.instruments.count_report,
        )
    install_problem_handlers(app)
    _describe_itself(app, settings)
    return app


def _lifespan(
    runtime: Runtime, pods: PodResources | None
) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        runtime.events.log.start()
        if pods is not None:
            pods.start()
        runtime.poller.start()
        house = asyncio.ensure_future(keep_house(runtime))
        recalls = [
            asyncio.ensure_future(recall_ooms(runtime)),
            asyncio.ensure_future(runtime.audit.recall(runtime.dispatcher)),
        ]
        try:
            with reloading_on_hangup(_reloads(runtime)):
                yield
        finally:
            runtime.holds.release()
            runtime.presence.close()
            house.cancel()
            for recall in recalls:
                recall.cancel()
            if pods is not None:
                pods.stop()
            await asyncio.to_thread(runtime.poller.stop, POLLER_STOP_SECONDS)
            await asyncio.to_thread(runtime.events.log.stop, EVENTS_STOP_SECONDS)

    return lifespan


def _reloads(runtime: Runtime) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """What reads its file again for a SIGHUP."""
    return [part.reload_on_hangup for part in (runtime.policies, runtime.web) if part is not None]


def _describe_itself(app: FastAPI, settings: Settings) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            from gpumem_exporter.server.http.openapi import describe  # only whoever asks pays for it

            app.openapi_schema = describe(app, telemetry_path=settings.web_telemetry_path)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
