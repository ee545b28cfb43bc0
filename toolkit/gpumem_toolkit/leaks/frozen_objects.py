"""Finds the objects that `gc.freeze()` hides from the lists of the garbage collector.

vLLM's engine and servers that fork their workers freeze what exists after the start. `gc.get_objects` and
`gc.get_referrers` do not return frozen objects, and `gc.unfreeze` would change the program. But what an object refers
to can be read: the search follows the references from modules, local variables and all objects that are not frozen.
What is not reached is counted: objects that only C code refers to, mostly the attributes of built-in types.

All references are to finished objects, so the search may keep them while other threads run (see `tracked_objects`).
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Collection, Iterable
from itertools import chain
from types import FrameType
from typing import Any

from gpumem_toolkit.leaks.frames import all_frames, variables_of
from gpumem_toolkit.leaks.tracked_objects import count_objects, find_ids, find_referents

__all__ = ["FrozenObjects"]

_GENERATIONS = (0, 1, 2)
_CHUNK = 1024
"""The number of objects between two readings of the clock."""


class FrozenObjects:
    """The frozen objects that the search reaches. Keeps them alive until `clear`. For one thread.

    Attributes:
        objects: the objects that were reached.
        complete: whether no limit has ended the last search.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.complete = True
        self._frozen = gc.get_freeze_count()
        self._searched = False

    @property
    def unreached(self) -> int:
        """The number of frozen objects that were not reached."""
        return max(0, self._frozen - len(self.objects))

    def reach(self, end: float, max_objects: int) -> None:
        """Search once: 1.3 s of CPU time and 100 MiB of host memory per million objects.

        Keeps the GIL for up to 0.4 s per million objects that are not frozen; the frozen objects are read in pieces.

        Args:
            end: time on `time.thread_time()` at which the search ends.
            max_objects: no search if there are more objects.
        """
        if self._searched or not self._frozen:
            return
        self._searched = True
        if self._frozen + sum(map(count_objects, _GENERATIONS)) > max_objects:
            self.complete = False
            return
        seen: set[int] = set()
        level: list[Any] = []
        for generation in _GENERATIONS:
            level += find_referents(generation)
            seen |= find_ids(generation)  # the search does not return to these
        level += sys.modules.values()
        level += chain.from_iterable(map(_referred_by_frame, all_frames()))
        while level and self.complete:
            fresh = {key: each for key, each in zip(map(id, level), level, strict=True) if key not in seen}
            seen.update(fresh)
            self.objects += fresh.values()
            level.clear()
            for chunk in _chunks(list(fresh.values())):
                if time.thread_time() > end:
                    self.complete = False
                    break
                level += filter(gc.is_tracked, gc.get_referents(*chunk))

    def of_types(self, reads: Collection[type]) -> list[Any]:
        """Return the reached objects of exactly these types."""
        return [each for each in self.objects if type(each) in reads]

    def types(self) -> set[type]:
        """Return the types of the reached objects."""
        return set(map(type, self.objects))

    def referrers(self, objects: Iterable[Any], end: float) -> list[Any]:
        """Return the reached objects that refer to any of the objects. Takes 0.4 s per million reached objects."""
        wanted = set(map(id, objects))
        found: list[Any] = []
        for chunk in _chunks(self.objects):
            if time.thread_time() > end:
                self.complete = False
                break
            if not wanted.isdisjoint(map(id, gc.get_referents(*chunk))):
                found += [each for each in chunk if not wanted.isdisjoint(map(id, gc.get_referents(each)))]
        return found

    def clear(self) -> None:
        """Drop all references to the objects."""
        self.objects.clear()


def _chunks(objects: list[Any]) -> Iterable[list[Any]]:
    return (objects[start : start + _CHUNK] for start in range(0, len(objects), _CHUNK))


def _referred_by_frame(frame: FrameType) -> list[Any]:
    """Return what a running frame refers to: the garbage collector does not show its variables."""
    return [frame.f_globals, *filter(gc.is_tracked, variables_of(frame).values())]
