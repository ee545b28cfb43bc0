"""The color of each job: the same for every viewer, on every screen, after a reload and in `top`."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

HUES = 12
"""Page and terminal have a palette of this number of colors."""
# A job that has ended keeps its hue for its next run.
_MAX_KNOWN = 1024


class Hues:
    """Assigns a hue to each job: the one of its id, or the next one that fewer jobs have. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}

    def of(self, jobs: Iterable[str]) -> Mapping[str, int]:
        """Return the hue of each job of the node, by id."""
        with self._lock:
            ids = sorted(set(jobs))
            uses = Counter(self._known[id_] for id_ in ids if id_ in self._known)
            for id_ in ids:
                if id_ not in self._known:
                    preferred = hashlib.blake2b(id_.encode(), digest_size=4).digest()[0]
                    hue = min(range(HUES), key=lambda each: (uses[each], (each - preferred) % HUES))
                    self._known[id_] = hue
                    uses[hue] += 1
            self._forget(ids)
            return {id_: self._known[id_] for id_ in ids}

    def _forget(self, present: Collection[str]) -> None:
        """Keep the hues of the jobs that are present, and of the latest ones that have ended."""
        for id_ in present:
            self._known[id_] = self._known.pop(id_)
        for id_ in list(self._known)[: max(0, len(self._known) - max(_MAX_KNOWN, len(present)))]:
            del self._known[id_]
