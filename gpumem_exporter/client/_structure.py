"""Which parameters a model and its optimizer have, kept from one count to the next, as long as it can be seen to hold.

Anybody may write into a module's dictionaries, so all modules are asked for what they hold at each count. What they
answer is compared with what they answered before by the objects' identities alone, with the loops in C.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import attrgetter
from typing import Any

__all__ = ["CHUNK", "Structure", "living", "values_of"]

CHUNK = 128
"""So many modules or parameters are looked at between two looks at the clock."""

_parameters = attrgetter("_parameters")
_modules = attrgetter("_modules")
_both = attrgetter("_parameters", "_modules")


class Structure:
    """The parameters of a model, and others that its optimizer updates: copies in full precision, a second model's.

    Holds weak references alone, and hears of the end of what they refer to: as long as nothing of it has gone, the
    identities of what was found can be compared. One thread at a time.

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
        self._known_parameters: dict[int, weakref.ref[Any]] = {}

    @property
    def parameters(self) -> list[weakref.ref[Any]]:
        """Each once."""
        return list(self._known_parameters.values())

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
        modules = living(references)
        visited.update(map(id, modules))
        self._take(values_of(map(_parameters, modules)))
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
        self._take(found)
        parts.append(list(map(id, found)))
        return bool(found)

    def _take(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if parameter is not None and id(parameter) not in self._known_parameters:
                self._known_parameters[id(parameter)] = weakref.ref(parameter, self._gone.append)

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
    found = [reference() for reference in references]
    return [one for one in found if one is not None] if type(None) in {*map(type, found)} else found


def values_of(containers: Iterable[Any]) -> list[Any]:
    """All that dictionaries, lists and tuples contain."""
    return list(chain.from_iterable(one.values() if isinstance(one, Mapping) else one for one in containers))


def _found_in(modules: list[Any]) -> list[int]:
    """The identities of all that modules hold.

    The dictionaries are asked as the garbage collector asks them: it has to be told of every value.
    """
    return list(map(id, gc.get_referents(*chain.from_iterable(map(_both, modules)))))
