"""Reads the objects that the garbage collector tracks, while other threads continue.

Another thread may be building a tuple: `tuple(x.cuda() for x in batch)` has its tuple tracked from the start, and
resizes it at the next item. Up to Python 3.13 that raises a SystemError in that thread if anything else refers to the
tuple. So the functions here must not refer to unselected objects while another thread can run. No other thread runs
within one call of a C function: the functions build iterators, and one call consumes them.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from functools import partial
from itertools import chain, compress, islice, repeat, starmap, tee
from operator import eq, not_
from typing import Any

__all__ = ["count_objects", "find_ids", "find_of_types", "find_referents", "find_referrers", "find_types"]

_Lists = Iterator[list[Any]]
"""Yields one list, which is created at `next`."""


def count_objects(generation: int) -> int:
    """Return the number of objects in a generation of the garbage collector."""
    return sum(map(len, map(gc.get_objects, (generation,))))


def find_types(generation: int, *, skip: int = 0) -> set[type]:
    """Return the types of the objects in a generation, without its first `skip` objects."""
    return set(map(type, islice(chain.from_iterable(map(gc.get_objects, (generation,))), skip, None)))


def find_of_types(generation: int, types: Collection[type], *, skip: int = 0) -> list[Any]:
    """Return the objects of exactly these types in a generation, the oldest first, without its first `skip`."""
    return list(_of_types_alone(map(gc.get_objects, (generation,)), types, skip))


def find_ids(generation: int) -> set[int]:
    """Return the ids of the objects in a generation."""
    return set(map(id, chain.from_iterable(map(gc.get_objects, (generation,)))))


def find_referents(generation: int) -> list[Any]:
    """Return the objects that the collector tracks and that objects in a generation refer to. It has repetitions."""
    referents = starmap(gc.get_referents, map(gc.get_objects, (generation,)))
    return list(filter(gc.is_tracked, chain.from_iterable(referents)))


def find_referrers(objects: tuple[Any, ...]) -> list[Any]:
    """Return what refers to any of the objects, without tuples that another thread is still filling."""
    return list(_without_unfinished_tuples(starmap(gc.get_referrers, (objects,))))


def _of_types_alone(lists: _Lists, types: Collection[type], skip: int) -> Iterator[Any]:
    these, used = tee(lists)
    return chain(_of_types(these, types, skip), _cleared(used))


def _without_unfinished_tuples(lists: _Lists) -> Iterator[Any]:
    these, tuples, same, again, used = tee(lists, 5)
    full = map(
        eq,
        map(len, _of_types(same, (tuple,))),
        map(len, map(gc.get_referents, _of_types(again, (tuple,)))),
    )
    return chain(_of_types(these, (tuple,), exclude=True), compress(_of_types(tuples, (tuple,)), full), _cleared(used))


def _of_types(lists: _Lists, types: Collection[type], skip: int = 0, *, exclude: bool = False) -> Iterator[Any]:
    """Yield the objects of these types; with `exclude`, all other objects."""
    these, same = tee(lists)
    rest = map(islice, these, repeat(skip), repeat(None))
    kinds = map(partial(map, type), map(islice, same, repeat(skip), repeat(None)))
    chosen: Iterator[Any] = map(partial(map, frozenset(types).__contains__), kinds)
    return chain.from_iterable(map(compress, rest, map(partial(map, not_), chosen) if exclude else chosen))


def _cleared(lists: _Lists) -> Iterator[None]:
    """Yield nothing, and empty each list. A list contains these iterators themselves, and would keep them alive."""
    return filter(None, map(list.clear, lists))
