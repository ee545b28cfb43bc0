"""Which parameters a model and its optimizer have, kept from one count to the next, as long as it can be seen to hold.

Anybody may write into a module's dictionaries, so all modules are asked for what they hold at each count. What they
answer is compared with what they answered before by the objects' identities alone, with the loops in C.

What is kept of a parameter is where it is found. PyTorch swaps no tensor that anything refers to weakly, and would
raise where the program moves a model that is sharded or quantised (`torch.utils.swap_tensors`).
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Any

__all__ = ["CHUNK", "Structure", "living", "values_of"]

CHUNK = 128
"""So many modules or parameters are looked at between two looks at the clock."""

_parameters = attrgetter("_parameters")
_modules = attrgetter("_modules")
_both = attrgetter("_parameters", "_modules")


@dataclass(frozen=True, slots=True)
class _Part:
    """Where some parameters are found."""

    places: list[int]
    """Among all that the modules hold, or that part of the group."""
    modules: list[weakref.ref[Any]] | None
    """None: they are the optimizer's."""
    group: tuple[int, int]
    """Its number, and that of its part."""


class Structure:
    """The parameters of a model, and others that its optimizer updates: copies in full precision, a second model's.

    Holds weak references to modules alone, and hears of their end: as long as none has gone, the identities of what
    was found can be compared. A parameter that has the place of one that has gone, and everywhere its identity, is in
    all that matters here the same one. One thread at a time.

    Args:
        model: a module, or none.
        optimizer: what has `param_groups`, or none.
    """

    def __init__(self, model: weakref.ref[Any] | None, optimizer: weakref.ref[Any] | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._gone: list[weakref.ref[Any]] = []
        self._comparable = True
        self._known_modules: list[tuple[list[weakref.ref[Any]], list[int]]] = []
        self._known_groups: list[list[list[int]]] = []
        self._known_parameters: set[int] = set()
        self._parts: list[_Part] = []

    @property
    def parts(self) -> Sequence[_Part]:
        """Each parameter once, some `CHUNK` in a part; `parameters` gives those of one."""
        return self._parts

    def parameters(self, part: _Part) -> list[Any]:
        """Those of one part, but for what is no more."""
        if part.modules is not None:
            found = values_of(map(_parameters, living(part.modules)))
        else:
            found = self._group(*part.group)
        if len(part.places) != len(found):
            found = [found[place] for place in part.places if place < len(found)]
        return _without_none(found)

    # No local variable of a generator may refer to a tensor, a module or a dictionary of them at a `yield`.

    def find(self) -> Iterator[None]:
        """Find them, a few at each turn. Once."""
        level = [] if self._model is None else [self._model]
        visited: set[int] = set()
        while level:
            children: dict[int, weakref.ref[Any]] = {}
            for start in range(0, len(level), CHUNK):
                self._find_in_modules(level[start : start + CHUNK], visited, children)
                yield
            level = list(children.values())
        for group in range(len(self._groups())):
            self._known_groups.append([])
            while self._find_in_group(group):
                yield

    def holds(self) -> Generator[None, None, bool]:
        """Look whether they are still the same, a few at each turn; the generator's value says it."""
        same = self._comparable and len(self._groups()) == len(self._known_groups)
        for references, found in self._known_modules:
            same = same and not self._gone and _found_in(living(references)) == found
            yield
        for group, parts in enumerate(self._known_groups):
            for part, found in enumerate(parts):
                same = same and list(map(id, self._group(group, part))) == found
                yield
        return same and not self._gone

    def _find_in_modules(
        self, references: list[weakref.ref[Any]], visited: set[int], children: dict[int, weakref.ref[Any]]
    ) -> None:
        references = [reference for reference in references if reference() is not None]
        modules = living(references)
        visited.update(map(id, modules))
        start = held = 0
        for end, module in enumerate(modules, 1):
            held += len(_parameters(module))
            if held >= CHUNK or end == len(modules):
                self._take(values_of(map(_parameters, modules[start:end])), modules=references[start:end])
                start, held = end, 0
        for child in values_of(map(_modules, modules)):
            if child is not None and id(child) not in visited:
                children[id(child)] = weakref.ref(child, self._gone.append)
        # a scripted module shows its parameters through objects that do not refer to them
        self._comparable &= {*map(type, chain.from_iterable(map(_both, modules)))} <= {dict, OrderedDict}
        self._known_modules.append((references, _found_in(modules)))

    def _find_in_group(self, group: int) -> bool:
        """Whether there may be more in that group."""
        parts = self._known_groups[group]
        found = self._group(group, len(parts))
        self._take(found, group=(group, len(parts)))
        parts.append(list(map(id, found)))
        return bool(found)

    def _take(
        self, found: list[Any], *, modules: list[weakref.ref[Any]] | None = None, group: tuple[int, int] = (0, 0)
    ) -> None:
        places = []
        for place, parameter in enumerate(found):
            if parameter is not None and id(parameter) not in self._known_parameters:
                self._known_parameters.add(id(parameter))
                places.append(place)
        for start in range(0, len(places), CHUNK):
            self._parts.append(_Part(places[start : start + CHUNK], modules, group))

    def _groups(self) -> list[Any]:
        optimizer = self._optimizer() if self._optimizer is not None else None
        return getattr(optimizer, "param_groups", None) or []

    def _group(self, group: int, part: int) -> list[Any]:
        groups = self._groups()
        found = groups[group]["params"] if group < len(groups) else []
        start = part * CHUNK
        return found[start : start + CHUNK] if isinstance(found, list) else list(islice(found, start, start + CHUNK))


def living(references: list[weakref.ref[Any]]) -> list[Any]:
    """What they refer to, but for what is no more."""
    return _without_none([reference() for reference in references])


def _without_none(found: list[Any]) -> list[Any]:
    return [one for one in found if one is not None] if type(None) in {*map(type, found)} else found


def values_of(containers: Iterable[Any]) -> list[Any]:
    """All that dictionaries, lists and tuples contain."""
    return list(chain.from_iterable(one.values() if isinstance(one, Mapping) else one for one in containers))


def _found_in(modules: list[Any]) -> list[int]:
    """The identities of all that modules hold.

    The dictionaries are asked as the garbage collector asks them: it has to be told of every value.
    """
    return list(map(id, gc.get_referents(*chain.from_iterable(map(_both, modules)))))
