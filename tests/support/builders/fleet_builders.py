"""Builders for documents and exporters of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterError
from gpumem_exporter.features.fleet.fleet_nodes import Exporter, Fleet
from gpumem_exporter.features.fleet.prometheus import Prometheus

A, B = (Exporter(f"http://node{i}:9844", f"node{i}:9844") for i in (1, 2))


def process(pid: int | str = 1, **changes: Any) -> dict[str, Any]:
    """Return a reporting process on the devices of `gpus`, as in `/api/v1/processes`."""
    gpus = changes.pop("gpus", ("0",))
    return {
        "pid": pid,
        "reporting": True,
        "state": "reporting",
        "workload": "train",
        "rank": "0",
        "step": None,
        "step_seconds": None,
        "sample_age_seconds": 0.0,
        "devices": [{"gpu": gpu, "uuid": f"GPU-{gpu}"} for gpu in gpus],
        **changes,
    }


def unreported(pid: int, **changes: Any) -> dict[str, Any]:
    """Return a process that only the driver lists."""
    nothing = {"reporting": False, "state": "unreported", "workload": None, "rank": None, "sample_age_seconds": None}
    return process(pid, **{**nothing, **changes})


def row(pid: int | str = 1, outcome: str = "done", **changes: Any) -> dict[str, Any]:
    """Return a result as in the API."""
    known = {"workload": "train", "rank": "0", "gpu": "0", "uuid": "GPU-0", "reason": "", "freed_bytes": 7}
    return {"pid": pid, "outcome": outcome, **known, **changes}


def action(*results: dict[str, Any], state: str = "done", **changes: Any) -> dict[str, Any]:
    """Return an action as in the API."""
    return {
        "id": "a1",
        "action": "empty_cache",
        "dry_run": False,
        "state": state,
        "results": list(results),
        **changes,
    }


@dataclass
class ScriptedExporter:
    """Returns answers in order, and repeats the last one; an error is raised."""

    requests: list[tuple[str, Any]] = field(default_factory=list)
    submits: list[Mapping[str, Any] | ExporterError] = field(default_factory=list)
    later: list[Mapping[str, Any] | ExporterError] = field(default_factory=list)
    cancels: list[Mapping[str, Any] | ExporterError] = field(default_factory=list)
    document: Mapping[str, Any] | ExporterError = field(default_factory=dict)
    url: str = "http://node2:9844"
    on_submit: Callable[[], None] = lambda: None

    def get(self, path: str) -> Any:
        self.requests.append(("get", path))
        return _given(self.document)

    def rights(self) -> Any:
        return {}

    def submit(self, request: Mapping[str, Any]) -> Any:
        self.requests.append(("submit", request))
        self.on_submit()
        return _given(_next(self.submits))

    def action(self, action_id: str) -> Any:
        self.requests.append(("action", action_id))
        return _given(_next(self.later))

    def cancel(self, action_id: str) -> Any:
        self.requests.append(("cancel", action_id))
        return _given(_next(self.cancels))

    def __enter__(self) -> ScriptedExporter:
        return self

    def __exit__(self, *_: object) -> None: ...

    def find_addresses(self) -> None:
        """Nothing is to be found."""

    def requests_of(self, kind: str) -> list[Any]:
        """Return the requests of one kind."""
        return [request for name, request in self.requests if name == kind]


def serve_fleet(
    monkeypatch: pytest.MonkeyPatch, exporters: Mapping[Exporter, ScriptedExporter], series: list[dict[str, str]]
) -> None:
    """Let `fleet` find these series and reach these exporters."""
    by_url = {address.url: exporter for address, exporter in exporters.items()}
    monkeypatch.setenv("GPUMEM_PROMETHEUS_URL", "http://prometheus:9090")
    monkeypatch.setattr(Prometheus, "query", lambda *_: (series, ()))
    monkeypatch.setattr(Fleet, "api", lambda _, url: by_url[url])


def _next(answers: list[Mapping[str, Any] | ExporterError]) -> Mapping[str, Any] | ExporterError:
    return answers.pop(0) if len(answers) > 1 else answers[0]


def _given(answer: Mapping[str, Any] | ExporterError) -> Mapping[str, Any]:
    if isinstance(answer, ExporterError):
        raise answer
    return answer
