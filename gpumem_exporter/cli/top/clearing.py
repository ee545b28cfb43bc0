"""`c` in `top`: a dry run of a clear of one job, a question, and the clear after a yes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.actions.request import DEFAULT_DEADLINE_SECONDS
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.clear import (
    ExpectedClear,
    engine_waits,
    expect,
    joined,
    notes,
    processes_named,
    send_all,
    stays_free,
    waits_for,
    when,
)
from gpumem_exporter.cli.options import ANSWER_GRACE_SECONDS
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import reasons, summary
from gpumem_exporter.cli.top.rows import Row

__all__ = ["Clearing", "Note", "OpenApi"]

OpenApi = Callable[[str], ExporterApi]
"""Returns the API of the exporter at an address."""

_QUESTION_SECONDS = 30.0
"""After this time the sizes in the question are too old for an answer."""
_SHOWN_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Note:
    """A message at the bottom of the screen. A note with a target is a question."""

    text: str
    ends_seconds: float
    """When the note disappears, by the monotonic clock."""
    target: Mapping[str, Any] | None = None
    """The job that the answer yes clears; None for a note without a question."""

    @property
    def asks(self) -> bool:
        """Whether the note waits for an answer."""
        return self.target is not None


class Clearing:
    """Requests clears in a thread of its own. Only the screen's thread calls it.

    Args:
        open_api: opens the API of the exporter on the screen.
        notify: called from another thread when the note has changed.
    """

    def __init__(
        self, open_api: OpenApi, notify: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._open_api = open_api
        self._notify = notify
        self._clock = clock
        self._note: Note | None = None
        self._url = ""
        self._busy = False
        self._waits = False
        """Whether the clear that runs waits for the end of a step or for an engine."""
        self._stopped = threading.Event()

    def note(self) -> Note | None:
        """Return the current note; None if there is none."""
        note = self._note
        return note if note is not None and self._clock() < note.ends_seconds else None

    def ask(self, row: Row | None, url: str) -> None:
        """Request a dry run for the job of a row. Its result becomes a question. Cancel a clear that waits."""
        if self._waits:
            self._stopped.set()
            return
        refusal = _refusal(row, url)
        if self._busy or row is None or refusal:
            self._show(refusal or "an action is still running")
            return
        # A job is the processes of one workload and user: one rank that clears alone makes the others wait.
        job = {name: getattr(row, name) for name in ("workload", "user") if getattr(row, name)}
        self._url = url
        self._start(job if row.workload else {"pid": row.pid}, dry_run=True)

    def answer(self, *, yes: bool) -> None:
        """Clear the job of the question, or drop the question."""
        note = self.note()
        self._note = None
        if note is not None and note.target is not None and yes:
            self._start(note.target, dry_run=False)

    def dismiss(self) -> None:
        """Remove the note, unless an action is running."""
        if not self._busy:
            self._note = None

    def _start(self, target: Mapping[str, Any], *, dry_run: bool) -> None:
        self._busy = True
        self._stopped.clear()
        name = one_line(str(target.get("workload") or f"pid {target.get('pid')}"))
        self._note = Note(f"dry run of a clear of {name} …" if dry_run else f"clearing {name} …", float("inf"))
        arguments = (target, dry_run, self._url)
        threading.Thread(target=self._run, args=arguments, name="gpumem-top-clear", daemon=True).start()

    def _run(self, target: Mapping[str, Any], dry_run: bool, url: str) -> None:
        body = {
            "action": "empty_cache",
            "target": target,
            "mode": "now",
            "deadline_seconds": DEFAULT_DEADLINE_SECONDS,
            "reason": "requested in top",
        }
        try:
            with self._open_api(url) as api:
                # Also before the clear: the job may have changed since the question.
                expected = expect(api, body)
                self._note = self._question(expected, target) if dry_run else self._cleared(api, expected)
        except GpumemError as error:
            self._note = Note(one_line(str(error)), self._clock() + _SHOWN_SECONDS)
        finally:
            self._busy = self._waits = False
            self._notify()

    def _question(self, expected: ExpectedClear, target: Mapping[str, Any]) -> Note:
        done = [result for result in expected.results if result["outcome"] == "done"]
        if not any(result.get("freed_bytes") != 0 for result in done):
            text = " ".join(notes(expected)) or f"{processes_named(expected.results)}: {stays_free(expected)}"
            return Note(text, self._clock() + _SHOWN_SECONDS)
        sentences = [stays_free(expected), *filter(None, [when(expected)]), *notes(expected)]
        question = f"Clear {processes_named(done)}? y/n  {' '.join(sentences)}"
        return Note(question, self._clock() + _QUESTION_SECONDS, target)

    def _cleared(self, api: ExporterApi, expected: ExpectedClear) -> Note:
        if expected.waiting:
            self._waits = True
            self._note = Note(f"{waits_for(expected)}; c cancels.", float("inf"))
            self._notify()
        wait_seconds = max(request["deadline_seconds"] for request in expected.requests) + ANSWER_GRACE_SECONDS
        actions = send_all(
            api, expected, wait_seconds=wait_seconds, observe=self._show_engines, stopped=self._stopped.is_set
        )
        action = joined(actions)
        outcome = f"{processes_named(expected.results)}: {summary(action, dry_run=False)}"
        text = one_line(" ".join(reasons(action.get("results") or [])) or outcome)
        return Note(text, self._clock() + _SHOWN_SECONDS)

    def _show_engines(self, action: Mapping[str, Any]) -> None:
        """Show for which engines an action waits."""
        if sentences := engine_waits(action):
            self._waits = True
            self._note = Note(f"{' '.join(sentences)} c cancels.", float("inf"))
            self._notify()

    def _show(self, text: str) -> None:
        if not self._busy:
            self._note = Note(text, self._clock() + _SHOWN_SECONDS)


def _refusal(row: Row | None, url: str) -> str:
    if not url:
        return "a clear needs an exporter, and no exporter answers"
    if row is None:
        return "select a process first, with the arrow keys or j and k"
    if row.state != "reporting":
        return f"pid {row.pid} does not report, so it cannot clear its cache"
    if row.actions and "empty_cache" not in row.actions:
        return f"pid {row.pid} does not accept this action"
    return ""
