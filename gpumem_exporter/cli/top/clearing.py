"""`c` in `top`: a dry run of a clear of one job, a question, and the clear after a yes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.actions.request import DEFAULT_DEADLINE_SECONDS
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.clear import (
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
from gpumem_exporter.cli.live import in_daemon_thread
from gpumem_exporter.cli.options import ANSWER_GRACE_SECONDS
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import reasons, summary

Row = Mapping[str, Any]

_SHOWN_SECONDS = 15.0


class Clearing:
    """Requests clears, one at a time.

    `ask` returns whether the answer to a question is yes. `note` shows a text for some seconds, or until the next one.
    """

    def __init__(
        self,
        open_api: Callable[[str], ExporterApi],
        ask: Callable[[str], Awaitable[bool | None]],
        note: Callable[[str, float | None], None],
    ) -> None:
        self._open_api, self._ask, self._note = open_api, ask, note
        self._busy = False
        self._stopped: threading.Event | None = None
        """Cancels the clear that runs; None while none does."""

    async def clear_or_cancel(self, row: Row | None, url: str) -> None:
        """Ask whether to clear the job of a row, at the exporter with this address, and clear it after a yes.

        If a clear is waiting for the end of a step or for an engine, cancel that.
        """
        if self._stopped is not None:
            self._stopped.set()
        elif not self._busy:
            refusal = _refusal(row, url)
            self._busy = True
            try:
                self._note(refusal if row is None or refusal else await self._clear(row, url), _SHOWN_SECONDS)
            finally:
                self._busy, self._stopped = False, None

    async def _clear(self, row: Row, url: str) -> str:
        """Ask and clear. Return the note about the result; empty if the answer is no."""
        # A job is the processes of one workload and user: one rank that clears alone makes the others wait.
        job = {name: row[name] for name in ("workload", "user") if row[name]}
        body = {
            "action": "empty_cache",
            "target": job if row["workload"] else {"pid": row["pid"]},
            "mode": "now",
            "deadline_seconds": DEFAULT_DEADLINE_SECONDS,
            "reason": "requested in top",
        }
        name = one_line(row["workload"] or f"pid {row['pid']}")
        self._note(f"dry run of a clear of {name} …", None)
        try:
            with self._open_api(url) as api:
                expected = await in_daemon_thread(lambda: expect(api, body))
                done = [result for result in expected.results if result["outcome"] == "done"]
                if not any(result.get("freed_bytes") != 0 for result in done):
                    return " ".join(notes(expected)) or f"{processes_named(expected.results)}: {stays_free(expected)}"
                self._note("", None)
                sentences = [stays_free(expected), *filter(None, [when(expected)]), *notes(expected)]
                if not await self._ask(f"Clear {processes_named(done)}? y/n  {' '.join(sentences)}"):
                    return ""
                self._note(f"clearing {processes_named(done)} …", None)
                loop = asyncio.get_running_loop()

                def say(text: str) -> None:
                    loop.call_soon_threadsafe(self._note, text, None)

                return await in_daemon_thread(lambda: self._cleared(api, body, say))
        except GpumemError as error:
            return one_line(str(error))

    def _cleared(self, api: ExporterApi, body: Row, say: Callable[[str], None]) -> str:
        expected = expect(api, body)  # the job may have changed since the question
        self._stopped = threading.Event()
        if expected.waiting:
            say(f"{waits_for(expected)}; c cancels.")

        def show_engines(action: Mapping[str, Any]) -> None:
            if sentences := engine_waits(action):
                say(f"{' '.join(sentences)} c cancels.")

        wait_seconds = max(request["deadline_seconds"] for request in expected.requests) + ANSWER_GRACE_SECONDS
        stopped = self._stopped.is_set
        action = joined(send_all(api, expected, wait_seconds=wait_seconds, observe=show_engines, stopped=stopped))
        outcome = f"{processes_named(expected.results)}: {summary(action, dry_run=False)}"
        return one_line(" ".join(reasons(action.get("results") or [])) or outcome)


def _refusal(row: Row | None, url: str) -> str:
    if not url:
        return "a clear needs an exporter, and no exporter answers"
    if row is None:
        return "there is no process to clear"
    if row["state"] != "reporting":
        return f"pid {row['pid']} does not report, so it cannot clear its cache"
    if row["actions"] and "empty_cache" not in row["actions"]:
        return f"pid {row['pid']} does not accept this action"
    return ""
