"""The exporter's HTTP API as the commands use it: finds the address that answers, reads JSON, raises errors."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from gpumem_client.wire.errors import (
    ConfigurationError,
    ExporterAnswerError,
    ExporterError,
    ExporterUnreachableError,
    ExporterUntrustedError,
)
from gpumem_client.wire.http import Answer, Connection, shown_url
from gpumem_client.wire.trust import Trust
from gpumem_client.wire.units import counted
from gpumem_exporter.cli.program import one_line
from gpumem_exporter.errors import TargetNotFoundError

_ACTIONS = "/api/v1/actions"
# Routes that every client may read, unless the exporter has passwords.
_PUBLIC = ("/health", "/api/v1/devices", "/api/v1/history", "/api/v1/live", "/api/v1/processes")
# The timeout of a file that the exporter has to build, such as a large profile.
_FILE_SECONDS = 30.0
_ID_LENGTH = 32
_FINAL_STATES = ("done", "failed", "expired", "cancelled")

Document = Mapping[str, Any]


def has_ended(action: Document) -> bool:
    """Whether an action has its final state."""
    return action.get("state") in _FINAL_STATES


class ExporterApi:
    """The API at the first of several addresses that answers. Not thread-safe.

    With `token_for_reads`, public routes receive the token too: it shows the identities that an exporter hides. By
    default, only servers that the environment names receive the token. The timeout is for each answer, in addition to a
    delay that the request permits. The addresses are read at the first request, which raises ConfigurationError if one
    is invalid.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        token: str = "",
        token_for_reads: bool = True,
        trust: Trust | None = None,
        timeout_seconds: float = 5.0,
    ) -> None:
        self._connect = partial(Connection, timeout_seconds=timeout_seconds, trust=trust)
        self._urls = urls
        self._candidates: list[tuple[str, Connection]] = []
        self._timeout_seconds = timeout_seconds
        self._headers = {"Accept": "application/json", "User-Agent": "gpumem-exporter-cli"}
        self._authorization = {"Authorization": f"Bearer {token}"} if token else {}
        self._token_for_reads = token_for_reads

    def __enter__(self) -> ExporterApi:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address that answered. Before the first answer, the first address to try."""
        self.find_addresses()
        return self._candidates[0][0]

    @property
    def objection(self) -> str:
        """Why the server that answered receives no token; empty if it is trusted."""
        return self._candidates[0][1].objection

    def find_addresses(self) -> None:
        """Read the addresses if none are known, as the first request does. `kubectl` takes seconds for it."""
        self._candidates = self._candidates or [(url, self._connect(url)) for url in self._urls]

    def close(self) -> None:
        """Close the connections. The next request tries every address again."""
        for _, transport in self._candidates:
            transport.close()
        self._candidates = []

    def get(self, path: str, *, also: Collection[int] = ()) -> dict[str, Any]:
        """Read one JSON document. `also` has the statuses besides 200 whose answers are documents.

        Raises ExporterUnreachableError if no address answers, or the answer is not an exporter's, and
        ExporterAnswerError if the exporter answers with an error.
        """
        return self._document(self._request("GET", path), (200, *also))

    def get_bytes(self, path: str) -> bytes:
        """Read a file. Raises the errors of `get`."""
        answer = self._request("GET", path, headers={"Accept": "*/*"}, timeout_seconds=_FILE_SECONDS)
        if answer.status != http.client.OK:
            self._document(answer, ())
        return answer.body

    def post(self, path: str, document: Document, *, hold_seconds: float) -> dict[str, Any]:
        """Post one JSON document. The exporter may delay the answer by `hold_seconds`. Raises the errors of `get`."""
        # After a timeout, the next address may reach the same exporter, which must not act twice.
        headers = {"Content-Type": "application/json", "Idempotency-Key": str(uuid.uuid4())}
        timeout_seconds = self._timeout_seconds + hold_seconds
        answer = self._request("POST", path, json.dumps(document).encode(), headers, timeout_seconds)
        return self._document(answer, (200, 202))

    def submit(self, request: Document) -> dict[str, Any]:
        """Request an action. Raises the errors of `get`, also if the exporter may have received the request."""
        return self.post(_ACTIONS, {**request, "wait_seconds": 0.0}, hold_seconds=0.0)

    def action(self, action_id: str) -> dict[str, Any]:
        """Read an action. Raises the errors of `get`."""
        return self.get(f"{_ACTIONS}/{action_id}")

    def cancel(self, action_id: str) -> dict[str, Any]:
        """Cancel an action where it has not started, and return it. Raises the errors of `get`."""
        return self._document(self._request("DELETE", f"{_ACTIONS}/{action_id}"), (200, 202))

    def full_id(self, kind: str, given: str) -> str:
        """Return the id of an `action` or a `profile` that a shortened one stands for."""
        if len(given) >= _ID_LENGTH:
            return quote(given, safe="")
        known = [each["id"] for each in self.get(f"/api/v1/{kind}s?limit=1000")[f"{kind}s"]]
        matching = [each for each in known if given.strip() and each.startswith(given)]
        if len(matching) > 1:
            raise ConfigurationError(f"{given!r} stands for {len(matching)} {kind}s; give more of the ID")
        if not matching:
            lists = "gpumem-exporter " + ("actions list" if kind == "action" else f"{kind} list")
            raise TargetNotFoundError(f"no {kind} {given!r}: it is unknown, or too old to be kept; see `{lists}`")
        return str(matching[0])

    def rights(self) -> Document:
        """Read what the caller may do; empty after an error, because only a line below a result shows it."""
        try:
            return self.get("/api/v1/caller")
        except ExporterError:
            return {}

    def page_job(self, given: str) -> str:
        """Return the id on the page of the job that an id of Slurm or Ray stands for; another name stays as it is."""
        found = self.get(f"/api/v1/jobs/{quote(given, safe='')}", also=(404,)).get("processes", ())
        jobs = {each["job"]: each["workload"] for each in found if each.get("job")}
        if not jobs or given in (*jobs, *jobs.values()):
            return given
        if len(jobs) > 1:
            raise ConfigurationError(f"{given} has {len(jobs)} jobs: give --job as one of {', '.join(sorted(jobs))}")
        return str(next(iter(jobs)))

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> Answer:
        failures: list[ExporterUnreachableError] = []
        withheld = method == "GET" and path.startswith(_PUBLIC) and not self._token_for_reads
        sent = {**self._headers, **(headers or {}), **({} if withheld else self._authorization)}
        self.find_addresses()
        for url, transport in self._candidates:
            try:
                answer = transport.request(method, path, body, sent, timeout_seconds=timeout_seconds)
            except ExporterUnreachableError as error:
                failures.append(error)
                continue
            self._candidates = [(url, transport)]
            if withheld and self._authorization and answer.status == http.client.UNAUTHORIZED:
                # The exporter has passwords, and accepts the token instead.
                self._token_for_reads = True
                return self._request(method, path, body, headers, timeout_seconds)
            return answer
        reasons = "; ".join(map(str, failures))
        if any(isinstance(error, ExporterUntrustedError) for error in failures):
            raise ExporterUntrustedError(reasons)  # an exporter is running, so there is no advice to start one
        raise ExporterUnreachableError(
            f"{reasons}; start one with `gpumem-exporter serve`, or give its address with --url"
        )

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
        if not isinstance(detail, str):
            phrase = http.client.responses.get(answer.status, "no reason given")
            detail = f"the server at {shown_url(self.url)} answers: {phrase}"
        raise ExporterAnswerError(answer.status, detail)


def rights_line(rights: Document, verb: str = "act on") -> str:
    """Return what the caller may do: "You can clear your own 3 processes (uid 1001)."; empty if it is unknown."""
    count = rights.get("processes", 0)
    return {
        "own": f"You can {verb} your own {counted(count, 'process', 'processes')} (uid {rights.get('uid')}).",
        "all": f"You can {verb} all processes that report ({count}).",
        "none": one_line(f"You cannot {verb} processes. {rights.get('reason') or ''}"),
    }.get(rights.get("rights", ""), "")
