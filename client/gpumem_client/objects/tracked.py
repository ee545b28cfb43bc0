"""Lists Python's objects: what the garbage collector tracks, what `gc.freeze()` hides, and which refer to which.

Other threads run meanwhile, and one may be building a tuple: `tuple(x.cuda() for x in batch)` has its tuple tracked
from the start, and resizes it at the next item. Up to Python 3.13 that raises a SystemError in that thread if anything
else refers to the tuple. So objects are selected in `Uninterrupted` programs, and only selected ones are referred to
while another thread can run.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from bisect import bisect_right
from functools import partial
from itertools import accumulate, chain, compress, count, starmap
from operator import itemgetter, not_
from typing import AbstractSet, Any, Callable, Collection, Iterable, Iterator, NamedTuple, Sequence

from gpumem_client.objects.holders import are, ids_of, variables_in
from gpumem_client.uninterrupted import CALL, GENERATIONS, Slices, Uninterrupted, windows

MAX_OBJECTS = 5_000_000
# The number of objects between two readings of the clock.
_CHUNK = 1024


def each_tracked(types: Collection[type], late: Callable[[], bool], max_objects: int = sys.maxsize) -> Iterator[Any]:
    """Yield the objects of exactly these types until `late()`, the youngest generation first.

    Keeps the GIL for 0.1 s per million objects of a generation. Refers to no object that it has yielded, so that other
    threads can free it. Leaves the oldest objects out if there are more than `max_objects`.
    """
    # What leaks is young. Within a generation the oldest objects come first, so that a tensor precedes its views.
    left = max_objects
    for generation in GENERATIONS:
        size = Slices(rests=False).count((generation,))
        read = Uninterrupted()
        lists = map(CALL, (partial(gc.get_objects, generation),))
        listed = read.held(chain.from_iterable(map(itemgetter(slice(max(0, size - max(0, left)), None)), lists)))
        found = read.kept(compress(listed, are(listed, ids_of(types))))
        read.run()
        left -= size
        found.reverse()
        while found:
            if len(found) % _CHUNK == 0 and late():
                return
            yield found.pop()


def find_frozen(end: float, max_objects: int = MAX_OBJECTS) -> list[Any]:
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
    if not count or count + Slices(rests=False).count() > max_objects:
        return found
    read = Uninterrupted()
    lists = read.tracked()
    seen: set[int] = set()  # the search skips what is tracked
    read.call(seen.update, map(id, chain.from_iterable(lists)))
    referents = chain(starmap(gc.get_referents, lists), map(gc.get_referents, variables_in(read, ())[2]))
    level = read.kept(filter(gc.is_tracked, chain.from_iterable(referents)))
    read.run()
    level += sys.modules.values()
    while level:
        # All of these are finished objects, so the search may refer to them while other threads run.
        fresh = {key: each for key, each in zip(map(id, level), level) if key not in seen}
        seen.update(fresh)
        found += fresh.values()
        level.clear()
        objects = list(fresh.values())
        for start in range(0, len(objects), _CHUNK):
            if time.thread_time() >= end:
                return found
            level += filter(gc.is_tracked, gc.get_referents(*objects[start : start + _CHUNK]))
    return found


# The number of objects of a slice, which keeps the GIL for about 40 ms, and the most slices of a generation: each
# lists all objects of the generation. In a large heap, a slice takes half the time of a full collection.
_SLICE, _SLICES_MAX = 8_000, 20


class _Slice(NamedTuple):
    """The objects of a slice, and the tracked objects that they refer to, in the same order."""

    ids: array[int]
    types: array[int]
    ends: array[int]
    """By object: the index in `targets` after its last one."""
    targets: array[int]


class Links:
    """The links between the tracked objects, and from frozen ones. Takes 50 MiB per million objects."""

    def __init__(self, slices: Slices, late: Callable[[], bool], frozen: Sequence[Any] = ()) -> None:
        self._slices: list[_Slice] = []
        self.complete = True
        """Whether all objects were read."""
        everything: Callable[[], Iterable[Any]] = partial(list, frozen)
        of_frozen = ((everything, slice(at, at + _SLICE)) for at in range(0, len(frozen), _SLICE))
        for each in chain(windows(slices, _SLICE, _SLICES_MAX), of_frozen):
            if slices.stopping() or late():
                self.complete = False
                return
            self._slices.append(_read(slices, id(frozen), *each))

    def of_types(self, types: AbstractSet[int]) -> set[int]:
        """Return the ids of the objects whose types have these ids."""
        return {number for each in self._slices for number in compress(each.ids, map(types.__contains__, each.types))}

    def referrers(self, wanted: AbstractSet[int], slices: Slices) -> Iterator[tuple[int, int, int]]:
        """Yield the ids of a referrer, of its type, and of the object with a wanted id that it refers to."""
        for each in self._slices:
            started = time.perf_counter()
            for at in compress(count(), map(wanted.__contains__, each.targets)):
                source = bisect_right(each.ends, at)
                yield each.ids[source], each.types[source], each.targets[at]
            slices.rest(time.perf_counter() - started)


def _read(slices: Slices, own: int, listed: Callable[[], Iterable[Any]], window: slice) -> _Slice:
    found = _Slice(array("Q"), array("Q"), array("Q"), array("Q"))
    read = Uninterrupted()
    objects = read.held(chain.from_iterable(map(itemgetter(window), map(CALL, (listed,)))))
    mine = read.ids
    mine.add(own)
    objects = read.held(compress(objects, map(not_, map(mine.__contains__, map(id, objects)))))
    referents = read.held(map(list, map(partial(filter, gc.is_tracked), map(gc.get_referents, objects))))
    read.call(found.ids.extend, map(id, objects))
    read.call(found.types.extend, map(id, map(type, objects)))
    read.call(found.ends.extend, accumulate(map(len, referents)))
    read.call(found.targets.extend, map(id, chain.from_iterable(referents)))
    slices.run(read)
    return found
