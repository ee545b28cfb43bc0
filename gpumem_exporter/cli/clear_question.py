"""The question before `clear --all` on a terminal: what it would free, and which jobs train meanwhile.

A job that trains clears at the end of a step, unless `--mode` says otherwise: a clear in the middle stalls the step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.node_tables import clear_summary

__all__ = ["can_ask", "confirmed_requests"]

Document = Mapping[str, Any]

_NAMED_JOBS_MAX = 8
_IDLE_STEPS = 3
"""A job that has ended no step in the time of this number of steps does not train now."""


def can_ask() -> bool:
    """Whether a person can read a question and answer it."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirmed_requests(api: ExporterApi, body: Document, *, at_steps: bool) -> list[dict[str, Any]]:
    """Ask whether to clear every process. Returns the requests to send: none if the answer is no.

    Args:
        api: the exporter.
        body: the request for every process.
        at_steps: split the request, so that jobs that train clear at the end of a step and the others at once.
    """
    expected = api.act({**body, "dry_run": True, "settle_seconds": 0}, wait_seconds=0)
    pids = list(dict.fromkeys(result["pid"] for result in expected["results"] if result["outcome"] == "done"))
    before = _processes(api, pids)
    stalls = body["mode"] == "now" and not at_steps
    print(_question(list(before.values()), stalls=stalls))
    try:
        answer = input("Clear them? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        print("Nothing was cleared.")
        return []
    now = _processes(api, pids)
    training = [pid for pid in now if at_steps and _trains(before.get(pid, now[pid]), now[pid])]
    if not training:
        return [dict(body)]
    others = [pid for pid in now if pid not in training]
    at_once = [{**body, "target": {"pid": others}}] if others else []
    return [*at_once, {**body, "target": {"pid": training}, "mode": "step"}]


def _processes(api: ExporterApi, pids: Sequence[int | str]) -> dict[int | str, Document]:
    """Return the processes with these pids that still report."""
    processes = api.get("/api/v1/processes")["processes"]
    return {process["pid"]: process for process in processes if process["reporting"] and process["pid"] in pids}


def _counts_steps(process: Document) -> bool:
    return process["step"] is not None and bool(process["step_seconds"])


def _trains(before: Document, now: Document) -> bool:
    """Whether a process counts steps and was not seen without one for some time."""
    if not _counts_steps(now):
        return False
    seconds = now["last_report_unix_seconds"] - before["last_report_unix_seconds"]
    return bool(now["step"] != before["step"] or seconds <= _IDLE_STEPS * now["step_seconds"])


def _question(processes: Sequence[Document], *, stalls: bool) -> str:
    text = clear_summary(processes)
    names = list(dict.fromkeys(map(_name, filter(_counts_steps, processes))))
    if names:
        more = len(names) - _NAMED_JOBS_MAX
        named = ", ".join([*names[:_NAMED_JOBS_MAX], *([f"and {more} more"] if more > 0 else [])])
        when = "may stall in the middle of a step" if stalls else "would clear at the end of a step"
        text += f"\nJobs that train {when}: {named}."
    return text


def _name(process: Document) -> str:
    workload, rank = one_line(process["workload"] or ""), one_line(process["rank"] or "")
    return (workload or f"pid {process['pid']}") + (f" rank {rank}" if workload and rank else "")
