"""Which objects refer to which, by their ids. Refers to no object of the job."""

from __future__ import annotations

import gc
import time
from array import array
from bisect import bisect_right
from functools import partial
from itertools import accumulate, chain, compress, count
from operator import itemgetter, not_
from typing import AbstractSet, Any, Callable, Iterable, Iterator, NamedTuple, Sequence

from gpumem_client.uninterrupted import CALL, Slices, Uninterrupted, windows

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
