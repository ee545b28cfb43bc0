"""Calls of C functions, one after another, while no other thread runs and no garbage collection starts.

So a program can read objects that other threads change, and refer to none of them when another thread runs again.
"""

from __future__ import annotations

import gc
import operator
import time
from functools import partial
from itertools import chain, compress
from operator import not_
from typing import Any, Callable, Iterable, Iterator, TypeVar

_Item = TypeVar("_Item")
GENERATIONS = (0, 1, 2)
"""The generations of the garbage collector."""
CALL: Callable[[Callable[[], Any]], Any] = operator.methodcaller("__call__")
"""Calls a function without arguments."""
_CLEAR: Callable[[Any], Any] = operator.methodcaller("clear")
_TURN_SECONDS = 0.02


class Uninterrupted:
    """A program of iterators, which `run` consumes in their order. Everything in it must be written in C.

    Each list is empty until `run` fills it, so an iterator over an earlier list yields the items that it has then.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._held: list[Any] = []
        self._tracked: list[list[Any]] = []
        self.ids: set[int] = set()
        """The ids of its lists, which are among the objects that the garbage collector tracks."""

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function."""
        self._calls.append(partial(function, *arguments))

    def held(self, items: Iterable[_Item]) -> list[_Item]:
        """Return a list of the job's objects, which is empty again when `run` ends."""
        found = self.kept(items)
        self._held.append(found)
        return found

    def tracked(self) -> list[list[Any]]:
        """Return a list of lists like `held`: the objects that the garbage collector tracks."""
        # These lists have the iterators of this program, which refer to the lists: a cycle, unless each is emptied.
        found = self.held(map(gc.get_objects, GENERATIONS))
        self._tracked.append(found)
        return found

    def kept(self, items: Iterable[_Item]) -> list[_Item]:
        """Return a list that keeps its items. None of them may keep memory of the job alive."""
        found: list[_Item] = []
        self.ids.add(id(found))
        self.call(found.extend, items)
        return found

    def unseen(self, items: Iterable[_Item], seen: set[int]) -> list[_Item]:
        """Return a list like `held`, of each item whose id is not in `seen` yet, once."""
        by_id: dict[int, _Item] = {}
        pairs = self.held(items)
        new = self.held(compress(pairs, map(not_, map(seen.__contains__, map(id, pairs)))))
        self.call(by_id.update, zip(map(id, new), new))
        self._held.append(by_id)
        self.ids.add(id(by_id))
        # `chain` asks for the iterators of the dictionary only once it is full.
        found = self.held(chain.from_iterable(map(dict.values, (by_id,))))
        self.call(seen.update, chain.from_iterable((by_id,)))
        return found

    def run(self) -> float:
        """Run the program, once. Returns the seconds for which no other thread could run."""
        calls, held = self._calls, self._held
        collects: list[bool] = []
        seconds: list[float] = []
        program: list[Callable[[], object]] = [
            _now(seconds),
            # Whether to enable collections at the end is read here, because another thread may change it until now.
            partial(collects.extend, map(CALL, (gc.isenabled,))),
            gc.disable,
            partial(list, map(CALL, calls)),
            # The iterators: `zip` keeps its latest items.
            calls.clear,
            partial(any, map(_CLEAR, chain(chain.from_iterable(self._tracked), held))),
            # After that, because a collection may start here, which runs the user's code and lets other threads run.
            partial(any, map(CALL, compress((gc.enable,), collects))),
            _now(seconds),
        ]
        try:
            # `map` calls C functions from C, so no other thread gets the GIL in between.
            list(map(CALL, program))
        except BaseException:
            calls.clear()
            any(map(_CLEAR, [*chain.from_iterable(self._tracked), *held]))
            if any(collects):
                gc.enable()
            raise
        return seconds[1] - seconds[0]


def _now(seconds: list[float]) -> Callable[[], object]:
    return partial(seconds.extend, map(CALL, (time.perf_counter,)))


class Slices:
    """Runs programs for a search, and lets the job run for as long as each has taken.

    `stopping` tells whether the search shall end, and `paused` receives the seconds of each program. Without `rests`,
    the caller is the job itself.
    """

    def __init__(
        self,
        stopping: Callable[[], bool] = lambda: False,
        paused: Callable[[float], object] = lambda _: None,
        *,
        rests: bool = True,
    ) -> None:
        self.stopping = stopping
        self._paused = paused
        self._rests = rests
        self._collections = -1

    def take_turn(self) -> None:
        """Let the other threads run if a full garbage collection has stopped them since the last turn.

        Otherwise a program would stop them again before each has had the GIL.
        """
        collections = gc.get_stats()[2]["collections"]
        if self._rests and collections != self._collections:
            self._collections = collections
            time.sleep(_TURN_SECONDS)

    def run(self, program: Uninterrupted) -> None:
        """Run a program."""
        self.take_turn()
        seconds = program.run()
        self._paused(seconds)
        self.rest(seconds)

    def count(self, generations: Iterable[int] = GENERATIONS) -> int:
        """Return the number of objects that the garbage collector tracks in these generations."""
        program = Uninterrupted()
        sizes = program.kept(map(len, map(gc.get_objects, generations)))
        self.run(program)
        return sum(sizes)

    def rest(self, seconds: float) -> None:
        """Let the job run for as long as a slice of its objects has taken."""
        if self._rests:
            time.sleep(seconds)


def windows(slices: Slices, shortest: int, most: int) -> Iterator[tuple[Callable[[], Iterable[Any]], slice]]:
    """Yield functions that return the tracked objects of a generation, and the part of them that is read next.

    A part has at least `shortest` objects, and a generation at most `most` parts and one.
    """
    for generation in GENERATIONS:
        # The last part first: if objects are freed meanwhile, all others move toward the parts that are still to be
        # read, so none is missed.
        size = slices.count((generation,))
        length = max(shortest, size // most)
        for start in range(size // length * length, -1, -length):
            yield partial(gc.get_objects, generation), slice(start, start + length)
