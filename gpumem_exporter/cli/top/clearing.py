"""`c` in `top`: a dry run of a clear of one process, a question, and the clear after a yes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.main import one_line
from gpumem_exporter.cli.render.action_tables import reasons, summary
from gpumem_exporter.cli.top.rows import Row
from gpumem_exporter.errors import GpumemError

__all__ = ["Clearing", "Note", "OpenApi"]

OpenApi = Callable[[str], ExporterApi]
"""Makes the API of the exporter at an address."""

_DEADLINE_SECONDS, _WAIT_SECONDS = 10.0, 15.0
_QUESTION_STANDS_SECONDS = 30.0
"""After this time the sizes in the question are too old for a yes."""
_SHOWN_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the reader, and whether it waits for a yes."""

    text: str
    ends_seconds: float
    """When it disappears, by the monotonic clock."""
    target: Mapping[str, Any] | None = None
    """Of a question: what a yes would clear."""

    @property
    def asks(self) -> bool:
        """It waits for an answer."""
        return self.target is not None


class Clearing:
    """Asks for clears beside the screen. The screen's thread alone calls it.

    Args:
        open_api: makes the way to the exporter that is on the screen.
        notify: called from another thread when there is something new to say.
    """

    def __init__(
        self,
        open_api: OpenApi,
        notify: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_api = open_api
        self._notify = notify
        self._clock = clock
        self._note: Note | None = None
        self._url = ""
        self._busy = False

    def note(self) -> Note | None:
        """What there is to say now; None for nothing."""
        note = self._note
        return note if note is not None and self._clock() < note.ends_seconds else None

    def ask(self, row: Row | None, url: str) -> None:
        """Find out how much a clear of a row's process would free, and ask the user whether to do it."""
        refusal = _refusal(row, url)
        if self._busy or row is None or refusal:
            self._tell(refusal or "an action is still running")
            return
        target = {"pid": row.pid, **{name: getattr(row, name) for name in ("workload", "rank") if getattr(row, name)}}
        self._url = url
        self._start(target, dry_run=True, saying=f"asking how much a clear of pid {row.pid} would free …")

    def answer(self, *, yes: bool) -> None:
        """Do what the question was about, or drop it."""
        note = self.note()
        self._note = None
        if note is not None and note.target is not None and yes:
            self._start(note.target, dry_run=False, saying=f"clearing pid {note.target['pid']} …")

    def dismiss(self) -> None:
        """Whatever was said has been read."""
        if not self._busy:
            self._note = None

    def _start(self, target: Mapping[str, Any], *, dry_run: bool, saying: str) -> None:
        self._busy = True
        self._note = Note(saying, self._clock() + 2 * _WAIT_SECONDS)
        threading.Thread(
            target=self._run, args=(target, dry_run, self._url), name="gpumem-top-clear", daemon=True
        ).start()

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
        said = one_line(" ".join(problems) or outcome)
        frees = any(result.get("freed_bytes") != 0 for result in results)
        if dry_run and frees and not problems:
            return Note(f"{said} Clear it? y/n", self._clock() + _QUESTION_STANDS_SECONDS, target)
        return Note(said, self._clock() + _SHOWN_SECONDS)

    def _tell(self, text: str) -> None:
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
