"""An action from a question to its end: `clear --all` on a terminal, `top`, and every command that requests an action.

The exporter decides which processes act at once, which at the end of a step, and which when they are idle.
"""

from __future__ import annotations

import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.errors import ConfigurationError, ExporterAnswerError, ExporterUnreachableError
from gpumem_client.wire.units import counted
from gpumem_exporter.actions import sentences
from gpumem_exporter.actions.action_options import ANSWER_GRACE_SECONDS, longest_seconds
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.cli.api_client import Document, ExporterApi, has_ended
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import action_tables, reasons
from gpumem_exporter.cli.render.terminal import open_console, show
from gpumem_exporter.cli.usage import note

if TYPE_CHECKING:
    from rich.console import RenderableType

_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.25
# An exporter that restarts answers again within this time.
_LOST_SECONDS = 15.0
_YES = ("y", "yes")


def can_ask() -> bool:
    """Whether a person can read a question and answer it."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirmed_clear(expected: Document) -> bool:
    """Ask whether to clear, after a dry run: `Clear demo-notebook? Stays free 2.2 GiB. [y/N]`."""
    would = [result for result in expected["results"] if is_done(result["outcome"])]
    if not would:
        return True  # there is nothing to decide, and the action says why
    parts = (f"Clear {sentences.subject(would)}?", sentences.sentence(expected), *reasons(expected["results"]), "[y/N]")
    *lines, last = textwrap.wrap(" ".join(map(one_line, parts)), shutil.get_terminal_size().columns - len(" y"))
    print("\n".join([*lines, ""]), end="")
    return _said_yes(last, "cleared")


def must_confirm(body: Document, *, yes: bool, as_json: bool) -> bool:
    """Return whether a request ends processes and needs a yes. Raises ConfigurationError if no one can answer."""
    if body["action"] != "terminate" or body["dry_run"] or yes:
        return False
    if as_json or not can_ask():
        raise ConfigurationError("terminate asks on a terminal before it ends processes; without one, add --yes")
    return True


def confirmed_end(expected: Document, tables: Callable[[Document], Iterator[RenderableType]]) -> bool:
    """Show the results of a dry run, and ask whether to terminate the processes."""
    show(open_console(), tables(expected))
    ends = {(row.get("instance"), row["pid"]) for row in expected["results"] if is_done(row["outcome"])}
    question = f"Terminate {counted(len(ends), 'process', 'processes')}? [y/N]" if ends else ""
    return _said_yes(question, "terminated")


def confirmed_termination(api: ExporterApi, body: Document) -> Document | None:
    """Show what would be terminated, and ask. Returns the termination of these processes; None if the answer is no."""
    dry_run = {**body, "dry_run": True}
    expected = api.submit(dry_run)
    if not expected["results"]:
        return dry_run  # not the request itself, which may match something by now
    if not confirmed_end(expected, action_tables):
        return None
    pids = dict.fromkeys(result["pid"] for result in expected["results"] if is_done(result["outcome"]))
    target = {name: values for name, values in body["target"].items() if name != "all"}
    return {**body, "target": {**target, "pid": list(pids)}}


def _said_yes(question: str, done: str) -> bool:
    """Ask, if there is a question. Without a yes, print that nothing was done."""
    try:
        if question and input(f"{question} ").strip().lower() in _YES:
            return True
    except EOFError:
        pass
    print(f"Nothing was {done}.")
    return False


class Interrupts:
    """Within the block, the first Ctrl-C sets `requested`, and the second one raises KeyboardInterrupt.

    In a thread besides the main one, and where Ctrl-C is ignored or has another handler, the block changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._takes = False

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        self._takes = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._takes:
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.default_int_handler(number, frame)
        self.requested = True


def act(
    api: ExporterApi,
    body: Document,
    *,
    wait_seconds: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Send a request, wait for its end and for what stays free, and return the action.

    What has not started is canceled on Ctrl-C, at any moment, and once `stopped` returns true. `say` is called again
    and again with what the action waits for. Without `wait_seconds`, the wait ends with the action.

    Raises ExporterAnswerError if the exporter rejects the request, and ExporterUnreachableError if no address answers.
    Once the action has an id, the error has it.
    """
    with Interrupts() as interrupts:
        # The reply comes at once. Only then is the id known with which the action can be canceled.
        following = _Following(api, api.submit(body), lambda: interrupts.requested or stopped())
        if wait_seconds is None:
            deadline_seconds = following.action.get("deadline_seconds") or body.get("deadline_seconds")
            wait_seconds = longest_seconds({**body, "deadline_seconds": deadline_seconds})
        try:
            following.wait(wait_seconds, say)
            if wait_seconds > 0:
                following.settle(say)
        except KeyboardInterrupt:
            action_id = following.action["id"]
            note(f"Action {action_id} may still act; see `gpumem-exporter actions show {action_id[:8]}`.")
            raise
        return following.action


class _Following:
    """Follows an action to its end. `stopped` returns whether to cancel it."""

    def __init__(self, api: ExporterApi, action: dict[str, Any], stopped: Callable[[], bool]) -> None:
        self.action = action
        self._api, self._stopped = api, stopped
        self._canceled = False
        self._answered_seconds = time.monotonic()

    def wait(self, wait_seconds: float, say: Callable[[str], None]) -> None:
        """Wait until the action has ended."""
        end, pause = time.monotonic() + wait_seconds, _FIRST_PAUSE_SECONDS
        while not has_ended(self.action):
            stops = self._stopped() and not self._canceled
            left = end - time.monotonic()
            if left <= 0 and not stops:
                return
            waits = any(part["mode"] != "now" for part in self.action.get("pending") or ())
            if waits or self.action.get("waits_for"):
                say(sentences.waiting(self.action))
            if not stops:
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._read(cancel=stops)

    def settle(self, say: Callable[[str], None]) -> None:
        """Wait until it is known how much of the freed memory stays free."""
        end = time.monotonic() + (self.action.get("settle_seconds") or 0.0) + ANSWER_GRACE_SECONDS
        if self._settles:
            seconds = self.action["settle_seconds"]
            say(f"{sentences.sentence(self.action)} Measuring for {seconds:g} s how much of it stays free.")
        while self._settles and time.monotonic() < end and not self._stopped():
            time.sleep(_LONGEST_PAUSE_SECONDS)
            self._read(cancel=False)

    @property
    def _settles(self) -> bool:
        return has_ended(self.action) and bool(self.action.get("settling") and self.action["freed_bytes"])

    def _read(self, *, cancel: bool) -> None:
        """Read the action, or cancel it. An exporter that does not answer for a while may be restarting."""
        action_id = self.action["id"]
        try:
            self.action = self._api.cancel(action_id) if cancel else self._api.action(action_id)
            self._canceled = self._canceled or cancel
            self._answered_seconds = time.monotonic()
        except ExporterAnswerError as error:
            raise ExporterAnswerError(error.status, f"action {action_id}: {error}") from error
        except ExporterUnreachableError as error:
            if time.monotonic() - self._answered_seconds > _LOST_SECONDS:
                raise ExporterUnreachableError(f"action {action_id} may still act: {error}") from error
