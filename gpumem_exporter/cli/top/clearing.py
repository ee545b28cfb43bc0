"""`c` in `top`: a dry run of a clear of one job, a question, and the clear after a yes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.actions.model import is_done
from gpumem_exporter.actions.request import DEFAULT_DEADLINE_SECONDS
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.clear import act, plan_clear, question
from gpumem_exporter.cli.live import in_daemon_thread
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import reasons
from gpumem_exporter.view.sentences import sentence

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
                plan = await in_daemon_thread(lambda: plan_clear(api, body))
                done = [result for result in plan.results if is_done(result["outcome"])]
                if not any(result.get("freed_bytes") != 0 for result in done):
                    return " ".join(reasons(plan.results)) or f"{name}: {sentence(plan.expected)}"
                self._note("", None)
                if not await self._ask(f"{question(plan)} y/n"):
                    return ""
                self._note(f"clearing {plan.subject} …", None)
                loop = asyncio.get_running_loop()

                def say(text: str) -> None:
                    loop.call_soon_threadsafe(self._note, f"{one_line(text)} c cancels.", None)

                return await in_daemon_thread(lambda: self._cleared(api, body, say))
        except GpumemError as error:
            return one_line(str(error))

    def _cleared(self, api: ExporterApi, body: Row, say: Callable[[str], None]) -> str:
        self._stopped = threading.Event()
        # The job may have changed since the question.
        action = act(api, plan_clear(api, body), say=say, stopped=self._stopped.is_set)
        return one_line(" ".join(reasons(action["results"])) or sentence(action))


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
