"""`c` in `top`: a dry run of a clear of one process, a question, and the clear after a yes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import reasons, summary
from gpumem_exporter.cli.top.rows import Row
from gpumem_exporter.errors import GpumemError

__all__ = ["Clearing", "Note", "OpenApi"]

OpenApi = Callable[[str], ExporterApi]
"""Returns the API of the exporter at an address."""

_DEADLINE_SECONDS, _WAIT_SECONDS = 10.0, 15.0
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
    """The process that the answer yes clears; None for a note without a question."""

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

    def note(self) -> Note | None:
        """Return the current note; None if there is none."""
        note = self._note
        return note if note is not None and self._clock() < note.ends_seconds else None

    def ask(self, row: Row | None, url: str) -> None:
        """Request a dry run for a row's process. Its result becomes a question."""
        refusal = _refusal(row, url)
        if self._busy or row is None or refusal:
            self._show(refusal or "an action is still running")
            return
        target = {"pid": row.pid, **{name: getattr(row, name) for name in ("workload", "rank") if getattr(row, name)}}
        self._url = url
        self._start(target, dry_run=True, text=f"dry run of a clear of pid {row.pid} …")

    def answer(self, *, yes: bool) -> None:
        """Clear the process of the question, or drop the question."""
        note = self.note()
        self._note = None
        if note is not None and note.target is not None and yes:
            self._start(note.target, dry_run=False, text=f"clearing pid {note.target['pid']} …")

    def dismiss(self) -> None:
        """Remove the note, unless an action is running."""
        if not self._busy:
            self._note = None

    def _start(self, target: Mapping[str, Any], *, dry_run: bool, text: str) -> None:
        self._busy = True
        self._note = Note(text, self._clock() + 2 * _WAIT_SECONDS)
        arguments = (target, dry_run, self._url)
        threading.Thread(target=self._run, args=arguments, name="gpumem-top-clear", daemon=True).start()

    def _run(self, target: Mapping[str, Any], dry_run: bool, url: str) -> None:
        request = {
            "action": "empty_cache",
            "target": target,
            "mode": "now",
            "deadline_seconds": _DEADLINE_SECONDS,
            "dry_run": dry_run,
            "reason": "requested in top",
        }
        try:
            with self._open_api(url) as api:
                action = api.act(request, wait_seconds=_WAIT_SECONDS)
            self._note = self._outcome(action, target, dry_run)
        except GpumemError as error:
            self._note = Note(one_line(str(error)), self._clock() + _SHOWN_SECONDS)
        finally:
            self._busy = False
            self._notify()

    def _outcome(self, action: Mapping[str, Any], target: Mapping[str, Any], dry_run: bool) -> Note:
        results = action.get("results") or []
        problems = list(reasons(results))
        outcome = f"pid {target['pid']}: {summary(action, dry_run=dry_run)}"
        text = one_line(" ".join(problems) or outcome)
        frees = any(result.get("freed_bytes") != 0 for result in results)
        if dry_run and frees and not problems:
            return Note(f"{text} Clear it? y/n", self._clock() + _QUESTION_SECONDS, target)
        return Note(text, self._clock() + _SHOWN_SECONDS)

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
