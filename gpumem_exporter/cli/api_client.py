"""The exporter's HTTP API as the commands use it: one address that answers, JSON in and out, problems as errors."""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from gpumem_exporter.errors import ExporterAnswerError, ExporterUnreachableError, ExporterUntrustedError
from gpumem_exporter.wire.http import Answer, Connection, shown_url

__all__ = ["ExporterApi", "Transport", "has_ended"]

_ACTIONS = "/api/v1/actions"
_FINISHED_STATES = ("done", "failed", "expired")
_LOOK_AGAIN_SECONDS = 0.25
_LONGEST_HOLD_SECONDS = 10.0
"""How long one request asks the exporter to wait; the rest of a longer wait is asked for again."""


def has_ended(action: Mapping[str, Any]) -> bool:
    """Nothing more will become of an action."""
    return action.get("state") in _FINISHED_STATES


class Transport(Protocol):
    """What is used of a `Connection`."""

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Answer:
        """Send one request and read the whole answer."""

    def close(self) -> None:
        """Close the connection."""


class ExporterApi:
    """Talks to the first of some addresses that answers. Not thread-safe.

    Args:
        urls: the addresses to try, in order.
        token: sent as a bearer token when it is not empty.
        timeout_seconds: for each answer that the exporter does not hold back on purpose.
        advice: what to try where no address answers, for the error.
        connect: makes the transport to one address.

    Raises:
        ConfigurationError: an address is not one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str = "",
        timeout_seconds: float = 5.0,
        advice: str = "start one with `gpumem-exporter serve`, or name its address with --url",
        connect: Callable[[str, float], Transport] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        make = connect or (lambda url, timeout: Connection(url, timeout_seconds=timeout))
        self._candidates = [(url, make(url, timeout_seconds)) for url in urls]
        self._timeout_seconds = timeout_seconds
        self._advice = advice
        self._headers = {"Accept": "application/json", "User-Agent": "gpumem-exporter-cli"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._clock = clock
        self._sleep = sleep

    def __enter__(self) -> ExporterApi:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address in use: the one that answered, before that the first to be tried."""
        return self._candidates[0][0]

    def close(self) -> None:
        """Close whatever is open."""
        for _, transport in self._candidates:
            transport.close()

    def get(self, path: str, *, also: Collection[int] = ()) -> dict[str, Any]:
        """Read one JSON document.

        Args:
            path: the route.
            also: statuses that carry a document too, besides 200.

        Raises:
            ExporterUnreachableError: no address answers, or what answers is not an exporter.
            ExporterAnswerError: it answers with an error.
        """
        return self._document(self._request("GET", path), (200, *also))

    def post(self, path: str, document: Mapping[str, Any], *, hold_seconds: float) -> dict[str, Any]:
        """Post one JSON document; the exporter may take `hold_seconds` longer to answer (200, or 202 for later).

        Raises:
            ExporterUnreachableError: no address answers.
            ExporterAnswerError: it answers with an error.
        """
        headers = {"Content-Type": "application/json"}
        answer = self._request(
            "POST", path, json.dumps(document).encode(), headers, self._timeout_seconds + hold_seconds
        )
        return self._document(answer, (200, 202))

    def act(self, request: Mapping[str, Any], *, wait_seconds: float) -> dict[str, Any]:
        """Ask for an action and wait for its end; returns it as it stands when that comes, or when the wait is over.

        Raises:
            ExporterUnreachableError: no address answers, or it stopped answering.
            ExporterAnswerError: the action is refused (403), matches nothing (404) or is not well formed (422).
        """
        end = self._clock() + wait_seconds
        action = self.begin(request, hold_seconds=min(wait_seconds, _LONGEST_HOLD_SECONDS))
        while not has_ended(action) and (left := end - self._clock()) > 0:
            self._sleep(min(left, _LOOK_AGAIN_SECONDS))
            action = self.action(action["id"])
        return action

    def begin(self, request: Mapping[str, Any], *, hold_seconds: float = 0.0) -> dict[str, Any]:
        """Ask for an action; the exporter may take `hold_seconds` longer to answer, by which it may have ended.

        Raises:
            ExporterUnreachableError: no address answers; it may have been asked for all the same.
            ExporterAnswerError: as `act`.
        """
        body = json.dumps({**request, "wait_seconds": hold_seconds}).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": str(uuid.uuid4())}
        answer = self._request("POST", _ACTIONS, body, headers, self._timeout_seconds + hold_seconds)
        return self._document(answer, (200, 202))

    def action(self, action_id: str) -> dict[str, Any]:
        """An action as it stands.

        Raises:
            ExporterUnreachableError: no address answers.
            ExporterAnswerError: it is not known (any more).
        """
        return self.get(f"{_ACTIONS}/{action_id}")

    def cancel(self, action_id: str) -> dict[str, Any]:
        """Take back what has not begun of an action; returns it as it stands.

        Raises:
            ExporterUnreachableError: no address answers.
            ExporterAnswerError: it is not known (any more).
        """
        return self._document(self._request("DELETE", f"{_ACTIONS}/{action_id}"), (200, 202))

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> Answer:
        failures = []
        advice = self._advice
        for url, transport in self._candidates:
            try:
                answer = transport.request(
                    method, path, body, {**self._headers, **(headers or {})}, timeout_seconds=timeout_seconds
                )
            except ExporterUnreachableError as error:
                failures.append(str(error))
                if isinstance(error, ExporterUntrustedError):
                    advice = ""  # there is one
                continue
            self._candidates = [(url, transport)]
            return answer
        raise ExporterUnreachableError("; ".join(filter(None, (*failures, advice))))

    def _document(self, answer: Answer, expected: Collection[int]) -> dict[str, Any]:
        try:
            document = json.loads(answer.body)
        except ValueError:
            document = None
        if answer.status in expected:
            if isinstance(document, dict):
                return document
            raise ExporterUnreachableError(f"what answers at {shown_url(self.url)} is not a gpumem-exporter")
        detail = document.get("detail") or document.get("title") if isinstance(document, dict) else None
        phrase = http.client.responses.get(answer.status, "no reason given")
        raise ExporterAnswerError(answer.status, detail if isinstance(detail, str) else phrase)
