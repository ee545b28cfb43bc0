"""Completion in bash, zsh and fish by click, with names that the running exporter knows.

The shell runs the program with `_GPUMEM_EXPORTER_COMPLETE` at each tab. Nothing but the completions is ever printed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, shell_complete

from gpumem_exporter.cli.api_client import Document
from gpumem_exporter.cli.program import COMPLETION_VARIABLE, PROGRAM
from gpumem_exporter.cli.usage import kube_forward, open_api

# The timeout of the exporter at a tab.
_ANSWER_SECONDS = 1.0
_LIVE = "/api/v1/live"
# A shell inserts a completion as it is. Another user may have named a job `$(...)`.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.,:@/+%-]+")

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete(application: click.Command, instruction: str) -> int:
    """Print completions, or the script for a shell, and return the exit code."""
    with contextlib.suppress(Exception):  # a half-typed line is no error
        return shell_complete(application, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
    return 0


def of_list(known: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """Return the completions of the last name of a list with commas."""
    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in known if name.startswith(last) and name not in given]


def _names(path: str, found: Callable[[Document], Iterable[object]]) -> Completion:
    """Return the completion of names that a document of the exporter has."""

    def complete_name(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # A tab has no place for an error. Names behind kubectl, which takes seconds, are not completed.
        with contextlib.suppress(Exception), context.scope(cleanup=False):
            if kube_forward() is None:
                with open_api(context.params.get("token_file"), timeout_seconds=_ANSWER_SECONDS) as api:
                    names = dict.fromkeys(str(name) for name in found(api.get(path)))
                return of_list(filter(_SAFE_NAME.fullmatch, names), incomplete)
        return []

    return complete_name


def _of_processes(name: str) -> Completion:
    return _names(_LIVE, lambda live: (process.get(name) for job in live["jobs"] for process in job["processes"]))


SELECTORS = {
    "gpu": _names(_LIVE, lambda live: (device["gpu"] for device in live["devices"])),
    "uuid": _names(_LIVE, lambda live: (device["uuid"] for device in live["devices"])),
    **{name: _of_processes(name) for name in ("pid", "workload", "rank", "user")},
}
"""The completion of each option that selects processes."""
JOBS = _names(_LIVE, lambda live: (job.get("workload") or job["id"] for job in live["jobs"]))
PROFILE_IDS = _names("/api/v1/profiles", lambda document: (each["id"][:8] for each in document["profiles"]))
ACTION_IDS = _names("/api/v1/actions?dry_run=false", lambda document: (each["id"][:8] for each in document["actions"]))
