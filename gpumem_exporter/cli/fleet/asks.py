"""Asking exporters for actions, watching until they have ended, and holding each answer against what was asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumem_exporter.cli.api_client import ExporterApi, has_ended
from gpumem_exporter.cli.fleet.choosing import Member
from gpumem_exporter.cli.fleet.naming import Place
from gpumem_exporter.cli.fleet.parallel import each
from gpumem_exporter.errors import ExporterAnswerError, ExporterError
from gpumem_exporter.wire.http import shown_url

__all__ = ["Ask", "Failure", "Nodes", "failure_of", "rows"]

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_PATIENCE = 3
"""So often in a row an exporter may not answer while an action is watched."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer."""

    outcome: str
    reason: str


_GONE = Failure("gone", "no process there is it any more")
_REFUSALS = (401, 403, 409, 422, 429)


@dataclass(slots=True)
class Ask:
    """One request for an action, and what came of it."""

    place: Place
    members: tuple[Member, ...]
    target: Mapping[str, Any]
    action: Mapping[str, Any] = field(default_factory=dict)
    """As the exporter said last; empty before it has answered."""
    failure: Failure | None = None
    silences: int = 0
    """How often in a row the exporter has not answered."""

    @property
    def open(self) -> bool:
        """Something may yet come of it."""
        return self.failure is None and not has_ended(self.action)

    @property
    def troubled(self) -> bool:
        """Somebody did not do it, or it cannot be known right now."""
        undone = any(row.get("outcome") != "done" for row in self.action.get("results") or ())
        return undone or self.failure is not None or self.silences > 0


class Nodes:
    """The exporters of a fleet, each on a connection of its own.

    Args:
        places: where they are.
        token: what lets actions in at each of them.
        parallel: how many are asked at a time.
        timeout_seconds: for each answer.
        connect: makes the API of one address.

    Raises:
        ConfigurationError: an address is not one.
    """

    def __init__(
        self,
        places: Iterable[Place],
        *,
        token: str,
        parallel: int,
        timeout_seconds: float = 5.0,
        connect: Callable[[str], ExporterApi] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        make = connect or (lambda url: ExporterApi((url,), token=token, timeout_seconds=timeout_seconds, advice=""))
        self._apis = {place.url: make(place.url) for place in places}
        self._parallel = parallel
        self._clock = clock
        self._sleep = sleep

    def close(self) -> None:
        """Close all connections."""
        for api in self._apis.values():
            api.close()

    def read(self, places: Sequence[Place], what: str) -> dict[Place, Mapping[str, Any] | Failure]:
        """The document of each exporter's `processes` or `devices`, or why there is none."""

        def one(place: Place) -> Mapping[str, Any] | Failure:
            try:
                document = self._apis[place.url].get(f"/api/v1/{what}")
            except ExporterError as error:
                return failure_of(error)
            if isinstance(document.get(what), list):
                return document
            return Failure("failed", f"what answers at {shown_url(place.url)} is not a gpumem-exporter")

        return dict(zip(places, each(places, one, parallel=self._parallel), strict=True))

    def begin(self, asks: Sequence[Ask], body: Mapping[str, Any]) -> None:
        """Ask each exporter for what is asked of it, without waiting for it to be done."""

        def one(ask: Ask, api: ExporterApi) -> None:
            try:
                ask.action = api.begin({**body, "target": ask.target})
            except ExporterAnswerError as error:
                ask.failure = _GONE if error.status == 404 else failure_of(error)
            except ExporterError as error:
                ask.failure = Failure("failed", f"{error}; if it was asked all the same, it may be done")

        self._for_each(asks, one)

    def watch(self, asks: Sequence[Ask], *, wait_seconds: float, look: Callable[[], None] = lambda: None) -> None:
        """Ask again and again until nothing more comes of anything, or the time is over.

        Args:
            asks: what has begun.
            wait_seconds: how long at most.
            look: called after each round.
        """
        end = self._clock() + wait_seconds
        pause = _FIRST_PAUSE_SECONDS
        look()
        while waiting := [ask for ask in asks if ask.open]:
            left = end - self._clock()
            if left <= 0:
                break
            self._sleep(min(left, pause))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._for_each(waiting, _ask_again)
            look()
        for ask in asks:
            if ask.open:
                ask.failure = Failure("expired", f"action {ask.action.get('id')} had not ended when the time was over")

    def cancel(self, asks: Sequence[Ask]) -> None:
        """Have exporters take back what has not begun."""

        def one(ask: Ask, api: ExporterApi) -> None:
            try:
                ask.action = api.cancel(str(ask.action["id"]))
            except ExporterError:
                return  # whoever watches it says what came of it

        self._for_each([ask for ask in asks if ask.open and ask.action], one)

    def _for_each(self, asks: Iterable[Ask], work: Callable[[Ask, ExporterApi], None]) -> None:
        """One after the other at each exporter, for a connection is not for two threads; side by side at several."""
        by_url: dict[str, list[Ask]] = {}
        for ask in asks:
            by_url.setdefault(ask.place.url, []).append(ask)

        def one(url: str) -> None:
            for ask in by_url[url]:
                work(ask, self._apis[url])

        each(tuple(by_url), one, parallel=self._parallel)


def failure_of(error: ExporterError) -> Failure:
    """An exporter's error as an outcome."""
    if not isinstance(error, ExporterAnswerError):
        return Failure("failed", str(error))
    return Failure("refused" if error.status in _REFUSALS else "failed", str(error))


def rows(ask: Ask, *, action: str, dry_run: bool) -> Iterator[dict[str, Any]]:
    """What became of an ask, a row for each process and device; all that an exporter says is held against the ask."""
    where = {"instance": ask.place.instance, "url": shown_url(ask.place.url), "action_id": ask.action.get("id")}
    meant = {str(member.pid): member for member in ask.members}
    told = set()
    for result in ask.action.get("results") or ():
        pid = str(result.get("pid"))
        told.add(pid)
        found = meant.get(pid)
        if found is None or _differs(ask.target, result):
            strange = "the exporter acted on a process that was not asked for"
            yield {**where, **result, "outcome": "failed", "reason": strange}
        else:
            yield {**where, **result}
    failure = ask.failure
    if failure is None and (ask.action.get("action"), ask.action.get("dry_run")) != (action, dry_run):
        failure = Failure("failed", "the exporter answered for another action than was asked for")
    for pid, member in meant.items():
        if pid not in told or (failure is not None and ask.failure is None):
            silent = failure or Failure("failed", "the exporter does not say what became of it")
            yield {**where, **_empty(member), "outcome": silent.outcome, "reason": silent.reason}


def _ask_again(ask: Ask, api: ExporterApi) -> None:
    try:
        ask.action = api.action(str(ask.action["id"]))
        ask.silences = 0
    except ExporterAnswerError:
        ask.failure = Failure("failed", "the exporter does not know the action any more; it may have been done")
    except ExporterError as error:
        ask.silences += 1
        if ask.silences >= _PATIENCE:
            ask.failure = Failure("failed", f"asked, and it may have been done, but {error}")


def _differs(target: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """It is of another process or device than was asked for, whatever its pid."""
    named = any(name in target and target[name] != result.get(name) for name in ("workload", "rank"))
    return named or ("uuid" in target and result.get("uuid") not in ("", target["uuid"]))


def _empty(member: Member) -> dict[str, Any]:
    return {
        "pid": member.pid,
        "workload": member.workload,
        "rank": member.rank,
        "gpu": ",".join(member.gpus),
        "uuid": None,
        "freed_bytes": None,
    }
