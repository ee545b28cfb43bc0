"""A clear as the exporter suggests it: what it would free, and the requests for the processes of each mode.

The exporter decides in its reply to a dry run without a mode which processes clear at once, which at the end of a step,
and which ranks clear as a group. `clear --all` on a terminal and `top` send what it suggests, as the live page does.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_exporter.actions.request import DEFAULT_DEADLINE_SECONDS
from gpumem_exporter.cli.api_client import ExporterApi, has_ended
from gpumem_exporter.core.ledger import sum_of_known

__all__ = ["ExpectedClear", "expect", "joined", "send_all"]

Document = Mapping[str, Any]

_POLL_SECONDS = 0.25
_REFUSALS = (http.client.NOT_FOUND, http.client.CONFLICT, http.client.TOO_MANY_REQUESTS)
"""A part of a clear is refused if its processes exited, its ranks cannot act together, or a limit is reached."""


@dataclass(frozen=True, slots=True)
class ExpectedClear:
    """A request for a clear, and the exporter's reply to its dry run."""

    body: Document
    action: Document

    @property
    def results(self) -> Sequence[Document]:
        """The expected results."""
        return self.action.get("results") or ()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The suggested requests, or the request itself."""
        return [{**self.body, **suggested} for suggested in self.action.get("suggested") or ()] or [dict(self.body)]

    @property
    def waiting(self) -> list[dict[str, Any]]:
        """The requests for processes that clear at the end of a step."""
        return [request for request in self.requests if request["mode"] == "step"]

    def results_of(self, request: Document) -> list[Document]:
        """Return the expected results of one of the requests."""
        pids = request["target"].get("pid")
        chosen = pids if isinstance(pids, list) else [pids]
        return [result for result in self.results if pids is None or result["pid"] in chosen]


def expect(api: ExporterApi, body: Document) -> ExpectedClear:
    """Request the dry run of a clear. Its mode, and the default deadline, are left to the exporter.

    Raises the errors of `ExporterApi.act`.
    """
    left_open = {"mode", "settle_seconds"}
    if body["deadline_seconds"] == DEFAULT_DEADLINE_SECONDS:
        left_open.add("deadline_seconds")
    dry_run = {name: value for name, value in body.items() if name not in left_open}
    return ExpectedClear(body, api.act({**dry_run, "dry_run": True}, wait_seconds=0))


def send_all(
    api: ExporterApi,
    expected: ExpectedClear,
    *,
    wait_seconds: float,
    observe: Callable[[Document], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Send the suggested requests and wait for their ends. Returns the actions as they are then.

    What has not started is cancelled on KeyboardInterrupt, and once `stopped` is true.

    Args:
        api: the exporter.
        expected: what to clear.
        wait_seconds: the longest wait.
        observe: called about four times a second with each action that has not ended.
        stopped: asked as often.

    Raises:
        ExporterAnswerError: the exporter rejects the only request.
        ExporterUnreachableError: no address answers.
    """
    end = time.monotonic() + wait_seconds
    actions = [_sent(api, expected, request) for request in expected.requests]
    cancelled = False
    while time.monotonic() < end and not all(map(has_ended, actions)):
        try:
            for action in actions:
                if not has_ended(action):
                    observe(action)
            time.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))
            stops = stopped()
        except KeyboardInterrupt:
            if cancelled:
                raise
            stops = True
        read = api.cancel if stops and not cancelled else api.action
        cancelled = cancelled or stops
        actions = [action if has_ended(action) else read(action["id"]) for action in actions]
    return actions


def joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one document for the parts of an action, with the state of the first part that is not done."""
    if len(documents) == 1:
        return documents[0]
    first = next((document for document in documents if document.get("state") != "done"), documents[0])
    results = [result for document in documents for result in document.get("results") or ()]
    sums = {
        name: sum_of_known([document.get(name) for document in documents])
        for name in ("freed_bytes", "still_free_bytes")
    }
    settle_seconds = max(document.get("settle_seconds") or 0.0 for document in documents)
    return {**first, **sums, "settle_seconds": settle_seconds, "results": results}


def _sent(api: ExporterApi, expected: ExpectedClear, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request. If only this part of the clear is refused, return its refusal, because the others may run."""
    try:
        return api.submit(request)
    except ExporterAnswerError as error:
        if len(expected.requests) == 1 or error.status not in _REFUSALS:
            raise
        unknown = dict.fromkeys(("reserved_after_bytes", "freed_bytes", "still_free_bytes"))
        refused = {"outcome": "refused", "reason": error.detail, **unknown}
        results = [{**result, **refused} for result in expected.results_of(request)]
        return {**expected.action, "state": "failed", "dry_run": False, "freed_bytes": None, "results": results}
