"""What Python's garbage collector tracks, for whoever looks through it in a program whose other threads go on.

Among that is what another thread is about to make: `tuple(x.cuda() for x in batch)` has its tuple tracked from the
start, and enlarges it while it waits for the next item. Up to Python 3.13 that raises a SystemError there if anybody
else refers to the tuple at that moment. So nobody may: what is not asked for has to be gone before another thread can
run. None can within one call of C: so here iterators are put together, and one call uses them up.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from functools import partial
from itertools import chain, compress, islice, repeat, starmap, tee
from operator import eq, not_
from typing import Any

__all__ = ["count_objects", "find_of_types", "find_referrers", "find_types"]

_Lists = Iterator[list[Any]]
"""Of one list, which is made when it is asked for."""


def count_objects(generation: int) -> int:
    """How many objects are in a generation of the garbage collector."""
    return sum(map(len, map(gc.get_objects, (generation,))))


def find_types(generation: int, *, skip: int = 0) -> set[type]:
    """The types of the objects in a generation, but for those of its first `skip`."""
    return set(map(type, islice(chain.from_iterable(map(gc.get_objects, (generation,))), skip, None)))


def find_of_types(generation: int, types: Collection[type], *, skip: int = 0) -> list[Any]:
    """The objects of just these types in a generation, the oldest first, but for those among its first `skip`."""
    return list(_of_types_alone(map(gc.get_objects, (generation,)), types, skip))


def find_referrers(objects: tuple[Any, ...]) -> list[Any]:
    """What refers to any of them, but for tuples that somebody is still filling: some of their places are empty."""
    return list(_but_for_unfinished(starmap(gc.get_referrers, (objects,))))


def _of_types_alone(lists: _Lists, types: Collection[type], skip: int) -> Iterator[Any]:
    these, used = tee(lists)
    return chain(_of_types(these, types, skip), _cleared(used))


def _but_for_unfinished(lists: _Lists) -> Iterator[Any]:
    these, tuples, same, again, used = tee(lists, 5)
    full = map(
        eq,
        map(len, _of_types(same, (tuple,))),
        map(len, map(gc.get_referents, _of_types(again, (tuple,)))),
    )
    return chain(_of_types(these, (tuple,), but=True), compress(_of_types(tuples, (tuple,)), full), _cleared(used))


def _of_types(lists: _Lists, types: Collection[type], skip: int = 0, *, but: bool = False) -> Iterator[Any]:
    """Those of these types, or all others."""
    these, same = tee(lists)
    rest = map(islice, these, repeat(skip), repeat(None))
    kinds = map(partial(map, type), map(islice, same, repeat(skip), repeat(None)))
    chosen: Iterator[Any] = map(partial(map, frozenset(types).__contains__), kinds)
    return chain.from_iterable(map(compress, rest, map(partial(map, not_), chosen) if but else chosen))


def _cleared(lists: _Lists) -> Iterator[None]:
    """Nothing, once the list is empty: what is tracked includes these iterators, which would keep it and themselves."""
    return filter(None, map(list.clear, lists))
