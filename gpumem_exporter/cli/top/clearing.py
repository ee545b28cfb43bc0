"""`c` in `top`: the question about a clear, with the exporter's own sentence, and the clear after a yes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.clear import Plan, act
from gpumem_exporter.cli.live import in_daemon_thread
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import reasons
from gpumem_exporter.view.sentences import sentence

Document = Mapping[str, Any]

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
        self._stopped: threading.Event | None = None
        """Cancels the clear that runs; None while none does."""

    async def clear_or_cancel(self, name: str, clear: Document | None, url: str) -> None:
        """Ask whether to clear a job at the exporter with this address, and clear it after a yes.

        `clear` is the exporter's proposal for the job. If a clear is waiting for the end of a step or for an engine,
        cancel that clear instead.
        """
        if self._stopped is not None:
            self._stopped.set()
            return
        self._stopped = threading.Event()
        try:
            self._note(await self._clear(one_line(name), clear, url, self._stopped.is_set), _SHOWN_SECONDS)
        finally:
            self._stopped = None

    async def _clear(self, name: str, clear: Document | None, url: str, stopped: Callable[[], bool]) -> str:
        """Ask and clear. Return the note about the result; empty if the answer is no."""
        if not url:
            return "A clear needs an exporter, and no exporter answers."
        if clear is None:
            return f"{name} has no idle cache that a clear frees for good."
        ranks = "Its ranks clear together" if clear["group"] else "It clears"
        timing = f" {ranks} at the end of a step." if clear["mode"] == "step" else ""
        if not await self._ask(f"Clear {name}? {clear['sentence']}{timing} y/n"):
            return ""
        self._note(f"Clearing {name} …", None)
        loop = asyncio.get_running_loop()
        body = {name: clear[name] for name in ("target", "mode", "group", "deadline_seconds")}
        body |= {"action": "empty_cache", "reason": "requested in top"}

        def say(text: str) -> None:
            loop.call_soon_threadsafe(self._note, f"{one_line(text)} c cancels.", None)

        def run() -> str:
            with self._open_api(url) as api:
                action = act(api, Plan(body), say=say, stopped=stopped)
            return one_line(" ".join(reasons(action["results"])) or sentence(action))

        try:
            return await in_daemon_thread(run)
        except GpumemError as error:
            return one_line(str(error))
