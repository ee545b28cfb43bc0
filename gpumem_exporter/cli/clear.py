"""A clear as the exporter suggests it: what it would free, the question to a person, and the requests.

The exporter decides in its reply to a dry run without a mode which processes clear at once, which at the end of a step,
and which ranks clear as a group. `clear --all` on a terminal and `top` send what it suggests. So does the live page,
which asks the same question in `clear.js`.
"""

from __future__ import annotations

import http.client
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_client.wire.units import counted, human_bytes
from gpumem_exporter.actions.request import DEFAULT_DEADLINE_SECONDS
from gpumem_exporter.cli.api_client import ExporterApi, has_ended
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import reasons
from gpumem_exporter.cli.render.node_tables import WORTH_SAYING
from gpumem_exporter.core.ledger import sum_of_known

Document = Mapping[str, Any]

_NAMED_JOBS_MAX = 8
_POLL_SECONDS = 0.25
_REFUSALS = (http.client.NOT_FOUND, http.client.CONFLICT, http.client.TOO_MANY_REQUESTS)
"""A part of a clear is refused if its processes exited, its ranks cannot act together, or a limit is reached."""


@dataclass(frozen=True, slots=True)
class ExpectedClear:
    """A request for a clear, and the exporter's reply to its dry run."""

    body: Document
    action: Document

    @property
    def results(self) -> Sequence[Document]:
        """The expected results."""
        return self.action.get("results") or ()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The suggested requests, or the request itself."""
        return [{**self.body, **suggested} for suggested in self.action.get("suggested") or ()] or [dict(self.body)]

    @property
    def waiting(self) -> list[dict[str, Any]]:
        """The requests for processes that clear at the end of a step."""
        return [request for request in self.requests if request["mode"] == "step"]

    def results_of(self, request: Document) -> list[Document]:
        """Return the expected results of one of the requests."""
        pids = request["target"].get("pid")
        chosen = pids if isinstance(pids, list) else [pids]
        return [result for result in self.results if pids is None or result["pid"] in chosen]


def expect(api: ExporterApi, body: Document) -> ExpectedClear:
    """Request the dry run of a clear. Its mode, and the default deadline, are left to the exporter."""
    left_open = {"mode", "settle_seconds"}
    if body["deadline_seconds"] == DEFAULT_DEADLINE_SECONDS:
        left_open.add("deadline_seconds")
    dry_run = {name: value for name, value in body.items() if name not in left_open}
    return ExpectedClear(body, api.act({**dry_run, "dry_run": True}, wait_seconds=0))


def can_ask() -> bool:
    """Whether a person can read a question and answer it."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirmed(api: ExporterApi, body: Document, *, free_mode: bool) -> ExpectedClear | None:
    """Ask whether to clear every process. Returns what to clear; None if the answer is no.

    With `free_mode`, the exporter chooses the mode of each process. Otherwise, the mode of `body` is in force.
    """
    expected = expect(api, body)
    given = ExpectedClear(body, {**expected.action, "suggested": []})
    lines = [stays_free(expected), *notes(expected)]
    if free_mode and (then := when(expected)):
        lines.append(then)
    elif body["mode"] == "now" and expected.waiting:
        lines.append(f"In the middle of a step, which may stall: {_jobs(expected, expected.waiting)}.")
    for line in lines:
        print(textwrap.fill(line, shutil.get_terminal_size().columns))
    others = "/now" if free_mode and expected.waiting else ""
    try:
        answer = input(f"Clear {processes_named(expected.results)}? [y/N{others}] ").strip().lower()
    except EOFError:
        answer = ""
    if others and answer == "now":
        return given
    if answer not in ("y", "yes"):
        print("Nothing was cleared.")
        return None
    # The jobs may have changed since the question was printed.
    return expect(api, body) if free_mode else given


def stays_free(expected: ExpectedClear) -> str:
    """Return how much of the freed memory stays free, as a sentence."""
    known = [result for result in expected.results if result.get("freed_bytes") is not None]
    hidden = any(result["outcome"] == "done" and result.get("freed_bytes") is None for result in expected.results)
    if not known:
        return "It is not known how much memory a clear would free."
    freed = sum(result["freed_bytes"] for result in known)
    settled = [result for result in known if result.get("still_free_bytes") is not None]
    if freed == 0 and not hidden:
        return "A clear would free nothing."
    if not settled:
        least = "at least " if hidden else ""
        return f"Would free {least}{human_bytes(freed)} now; how much of it stays free is not known yet."
    still_free = sum(result["still_free_bytes"] for result in settled)
    rests = {result["pid"]: result["freed_bytes"] - result["still_free_bytes"] for result in settled}
    least = "at least " if hidden or len(settled) < len(known) else ""
    text = f"Stays free {least}{human_bytes(still_free)}"
    rest = sum(result["freed_bytes"] - result["still_free_bytes"] for result in settled)
    if rest >= WORTH_SAYING * freed:
        waiting = {result["pid"] for request in expected.waiting for result in expected.results_of(request)}
        at_step = all(pid in waiting for pid, size in rests.items() if size > 0)
        text += f"; {human_bytes(rest)} more would be reserved again{' in the next step' if at_step else ''}"
    return f"{text}."


def when(expected: ExpectedClear) -> str:
    """Return which jobs clear at the end of a step, and how many processes at once; empty if all clear at once."""
    waiting = expected.waiting
    if not waiting:
        return ""
    at_once = [
        result for request in expected.requests if request["mode"] == "now" for result in expected.results_of(request)
    ]
    text = f"At the end of a step, within {_deadline_seconds(waiting):.0f} s: {_jobs(expected, waiting)}."
    return f"{text} At once: {processes_named(at_once)}." if at_once else text


def waits_for(expected: ExpectedClear) -> str:
    """Return what a clear waits for, as long as processes have not ended their steps."""
    waiting = expected.waiting
    return f"Waiting for the end of a step of {_jobs(expected, waiting)}, at most {_deadline_seconds(waiting):.0f} s"


def engine_waits(action: Document) -> list[str]:
    """Return for which inference engines an action waits, a sentence each."""
    sentences = []
    for wait in action.get("waits_for") or ():
        engine = f"pid {wait['pid']}" + (f" ({wait['title']})" if wait["title"] else "")
        until = time.strftime("%H:%M:%S UTC", time.gmtime(wait["until_unix_seconds"]))
        gpu = wait["gpu"] or wait["uuid"]
        sentences.append(f"Waiting until the engine in {engine} has started on GPU {gpu}, at the latest until {until}.")
    return [one_line(sentence) for sentence in sentences]


def notes(expected: ExpectedClear) -> Iterator[str]:
    """Yield the reasons in the expected results: of processes that would not clear, and of a clear that would wait."""
    yield from map(one_line, reasons(expected.results))
    done = [result for result in expected.results if result["outcome"] == "done" and result.get("reason")]
    for reason in dict.fromkeys(result["reason"] for result in done):
        pids = dict.fromkeys(str(result["pid"]) for result in done if result["reason"] == reason)
        yield one_line(f"pid {', '.join(pids)}: {reason}")


def processes_named(results: Sequence[Document]) -> str:
    """Return the job of some results, or the number of their processes: "llm (4 ranks)", "12 processes"."""
    by_pid = {result["pid"]: result for result in results}
    workloads = {result["workload"] for result in results}
    first = next(iter(by_pid.values()), None)
    if first is None or (len(by_pid) > 1 and (len(workloads) > 1 or not first["workload"])):
        return counted(len(by_pid), "process", "processes")
    name = one_line(first["workload"] or f"pid {first['pid']}")
    if len(by_pid) == 1:
        rank = one_line(first["rank"] or "")
        return f"{name} rank {rank}" if rank and first["workload"] else name
    unit = "ranks" if all(result["rank"] for result in by_pid.values()) else "processes"
    return f"{name} ({len(by_pid)} {unit})"


def _jobs(expected: ExpectedClear, requests: Sequence[Document]) -> str:
    """The jobs of some requests, by name."""
    jobs: dict[object, list[Document]] = {}
    for number, request in enumerate(requests):
        for result in expected.results_of(request):
            # A group is a job. Of other processes, another user may have the same workload.
            jobs.setdefault(number if request["group"] else result["workload"] or result["pid"], []).append(result)
    names = [processes_named(results) for results in jobs.values()]
    more = len(names) - _NAMED_JOBS_MAX
    return ", ".join([*names[:_NAMED_JOBS_MAX], *([f"and {more} more"] if more > 0 else [])])


def _deadline_seconds(requests: Sequence[Document]) -> float:
    return float(max(request["deadline_seconds"] for request in requests))


def send_all(
    api: ExporterApi,
    expected: ExpectedClear,
    *,
    wait_seconds: float,
    observe: Callable[[Document], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Send the suggested requests and wait for their ends. Returns the actions as they are then.

    What has not started is canceled on KeyboardInterrupt, and once `stopped` returns true. `observe` is called about
    four times a second with each action that has not ended. Raises ExporterAnswerError if the exporter rejects the only
    request, and ExporterUnreachableError if no address answers.
    """
    end = time.monotonic() + wait_seconds
    actions = [_sent(api, expected, request) for request in expected.requests]
    canceled = False
    while time.monotonic() < end and not all(map(has_ended, actions)):
        try:
            for action in actions:
                if not has_ended(action):
                    observe(action)
            time.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))
            stops = stopped()
        except KeyboardInterrupt:
            if canceled:
                raise
            stops = True
        read = api.cancel if stops and not canceled else api.action
        canceled = canceled or stops
        actions = [action if has_ended(action) else read(action["id"]) for action in actions]
    return actions


def joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one document for the parts of an action, with the state of the first part that is not done."""
    if len(documents) == 1:
        return documents[0]
    first = next((document for document in documents if document.get("state") != "done"), documents[0])
    return {
        **first,
        "freed_bytes": sum_of_known([document.get("freed_bytes") for document in documents]),
        "still_free_bytes": sum_of_known([document.get("still_free_bytes") for document in documents]),
        "settle_seconds": max(document.get("settle_seconds") or 0.0 for document in documents),
        "results": [result for document in documents for result in document.get("results") or ()],
    }


def _sent(api: ExporterApi, expected: ExpectedClear, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request. If only this part of the clear is refused, return its refusal, because the others may run."""
    try:
        return api.submit(request)
    except ExporterAnswerError as error:
        if len(expected.requests) == 1 or error.status not in _REFUSALS:
            raise
        unknown = dict.fromkeys(("reserved_after_bytes", "freed_bytes", "still_free_bytes"))
        refused = {"outcome": "refused", "reason": error.detail, **unknown}
        results = [{**result, **refused} for result in expected.results_of(request)]
        return {**expected.action, "state": "failed", "dry_run": False, "freed_bytes": None, "results": results}
