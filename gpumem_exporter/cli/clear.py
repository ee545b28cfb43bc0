"""An action from a question to its end: `clear --all` on a terminal, `top`, and every command that requests an action.

For a clear, the exporter decides in its reply to a dry run without a mode which processes clear at once, which at the
end of a step, and which ranks clear as a group.
"""

from __future__ import annotations

import http.client
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_exporter.actions.declarations import ANSWER_GRACE_SECONDS, DEFAULT_DEADLINE_SECONDS, longest_seconds
from gpumem_exporter.actions.model import is_done
from gpumem_exporter.cli.api_client import Document, ExporterApi, has_ended, has_settled
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.cli.render.action_tables import reasons
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.view import sentences

_HOLD_SECONDS = 1.0
_POLL_SECONDS = 0.25
_YES = ("y", "yes")
# A part of a clear is refused if its processes exited, its ranks cannot act together, or a limit is reached.
_REFUSALS = (http.client.NOT_FOUND, http.client.CONFLICT, http.client.TOO_MANY_REQUESTS)


@dataclass(frozen=True, slots=True)
class Plan:
    """A request for an action, and for a clear the exporter's reply to its dry run."""

    body: Document
    expected: Document = field(default_factory=dict)

    @property
    def results(self) -> Sequence[Document]:
        """The expected results."""
        return self.expected.get("results") or ()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The suggested requests, or the request itself."""
        return [{**self.body, **suggested} for suggested in self.expected.get("suggested") or ()] or [dict(self.body)]

    @property
    def subject(self) -> str:
        """The job that would act, or the number of processes."""
        return sentences.subject(result for result in self.results if is_done(result["outcome"]))

    @property
    def wait_seconds(self) -> float:
        """How long the action may take."""
        return max(map(longest_seconds, self.requests))

    def as_given(self) -> Plan:
        """Return the plan with the request itself in place of the suggested ones."""
        return Plan(self.body, {**self.expected, "suggested": []})


def plan_clear(api: ExporterApi, body: Document) -> Plan:
    """Request the dry run of a clear. Its mode, and the default deadline, are left to the exporter."""
    left_open = {"mode", "settle_seconds"}
    if body["deadline_seconds"] == DEFAULT_DEADLINE_SECONDS:
        left_open.add("deadline_seconds")
    dry_run = {name: value for name, value in body.items() if name not in left_open}
    return Plan(body, api.submit({**dry_run, "dry_run": True}))


def question(plan: Plan, *, free_mode: bool = True) -> str:
    """Return `Clear demo-notebook? Stays free 2.2 GiB.`, and when the jobs clear, in one line.

    Without `free_mode`, the mode of the plan's request is in force, and not the suggested ones.
    """
    at_step = sentences.at_step_requests(plan.expected)
    timing = sentences.when(plan.expected) if free_mode else ""
    if not free_mode and at_step and plan.body["mode"] == "now":
        timing = f"In the middle of a step, which may stall: {sentences.subjects(at_step, plan.results)}."
    parts = (f"Clear {plan.subject}?", sentences.sentence(plan.expected), timing, *reasons(plan.results))
    return " ".join(map(one_line, filter(None, parts)))


def can_ask() -> bool:
    """Whether a person can read a question and answer it."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirmed(api: ExporterApi, body: Document, *, free_mode: bool) -> Plan | None:
    """Ask whether to clear. Returns what to clear; None if the answer is no.

    With `free_mode`, the exporter chooses the mode of each process. Otherwise, the mode of `body` is in force.
    """
    plan = plan_clear(api, body)
    others = "/now" if free_mode and sentences.at_step_requests(plan.expected) else ""
    text = f"{question(plan, free_mode=free_mode)} [y/N{others}]"
    *lines, last = textwrap.wrap(text, shutil.get_terminal_size().columns - len(" now"))
    print("\n".join([*lines, ""]), end="")
    given = answer(last)
    if others and given == "now":
        return plan.as_given()
    if given not in _YES:
        print("Nothing was cleared.")
        return None
    # The jobs may have changed since the question was printed.
    return plan_clear(api, body) if free_mode else plan.as_given()


def answer(question: str) -> str:
    """Ask, and return the answer in lower case."""
    try:
        return input(f"{question} ").strip().lower()
    except EOFError:
        return ""


def act(
    api: ExporterApi,
    plan: Plan,
    *,
    wait_seconds: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Send the requests, wait for their ends and for what stays free, and return one document for all of them.

    What has not started is canceled on KeyboardInterrupt, and once `stopped` returns true. `say` is called about four
    times a second with what the action waits for. Without `wait_seconds`, the wait ends with the action.

    Raises ExporterAnswerError if the exporter rejects the only request, and ExporterUnreachableError if no address
    answers.
    """
    if wait_seconds is None:
        wait_seconds = plan.wait_seconds
    end = time.monotonic() + wait_seconds
    requests = plan.requests
    # With several requests, a delayed answer would delay the next request.
    hold_seconds = min(wait_seconds, _HOLD_SECONDS) if len(requests) == 1 else 0.0
    actions = [_sent(api, plan, request, hold_seconds) for request in requests]
    canceled = False
    while (left := end - time.monotonic()) > 0 and not all(map(has_ended, actions)):
        try:
            for request, action in zip(requests, actions, strict=True):
                if not has_ended(action) and (action.get("waits_for") or request.get("mode", "now") != "now"):
                    name = sentences.subjects([request], plan.results) if plan.results else ""
                    say(sentences.waiting(action, name=name, deadline_seconds=request["deadline_seconds"]))
            time.sleep(min(_POLL_SECONDS, left))
            stops = stopped()
        except KeyboardInterrupt:
            if canceled:
                raise
            stops = True
        read = api.cancel if stops and not canceled else api.action
        canceled = canceled or stops
        actions = [action if has_ended(action) else read(action["id"]) for action in actions]
    return _settled(api, actions, say) if wait_seconds > 0 else _joined(actions)


def _settled(api: ExporterApi, actions: Sequence[dict[str, Any]], say: Callable[[str], None]) -> dict[str, Any]:
    """Wait until it is known how much of the freed memory stays free. KeyboardInterrupt ends the wait."""
    document = _joined(actions)
    end = time.monotonic() + document["settle_seconds"] + ANSWER_GRACE_SECONDS
    if document.get("settling") and document["freed_bytes"]:
        say(f"{sentences.sentence(document)} Measuring for {document['settle_seconds']:g} s how much of it stays free.")
    try:
        while document.get("settling") and document["freed_bytes"] and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            actions = [action if has_settled(action) else api.action(action["id"]) for action in actions]
            document = _joined(actions)
    except KeyboardInterrupt:
        pass
    return document


def _joined(actions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one document for the parts of an action, with the state of the first part that is not done."""
    if len(actions) == 1:
        return actions[0]
    first = next((action for action in actions if action["state"] != "done"), actions[0])
    results = [result for action in actions for result in action["results"]]
    joined = {
        **first,
        "freed_bytes": sum_of_known([action.get("freed_bytes") for action in actions]),
        "still_free_bytes": sum_of_known([action.get("still_free_bytes") for action in actions]),
        "settle_seconds": max(action.get("settle_seconds") or 0.0 for action in actions),
        "settling": any(action.get("settling") for action in actions),
        "results": results,
    }
    return {**joined, "subject": sentences.subject(results), "sentence": sentences.sentence(joined)}


def _sent(api: ExporterApi, plan: Plan, request: Document, hold_seconds: float) -> dict[str, Any]:
    """Send a request. If only this part of the clear is refused, return its refusal, because the others may run."""
    try:
        return api.submit(request, hold_seconds=hold_seconds)
    except ExporterAnswerError as error:
        if len(plan.requests) == 1 or error.status not in _REFUSALS:
            raise
        unknown = dict.fromkeys(("reserved_after_bytes", "freed_bytes", "still_free_bytes"))
        refused = {"outcome": "refused", "reason": error.detail, **unknown}
        results = [{**result, **refused} for result in sentences.results_of(request, plan.results)]
        return {**plan.expected, "state": "failed", "dry_run": False, **unknown, "results": results}
