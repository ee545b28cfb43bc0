"""An action from a question to its end: for `top`, and for every command that requests an action.

The exporter decides which processes act at once, which at the end of a step, and which when they are idle.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpumem_client.wire.errors import ConfigurationError, ExporterAnswerError, ExporterUnreachableError
from gpumem_client.wire.units import counted
from gpumem_exporter.actions import sentences
from gpumem_exporter.actions.action_options import ANSWER_GRACE_SECONDS, longest_seconds
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.cli.api_client import Document, ExporterApi, has_ended
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.cli.render.terminal import open_console, show
from gpumem_exporter.cli.usage import note

_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.25
# An exporter that restarts answers again within this time.
_LOST_SECONDS = 15.0


def needs_yes(body: Document, *, yes: bool, as_json: bool) -> bool:
    """Return whether a request needs a yes: `terminate`, and `clear --all` on a terminal.

    Raises ConfigurationError if `terminate` needs one and no one can answer.
    """
    if yes or body["dry_run"]:
        return False
    able = not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    if body["action"] == "terminate" and not able:
        raise ConfigurationError("terminate asks on a terminal before it ends processes; without one, add --yes")
    clears_all = body["action"] == "empty_cache" and body["target"] == {"all": True}
    return able and (clears_all or body["action"] == "terminate")


def said_yes(expected: Document) -> bool:
    """Show the results of a dry run, and ask whether to act. Without a yes, print that nothing was done."""
    show(open_console(), action_tables(expected))
    able = {(row.get("instance"), row["pid"]) for row in expected["results"] if is_done(row["outcome"])}
    verb, done = ("Terminate", "terminated") if expected["action"] == "terminate" else ("Clear", "cleared")
    question = f"{verb} {counted(len(able), 'process', 'processes')}? [y/N] "
    try:
        if able and input(question).strip().lower() in ("y", "yes"):
            return True
    except EOFError:
        pass
    print(f"Nothing was {done}.")
    return False


def confirmed(api: ExporterApi, body: Document) -> Document | None:
    """Show what a request would do, and ask. Return the request, or None; a termination is of the shown processes."""
    dry_run = {**body, "dry_run": True}
    expected = api.submit(dry_run)
    if not expected["results"]:
        return dry_run  # not the request itself, which may match something by now
    if not said_yes(expected):
        return None
    if body["action"] != "terminate":
        return body
    pids = dict.fromkeys(result["pid"] for result in expected["results"] if is_done(result["outcome"]))
    target = {name: values for name, values in body["target"].items() if name != "all"}
    return {**body, "target": {**target, "pid": list(pids)}}


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Within the block, the first Ctrl-C sets the event, and the second one raises KeyboardInterrupt.

    In a thread besides the main one, and where Ctrl-C is ignored or has another handler, the block changes nothing.
    """
    requested = threading.Event()

    def take(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            signal.default_int_handler(number, frame)
        requested.set()

    main = threading.current_thread() is threading.main_thread()
    takes = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if takes:
            signal.signal(signal.SIGINT, take)
        yield requested
    finally:
        if takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def act(
    api: ExporterApi,
    body: Document,
    *,
    wait_seconds: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Send a request, wait for its end and for what stays free, and return the action.

    What has not started is canceled on Ctrl-C, at any moment, and once `stopped` returns true. `say` is called with
    what the action waits for, each time that it changes. Without `wait_seconds`, the wait ends with the action.

    Raises ExporterAnswerError if the exporter rejects the request, and ExporterUnreachableError if no address answers.
    Once the action has an id, the error has it.
    """
    with interrupts() as interrupted:
        # The reply comes at once. Only then is the id known with which the action can be canceled.
        action = api.submit(body)
        action_id, canceled, settles, said = action["id"], False, False, ""
        if wait_seconds is None:
            deadline_seconds = action.get("deadline_seconds") or body.get("deadline_seconds")
            wait_seconds = longest_seconds({**body, "deadline_seconds": deadline_seconds})
        answered_seconds = time.monotonic()
        end, pause = answered_seconds + wait_seconds, _FIRST_PAUSE_SECONDS
        while True:
            stops, text = interrupted.is_set() or stopped(), ""
            if has_ended(action):
                seconds = action.get("settle_seconds") or 0.0
                if stops or not (wait_seconds > 0 and action.get("settling") and action["freed_bytes"]):
                    return action
                if not settles:
                    settles, end = True, time.monotonic() + seconds + ANSWER_GRACE_SECONDS
                text = f"{sentences.sentence(action)} Measuring for {seconds:g} s how much of it stays free."
            elif action.get("waits_for") or any(part["mode"] != "now" for part in action.get("pending") or ()):
                text = sentences.waiting(action)
            cancels = stops and not canceled
            left = end - time.monotonic()
            if left <= 0 and not cancels:
                return action
            if text not in ("", said):
                say(text)
                said = text
            try:
                if not cancels:
                    time.sleep(min(pause, left))
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                action = api.cancel(action_id) if cancels else api.action(action_id)
                canceled, answered_seconds = canceled or cancels, time.monotonic()
            except ExporterAnswerError as error:
                raise ExporterAnswerError(error.status, f"action {action_id}: {error}") from error
            except ExporterUnreachableError as error:  # an exporter that does not answer for a while may be restarting
                if time.monotonic() - answered_seconds > _LOST_SECONDS:
                    raise ExporterUnreachableError(f"action {action_id} may still act: {error}") from error
            except KeyboardInterrupt:
                note(f"Action {action_id} may still act; see `gpumem-exporter actions show {action_id[:8]}`.")
                raise
