"""Reads Python's objects: what the garbage collector tracks, what `gc.freeze()` hides, and local variables.

Other threads run meanwhile, and one may be building a tuple: `tuple(x.cuda() for x in batch)` has its tuple tracked
from the start, and resizes it at the next item. Up to Python 3.13 that raises a SystemError in that thread if anything
else refers to the tuple. So the functions here must not refer to unselected objects while another thread can run. No
other thread runs within one call of a C function: the functions build iterators, and one call consumes them.
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from itertools import chain, compress, starmap, tee
from operator import itemgetter
from types import FrameType
from typing import Any, Callable, Collection, Iterator, List, NamedTuple

from gpumem_client.uninterrupted import GENERATIONS

MAX_OBJECTS = 5_000_000
# The number of objects between two readings of the clock.
_CHUNK = 1024
_FRAMES_MAX = 500
SHOWS_LOCALS = frozenset({"locals", "vars", "eval", "exec"})
OPTIMIZED = 0x1  # CO_OPTIMIZED: a function's frame, whose f_locals is a copy
# From Python 3.13 on (PEP 667), `f_locals` is a view, and reading it has no effect.
COPIED_LOCALS = sys.version_info < (3, 13)

# Yields lists, each of which is created at `next`.
_Lists = Iterator[List[Any]]


def count_tracked(generation: int) -> int:
    """Return the number of objects in a generation of the garbage collector."""
    return sum(map(len, map(gc.get_objects, (generation,))))


def tracked_of_types(generation: int, types: Collection[type], *, skip: int = 0) -> list[Any]:
    """Return the objects of exactly these types in a generation, the oldest first, without its first `skip` objects.

    Keeps the GIL for 0.1 s per million objects.
    """
    these, used = tee(_tracked(generation, slice(skip, None)))
    return list(chain(_of_types(these, types), _cleared(used)))


def each_tracked(types: Collection[type], late: Callable[[], bool], max_objects: int = sys.maxsize) -> Iterator[Any]:
    """Yield the objects of exactly these types until `late()`, the youngest generation first.

    Refers to no object that it has yielded, so that other threads can free it. Leaves the oldest objects out if there
    are more than `max_objects`.
    """
    # What leaks is young. Within a generation the oldest objects come first, so that a tensor precedes its views.
    left = max_objects
    for generation in GENERATIONS:
        size = count_tracked(generation)
        found = tracked_of_types(generation, types, skip=max(0, size - max(0, left)))
        left -= size
        found.reverse()
        while found:
            if len(found) % _CHUNK == 0 and late():
                return
            yield found.pop()


class Frozen(NamedTuple):
    """The frozen objects that a search has reached."""

    objects: list[Any]
    complete: bool = True
    """Whether no limit has ended the search."""


def _tracked(generation: int, window: slice) -> _Lists:
    return map(itemgetter(window), map(gc.get_objects, (generation,)))


def _of_types(lists: _Lists, types: Collection[type]) -> Iterator[Any]:
    """Yield the objects of these types."""
    these, same = tee(lists)
    chosen: Iterator[Any] = map(partial(map, frozenset(types).__contains__), map(partial(map, type), same))
    return chain.from_iterable(map(compress, these, chosen))


def _cleared(lists: _Lists) -> Iterator[None]:
    """Yield nothing, and empty each list. A list contains these iterators themselves, and would keep them alive."""
    return filter(None, map(list.clear, lists))


def find_frozen(end: float, max_objects: int = MAX_OBJECTS) -> Frozen:
    """Return the objects that `gc.freeze()` hides, as far as other objects refer to them.

    Takes 1.3 s of CPU time and 100 MiB of host memory per million objects, and keeps the GIL for up to 0.4 s per
    million tracked objects. Ends at `end` on `time.thread_time()`, and does not start if there are more than
    `max_objects`.
    """
    # vLLM's engine and servers that fork their workers freeze what exists after the start. `gc.get_objects` does not
    # return frozen objects, and `gc.unfreeze` would change the program. What an object refers to can be read, so the
    # search starts at modules, local variables and the tracked objects.
    found: list[Any] = []
    count = gc.get_freeze_count()
    if not count or count + sum(map(count_tracked, GENERATIONS)) > max_objects:
        return Frozen(found, complete=not count)
    seen: set[int] = set()
    level: list[Any] = list(sys.modules.values())
    for generation in GENERATIONS:
        referents = starmap(gc.get_referents, map(gc.get_objects, (generation,)))
        level += list(filter(gc.is_tracked, chain.from_iterable(referents)))
        seen |= set(map(id, chain.from_iterable(map(gc.get_objects, (generation,)))))  # the search skips these
    for frame in all_frames():
        level += [frame.f_globals, *filter(gc.is_tracked, variables_of(frame).values())]
    while level:
        # All of these are finished objects, so the search may refer to them while other threads run.
        fresh = {key: each for key, each in zip(map(id, level), level) if key not in seen}
        seen.update(fresh)
        found += fresh.values()
        level.clear()
        for chunk in _chunks(list(fresh.values())):
            if time.thread_time() >= end:
                return Frozen(found, complete=False)
            level += filter(gc.is_tracked, gc.get_referents(*chunk))
    return Frozen(found)


def _chunks(objects: list[Any]) -> Iterator[list[Any]]:
    return (objects[start : start + _CHUNK] for start in range(0, len(objects), _CHUNK))


def is_own(frame: FrameType) -> bool:
    """Whether a frame runs code of this project."""
    module = frame.f_globals.get("__name__")
    return type(module) is str and module.startswith(("gpumem_client.", "gpumem_toolkit."))


def all_frames() -> list[FrameType]:
    """Return the frames of all threads, without the frames of this project."""
    tops = sys._current_frames()
    found: list[FrameType] = []
    while tops and len(found) < _FRAMES_MAX:
        at: FrameType | None = tops.popitem()[1]
        while at is not None and len(found) < _FRAMES_MAX:
            if not is_own(at):
                found.append(at)
            at = at.f_back
    # This frame is among them, so that the variable would be part of a reference cycle.
    tops.clear()
    return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the local variables of a function.

    Returns nothing for a module or class body, whose variables are in a dictionary of their own, and for a function
    in which reading them would change the user's dictionary.
    """
    code = frame.f_code
    if not code.co_flags & OPTIMIZED:
        return {}
    if COPIED_LOCALS and not SHOWS_LOCALS.isdisjoint(code.co_names):
        return {}  # f_locals would overwrite the dictionary that `locals()` has returned
    if COPIED_LOCALS and frame.f_trace is not None:
        return {}  # a debugger's changes of f_locals are written back to the variables
    variables = frame.f_locals
    found = dict(variables)
    if COPIED_LOCALS:
        variables.clear()  # otherwise the frame keeps objects that the user's code deletes later
    return found
