"""Which alerts have been acted on. Alertmanager sends a firing alert again and again: that is no news."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["MAX_REMEMBERED", "AlertMemory"]

MAX_REMEMBERED = 4096


@dataclass(slots=True)
class _Known:
    starts_at: str
    """Of the firing that was acted on."""
    acted_seconds: float
    cooldown_seconds: float


class AlertMemory:
    """Remembers the alerts that became actions, by fingerprint; the one heard of longest ago goes first.

    An alert that fires, is resolved and fires again is another firing: it is told by when it began. Seconds are those
    of the caller's clock.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def objection(self, fingerprint: str, starts_at: str, now: float) -> str:
        """Why a firing alert is not acted on: `repeated` or `cooling`; empty where it is news."""
        known = self._known.get(fingerprint)
        if known is None:
            return ""
        self._known.move_to_end(fingerprint)
        if known.starts_at == starts_at:
            return "repeated"
        return "cooling" if now - known.acted_seconds < known.cooldown_seconds else ""

    def acted(self, fingerprint: str, starts_at: str, cooldown_seconds: float, now: float) -> None:
        """A firing alert became an action."""
        self._known[fingerprint] = _Known(starts_at, now, cooldown_seconds)
        self._known.move_to_end(fingerprint)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    def knows(self, fingerprint: str) -> bool:
        """It became an action, and not so many others since that it was forgotten."""
        return fingerprint in self._known
