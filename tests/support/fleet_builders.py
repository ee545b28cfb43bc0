"""Builders for documents and exporters of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumem_exporter.cli.fleet.asks import Nodes
from gpumem_exporter.cli.fleet.naming import Place
from gpumem_exporter.errors import ExporterError

A, B, C = (Place(f"node{i}:9844", f"http://node{i}:9844") for i in (1, 2, 3))


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
class Clock:
    """A clock that advances when it sleeps, or manually."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class ScriptedExporter:
    """Returns answers in order, and repeats the last one; an error is raised."""

    asked: list[tuple[str, Any]] = field(default_factory=list)
    begins: list[Mapping[str, Any] | ExporterError] = field(default_factory=list)
    later: list[Mapping[str, Any] | ExporterError] = field(default_factory=list)
    cancels: list[Mapping[str, Any] | ExporterError] = field(default_factory=list)
    document: Mapping[str, Any] | ExporterError = field(default_factory=dict)
    on_begin: Callable[[], None] = lambda: None

    def get(self, path: str) -> Any:
        self.asked.append(("get", path))
        return _given(self.document)

    def begin(self, request: Mapping[str, Any]) -> Any:
        self.asked.append(("begin", request))
        self.on_begin()
        return _given(_next(self.begins))

    def action(self, action_id: str) -> Any:
        self.asked.append(("action", action_id))
        return _given(_next(self.later))

    def cancel(self, action_id: str) -> Any:
        self.asked.append(("cancel", action_id))
        return _given(_next(self.cancels))

    def close(self) -> None:
        self.asked.append(("close", None))

    def asked_for(self, what: str) -> list[Any]:
        """Return the requests of one kind."""
        return [said for kind, said in self.asked if kind == what]


def nodes(exporters: Mapping[Place, ScriptedExporter], clock: Clock, parallel: int = 4) -> Nodes:
    """The exporters of a fleet."""
    by_url = {place.url: exporter for place, exporter in exporters.items()}
    return Nodes(
        exporters,
        token="",
        parallel=parallel,
        connect=by_url.__getitem__,  # type: ignore[arg-type]
        clock=clock,
        sleep=clock.sleep,
    )


def _next(answers: list[Mapping[str, Any] | ExporterError]) -> Mapping[str, Any] | ExporterError:
    return answers.pop(0) if len(answers) > 1 else answers[0]


def _given(answer: Mapping[str, Any] | ExporterError) -> Mapping[str, Any]:
    if isinstance(answer, ExporterError):
        raise answer
    return answer
