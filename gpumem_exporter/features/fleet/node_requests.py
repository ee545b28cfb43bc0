"""Requests to many exporters at a time: submit actions, wait for their end, and compare answers with requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpumem_client.wire.errors import ExporterAnswerError, ExporterError, ExporterUntrustedError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.actions.declarations import longest_seconds
from gpumem_exporter.cli.api_client import Document, ExporterApi, has_ended, has_settled
from gpumem_exporter.features.fleet.node_selection import Exporter, Failure, TargetProcess

T = TypeVar("T")
R = TypeVar("R")

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
# An action has failed if its exporter misses this number of answers in a row.
_MISSED_ANSWERS_MAX = 3
_REFUSALS = (401, 403, 404, 409, 422, 429)


@dataclass(slots=True)
class ExporterRequest:
    """An action at one exporter, and its state."""

    exporter: Exporter
    processes: tuple[TargetProcess, ...]
    target: Mapping[str, Any]
    action: Mapping[str, Any] = field(default_factory=dict)
    """The latest document of the action; empty before the first answer."""
    failure: Failure | None = None
    missed_answers: int = 0
    """Answers that the exporter missed in a row."""
    of_job: bool = False
    """The exporter may add the other ranks of the workload on its node."""

    @property
    def pending(self) -> bool:
        """Whether the request may still change."""
        return self.failure is None and not has_settled(self.action)


class Fleet:
    """The exporters of a fleet, each on its own connection; `parallel` are queried at a time. Not thread-safe.

    `connect` returns the API at an exporter's URL.
    """

    def __init__(
        self,
        exporters: Iterable[Exporter],
        connect: Callable[[str], ExporterApi],
        *,
        parallel: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._exporters = tuple(exporters)
        self._apis = {exporter.url: connect(exporter.url) for exporter in self._exporters}
        self._parallel, self._clock, self._sleep = parallel, clock, sleep

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        for api in self._apis.values():
            api.close()

    def ask(self, question: Callable[[ExporterApi], R]) -> dict[Exporter, R]:
        """Return the answer of each exporter."""
        answers = self._run(lambda one: question(self._apis[one.url]), self._exporters)
        return dict(zip(self._exporters, answers, strict=True))

    def processes(self) -> dict[Exporter, list[Document] | Failure]:
        """Return the processes of each exporter, or why they are unknown."""
        return self.ask(_processes)

    def run(
        self,
        requests: Sequence[ExporterRequest],
        body: Mapping[str, Any],
        *,
        wait_seconds: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Submit requests, and poll them until all have ended or the time is over; by default their own time.

        Once `stopped` returns true, no further request is submitted, and the others are canceled where they have not
        started.
        """
        self._for_each(requests, lambda request, api: _submit(request, api, body, stopped))
        if wait_seconds is None:
            wait_seconds = max((_wait_seconds(request, body) for request in requests), default=0.0)
        end, pause, canceled = self._clock() + wait_seconds, _FIRST_PAUSE_SECONDS, False
        while pending := [request for request in requests if request.pending]:
            left = end - self._clock()
            if left <= 0:
                break
            if stopped() and not canceled:
                canceled = True
                self._for_each(pending, _cancel)
                continue
            self._sleep(min(left, pause))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._for_each(pending, _poll)
        for request in requests:
            if request.pending and not has_ended(request.action):
                reason = f"action {request.action.get('id')} did not end within {wait_seconds:g} s"
                request.failure = Failure("expired", reason)

    def _for_each(
        self, requests: Iterable[ExporterRequest], work: Callable[[ExporterRequest, ExporterApi], None]
    ) -> None:
        """Work on several exporters in parallel."""
        # One exporter's requests share a connection, so they run in sequence.
        by_url: dict[str, list[ExporterRequest]] = {}
        for request in requests:
            by_url.setdefault(request.exporter.url, []).append(request)

        def work_on(url: str) -> None:
            for request in by_url[url]:
                work(request, self._apis[url])

        self._run(work_on, tuple(by_url))

    def _run(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        from multiprocessing.pool import ThreadPool

        # The threads are daemons, unlike the threads of concurrent.futures: Ctrl-C does not wait for a node that hangs.
        with ThreadPool(max(1, min(self._parallel, len(items)))) as pool:
            return pool.map(work, items, chunksize=1)


def result_rows(request: ExporterRequest) -> Iterator[dict[str, Any]]:
    """Yield a row for each process and device of a request.

    A result for another process or device than the requested one is a failure.
    """
    exporter, action_id = request.exporter, request.action.get("id")
    origin = {"instance": exporter.instance, "url": shown_url(exporter.url), "action_id": action_id}
    requested = {str(process.pid): process for process in request.processes}
    for result in request.action.get("results") or ():
        row = {**origin, **result}
        added = request.of_job and result.get("rank")
        if (str(result["pid"]) not in requested and not added) or _contradicts(request.target, result):
            row |= {"outcome": "failed", "reason": "the exporter acted on a process that was not requested"}
        yield row
    answered = {str(result["pid"]) for result in request.action.get("results") or ()}
    failure = request.failure or Failure("failed", "the exporter's answer lacks this process")
    for pid, process in requested.items():
        if pid not in answered:
            identity = {"pid": process.pid, "workload": process.workload, "rank": process.rank}
            yield failed_row(exporter, failure, **identity, gpu=",".join(process.gpus), action_id=action_id)


def failed_row(exporter: Exporter, failure: Failure, **identity: Any) -> dict[str, Any]:
    """Return a row for processes without a result. `identity` has their known labels."""
    labels = dict.fromkeys(("action_id", "pid", "workload", "rank", "gpu", "uuid"))
    return {
        "instance": exporter.instance,
        "url": shown_url(exporter.url),
        **labels,
        **identity,
        "outcome": failure.outcome,
        "reason": failure.reason,
        "freed_bytes": None,
    }


def _processes(api: ExporterApi) -> list[Document] | Failure:
    try:
        processes = api.get("/api/v1/processes").get("processes")
    except ExporterError as error:
        return _failure(error)
    if isinstance(processes, list):
        return processes
    return Failure("failed", f"the server at {shown_url(api.url)} is not a gpumem-exporter")


def _wait_seconds(request: ExporterRequest, body: Mapping[str, Any]) -> float:
    deadline_seconds = request.action.get("deadline_seconds") or body.get("deadline_seconds")
    return longest_seconds({**body, "deadline_seconds": deadline_seconds}) + float(body.get("settle_seconds", 0.0))


def _submit(request: ExporterRequest, api: ExporterApi, body: Mapping[str, Any], stopped: Callable[[], bool]) -> None:
    if stopped():
        request.failure = Failure("refused", "canceled before it was requested")
        return
    try:
        request.action = api.submit({**body, "target": request.target})
    except ExporterAnswerError as error:
        # Of several processes, only one may have exited; the error names it.
        gone = Failure("gone", "no process matches; it may have exited")
        request.failure = gone if error.status == 404 and len(request.processes) == 1 else _failure(error)
    except ExporterUntrustedError as error:
        request.failure = Failure("refused", str(error))
    except ExporterError as error:
        request.failure = Failure("failed", f"{error}; the exporter may have received the request and acted")


def _poll(request: ExporterRequest, api: ExporterApi) -> None:
    try:
        request.action = api.action(str(request.action["id"]))
        request.missed_answers = 0
    except ExporterAnswerError:
        request.failure = Failure("failed", "the exporter no longer knows the action; the process may have acted")
    except ExporterError as error:
        request.missed_answers += 1
        if request.missed_answers >= _MISSED_ANSWERS_MAX:
            action_id = request.action["id"]
            request.failure = Failure("failed", f"action {action_id}: the process may have acted, but {error}")


def _cancel(request: ExporterRequest, api: ExporterApi) -> None:
    try:
        request.action = api.cancel(str(request.action["id"]))
    except ExporterError:
        return  # `wait` finds out how the request ends.


def _failure(error: ExporterError) -> Failure:
    refused = isinstance(error, ExporterAnswerError) and error.status in _REFUSALS
    return Failure("refused" if refused else "failed", str(error))


def _contradicts(target: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Whether a result is of another process or device than the target, in spite of its pid."""
    if any(name in target and target[name] != result.get(name) for name in ("workload", "rank")):
        return True
    return "uuid" in target and result.get("uuid") not in ("", target["uuid"])
