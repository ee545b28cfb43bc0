"""The alerts that became actions. Alertmanager sends a firing alert repeatedly."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["MAX_REMEMBERED", "AlertMemory"]

MAX_REMEMBERED = 4096


@dataclass(slots=True)
class _Acted:
    starts_at: str
    """The start of the firing that the exporter acted on."""
    acted_seconds: float
    cooldown_seconds: float


class AlertMemory:
    """Remembers the alerts that became actions, by fingerprint. The least recently seen ones are forgotten.

    An alert that fires again after it was resolved starts at another time, so it counts as new. Seconds are those of
    the caller's clock.
    """

    def __init__(self) -> None:
        self._acted: OrderedDict[str, _Acted] = OrderedDict()

    def __len__(self) -> int:
        return len(self._acted)

    def objection(self, fingerprint: str, starts_at: str, now: float) -> str:
        """Return why the exporter does not act on a firing alert: `repeated` or `cooling`; empty if it acts."""
        known = self._acted.get(fingerprint)
        if known is None:
            return ""
        self._acted.move_to_end(fingerprint)
        if known.starts_at == starts_at:
            return "repeated"
        return "cooling" if now - known.acted_seconds < known.cooldown_seconds else ""

    def acted(self, fingerprint: str, starts_at: str, cooldown_seconds: float, now: float) -> None:
        """Record that a firing alert became an action."""
        self._acted[fingerprint] = _Acted(starts_at, now, cooldown_seconds)
        self._acted.move_to_end(fingerprint)
        while len(self._acted) > MAX_REMEMBERED:
            self._acted.popitem(last=False)

    def knows(self, fingerprint: str) -> bool:
        """Return whether the alert became an action that is still remembered."""
        return fingerprint in self._acted
