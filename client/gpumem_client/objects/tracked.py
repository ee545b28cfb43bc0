"""Lists Python's objects: what the garbage collector tracks, and what `gc.freeze()` hides.

Other threads run meanwhile, and one may be building a tuple: `tuple(x.cuda() for x in batch)` has its tuple tracked
from the start, and resizes it at the next item. Up to Python 3.13 that raises a SystemError in that thread if anything
else refers to the tuple. So objects are selected in `Uninterrupted` programs, and only selected ones are referred to
while another thread can run.
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from itertools import chain, compress, starmap
from operator import itemgetter
from typing import Any, Callable, Collection, Iterator

from gpumem_client.objects.holders import are, ids_of, variables_in
from gpumem_client.uninterrupted import CALL, GENERATIONS, Uninterrupted

MAX_OBJECTS = 5_000_000
# The number of objects between two readings of the clock.
_CHUNK = 1024


def count_tracked(generation: int) -> int:
    """Return the number of objects in a generation of the garbage collector."""
    return sum(map(len, map(gc.get_objects, (generation,))))


def tracked_of_types(generation: int, types: Collection[type], *, skip: int = 0) -> list[Any]:
    """Return the objects of exactly these types in a generation, the oldest first, without its first `skip` objects.

    Keeps the GIL for 0.1 s per million objects.
    """
    read = Uninterrupted()
    lists = map(CALL, (partial(gc.get_objects, generation),))
    listed = read.held(chain.from_iterable(map(itemgetter(slice(skip, None)), lists)))
    found = read.kept(compress(listed, are(listed, ids_of(types))))
    read.run()
    return found


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
    if not count or count + sum(map(count_tracked, GENERATIONS)) > max_objects:
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
