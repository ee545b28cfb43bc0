"""The exporter's HTTP API as the commands use it: finds the address that answers, reads JSON, raises errors."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from gpumem_client.wire.errors import (
    ConfigurationError,
    ExporterAnswerError,
    ExporterUnreachableError,
    ExporterUntrustedError,
)
from gpumem_client.wire.http import Answer, Connection, shown_url
from gpumem_client.wire.trust import Trust

__all__ = ["ExporterApi", "has_ended", "has_settled"]

_ACTIONS = "/api/v1/actions"
_PUBLIC = ("/health", "/api/v1/devices", "/api/v1/live", "/api/v1/processes")
"""Routes that every client may read, unless the exporter has passwords."""
_FINAL_STATES = ("done", "failed", "expired", "cancelled")
_POLL_SECONDS = 0.25
_LONGEST_HOLD_SECONDS = 3.0
"""How long the exporter may delay the answer to one request. A longer wait polls for the rest, and can show what the
action waits for."""


def has_ended(action: Mapping[str, Any]) -> bool:
    """Whether an action has its final state."""
    return action.get("state") in _FINAL_STATES


def has_settled(action: Mapping[str, Any]) -> bool:
    """Whether an action has its final state, and no process may still report what stayed free."""
    return has_ended(action) and not action.get("settling")


class ExporterApi:
    """The API at the first of several addresses that answers. Not thread-safe.

    Args:
        urls: the addresses to try, in order.
        token: the bearer token; empty for none.
        token_for_reads: whether public routes receive the token too: it shows the identities that an exporter hides.
            Otherwise, they receive it after a 401, because the exporter has passwords and accepts the token instead.
        trust: the servers that receive the token; by default those of the environment.
        timeout_seconds: for each answer, in addition to a delay that the request permits.
        advice: ends the error message when no address answers.

    Raises:
        ConfigurationError: an address is invalid.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str = "",
        token_for_reads: bool = True,
        trust: Trust | None = None,
        timeout_seconds: float = 5.0,
        advice: str = "start one with `gpumem-exporter serve`, or give its address with --url",
        connect: Callable[[str, float], Connection] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        make = connect or (lambda url, timeout: Connection(url, timeout_seconds=timeout, trust=trust))
        self._candidates = [(url, make(url, timeout_seconds)) for url in urls]
        self._timeout_seconds = timeout_seconds
        self._advice = advice
        self._headers = {"Accept": "application/json", "User-Agent": "gpumem-exporter-cli"}
        self._authorization = {"Authorization": f"Bearer {token}"} if token else {}
        self._token_for_reads = token_for_reads
        self._clock = clock
        self._sleep = sleep

    def __enter__(self) -> ExporterApi:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address that answered. Before the first answer, the first address to try."""
        return self._candidates[0][0]

    @property
    def objection(self) -> str:
        """Why the server that answered receives no token; empty if it is trusted."""
        return self._candidates[0][1].objection

    def close(self) -> None:
        """Close the connections."""
        for _, transport in self._candidates:
            transport.close()

    def get(self, path: str, *, also: Collection[int] = ()) -> dict[str, Any]:
        """Read one JSON document. `also` has the statuses besides 200 whose answers are documents.

        Raises:
            ExporterUnreachableError: no address answers, or the answer is not an exporter's.
            ExporterAnswerError: the exporter answers with an error.
        """
        return self._document(self._request("GET", path), (200, *also))

    def post(self, path: str, document: Mapping[str, Any], *, hold_seconds: float) -> dict[str, Any]:
        """Post one JSON document. The exporter may delay the answer by `hold_seconds`.

        Raises the errors of `get`, and ConfigurationError if a value in the document is invalid (422).
        """
        with _invalid_value_is_wrong_usage():
            return self._post(path, document, {}, hold_seconds)

    def act(
        self,
        request: Mapping[str, Any],
        *,
        wait_seconds: float,
        observe: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Request an action and wait for it. Returns the action in its final state, or as it is after the wait.

        `observe` is called with the action about four times a second while it runs.

        Raises:
            ConfigurationError: a value in the request is invalid (422).
            ExporterUnreachableError: no address answers, or the exporter stopped answering.
            ExporterAnswerError: the exporter rejects the action (403), or no process matches its target (404).
        """
        end = self._clock() + wait_seconds
        with _invalid_value_is_wrong_usage():
            action = self.submit(request, hold_seconds=min(wait_seconds, _LONGEST_HOLD_SECONDS))
        while not has_ended(action) and (left := end - self._clock()) > 0:
            observe(action)
            self._sleep(min(left, _POLL_SECONDS))
            action = self.action(action["id"])
        return action

    def wait_until_settled(
        self, action: dict[str, Any], *, wait_seconds: float, observe: Callable[[float], None]
    ) -> dict[str, Any]:
        """Read an action until it has settled or the wait is over, and return it. Raises the errors of `get`.

        `observe` is called about four times a second with the seconds since the call.
        """
        started = self._clock()
        while not has_settled(action) and (elapsed := self._clock() - started) < wait_seconds:
            observe(elapsed)
            self._sleep(min(wait_seconds - elapsed, _POLL_SECONDS))
            action = self.action(action["id"])
        return action

    def submit(self, request: Mapping[str, Any], *, hold_seconds: float = 0.0) -> dict[str, Any]:
        """Request an action. The exporter may delay the answer by `hold_seconds` to include the results.

        Raises:
            ExporterUnreachableError: no address answers. The exporter may still have received the request.
            ExporterAnswerError: the exporter rejects the action.
        """
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        return self._post(_ACTIONS, {**request, "wait_seconds": hold_seconds}, headers, hold_seconds)

    def action(self, action_id: str) -> dict[str, Any]:
        """Read an action. Raises the errors of `get`."""
        return self.get(f"{_ACTIONS}/{action_id}")

    def cancel(self, action_id: str) -> dict[str, Any]:
        """Cancel an action where it has not started, and return it. Raises the errors of `get`."""
        return self._document(self._request("DELETE", f"{_ACTIONS}/{action_id}"), (200, 202))

    def _post(
        self, path: str, document: Mapping[str, Any], headers: Mapping[str, str], hold_seconds: float
    ) -> dict[str, Any]:
        timeout_seconds = self._timeout_seconds + hold_seconds
        headers = {"Content-Type": "application/json", **headers}
        answer = self._request("POST", path, json.dumps(document).encode(), headers, timeout_seconds)
        return self._document(answer, (200, 202))

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> Answer:
        failures: list[ExporterUnreachableError] = []
        public = method == "GET" and path.startswith(_PUBLIC) and not self._token_for_reads
        sent = {**self._headers, **(headers or {})}
        with_token = {**sent, **self._authorization}
        for url, transport in self._candidates:
            try:
                answer = transport.request(
                    method, path, body, sent if public else with_token, timeout_seconds=timeout_seconds
                )
                if public and self._authorization and answer.status == http.client.UNAUTHORIZED:
                    self._token_for_reads = True
                    answer = transport.request(method, path, body, with_token, timeout_seconds=timeout_seconds)
            except ExporterUnreachableError as error:
                failures.append(error)
                continue
            self._candidates = [(url, transport)]
            return answer
        reasons = "; ".join(map(str, failures))
        if any(isinstance(error, ExporterUntrustedError) for error in failures):
            raise ExporterUntrustedError(reasons)  # an exporter is running, so there is no advice to start one
        raise ExporterUnreachableError("; ".join(filter(None, (reasons, self._advice))))

    def _document(self, answer: Answer, expected: Collection[int]) -> dict[str, Any]:
        try:
            document = json.loads(answer.body)
        except ValueError:
            document = None
        if answer.status in expected:
            if isinstance(document, dict):
                return document
            raise ExporterUnreachableError(f"the server at {shown_url(self.url)} is not a gpumem-exporter")
        detail = document.get("detail") or document.get("title") if isinstance(document, dict) else None
        phrase = http.client.responses.get(answer.status, "no reason given")
        raise ExporterAnswerError(answer.status, detail if isinstance(detail, str) else phrase)


@contextlib.contextmanager
def _invalid_value_is_wrong_usage() -> Iterator[None]:
    try:
        yield
    except ExporterAnswerError as error:
        if error.status == http.client.UNPROCESSABLE_ENTITY:
            raise ConfigurationError(error.detail) from error
        raise
