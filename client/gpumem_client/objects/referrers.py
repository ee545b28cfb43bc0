"""Describes what refers to an object: `list of 181 in history, a global of train`.

The search follows containers upward for a few levels, to the first name: a global, an attribute, a closure or a local
variable. It runs none of the user's code: it recognizes containers by their type, and reads attributes through the
interpreter's own descriptors. It works with the ids of objects, so it keeps none of them alive, except a few containers
for the time in which it searches what refers to them.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import AbstractSet, Any, Iterable, Iterator, NamedTuple

from gpumem_client.objects.interpreter import (
    Frozen,
    all_frames,
    frozen_referrers,
    is_own,
    referrers_of,
    referrers_of_few,
    variables_of,
)

_LEVELS = 5
_KEY_MAX = 60
# The number of containers that are followed from one object.
_LINKS_MAX = 4
_ITEMS_MAX = 200_000
_FEW = 16
_SEQUENCES = (list, tuple, set, frozenset, deque)
_FRAMES = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
# Modules whose types are no containers: frames, functions, modules, and the iterators of the search itself.
_NOT_FOLLOWED = ("builtins", "gc", "itertools", "functools", "types")
NO_REFERRER = "no Python object, perhaps an autograd graph"

_CELL = "a closure's cell"


# Returns an attribute of a class without running code of its metaclass.
_of = type.__getattribute__


class _Link(NamedTuple):
    """A container that refers to an object."""

    container: int
    text: str
    key: str | None
    """The key of the object, if the container is a dictionary with keys of text."""


def describe_referrers(wanted: Iterable[int], end: float, frozen: Frozen, *, sizes: bool = True) -> dict[int, str]:
    """Return descriptions by id for the objects with the `wanted` ids: `NO_REFERRER` without a Python referrer.

    Each level takes one pass over all objects, for any number of wanted objects: see `referrers_of`. The search ends at
    `end` on `time.thread_time()`; the objects without a description are missing then. With `sizes`, the text has the
    lengths of containers, which change as they grow.
    """
    return _Search(frozenset(wanted), end, frozen, sizes).run()


class _Search:
    def __init__(self, wanted: AbstractSet[int], end: float, frozen: Frozen, sizes: bool) -> None:
        self._wanted = wanted
        self._end = end
        self._frozen = frozen
        self._sizes = sizes
        # Names of objects: globals, attributes, closures.
        self._names: dict[int, str] = {}
        # By the id of a dictionary: a format for the names of its values.
        self._namespaces: dict[int, str] = {}
        self._links: dict[int, list[_Link]] = {}
        self._locals: dict[int, str] = {}
        # The containers of the next level by id, if there are few.
        self._few: dict[int, Any] = {}
        self._resolved: dict[int, tuple[str, bool]] = {}

    def run(self) -> dict[int, str]:
        for frame in all_frames():
            self._locals.update(_local_names(frame))
        level: AbstractSet[int] = self._wanted
        visited: set[int] = set()
        for _ in range(_LEVELS):
            if not level or time.thread_time() >= self._end:
                break
            visited |= level
            self._read(level)
            found = (link.container for each in level - self._names.keys() for link in self._links.get(each, ()))
            level = set(found) - visited - self._names.keys()
        names = {}
        complete = self._frozen.complete and time.thread_time() < self._end
        for each in self._wanted:
            name = self._resolve(each, 0)[0] or (NO_REFERRER if complete else "")
            if name:
                names[each] = name
        return names

    def _read(self, level: AbstractSet[int]) -> None:
        """Take down what refers to the objects of a level."""
        # A search for few objects is faster, but needs the objects themselves.
        few, self._few = self._few, {}
        few = {key: each for key, each in few.items() if key in level}
        if len(few) < len(level) or len(few) > _FEW:
            few.clear()
            for referrer in referrers_of(level, self._frozen, self._end):
                self._add(referrer, level)
            return
        objects = tuple(few.values())
        for referrer in referrers_of_few(objects):
            if referrer is not few and referrer is not objects:
                self._add(referrer, level)
        for referrer in frozen_referrers(level, self._frozen, self._end):
            self._add(referrer, level)

    def _add(self, referrer: Any, level: AbstractSet[int]) -> None:
        """Take down how an object refers to objects of the level."""
        kind = type(referrer)
        if referrer is self._frozen.objects or referrer is self._few or (kind is FrameType and is_own(referrer)):
            return
        held = {id(each): each for each in gc.get_referents(referrer) if id(each) in level}
        if dict in _of(kind, "__mro__"):
            self._add_mapping(referrer, held)
        elif kind is FunctionType:
            self._add_function(referrer, held)
        elif kind in _SEQUENCES or kind is CellType:
            self._link(referrer, held)
        elif type in _of(kind, "__mro__"):
            self._namespaces.update({key: f"attribute {{}} of class {_of(referrer, '__qualname__')}" for key in held})
        elif kind is FrameType or kind in _FRAMES:
            frame = referrer if kind is FrameType else getattr(referrer, _FRAMES[kind])
            names = _local_names(frame) if frame is not None else {}
            self._names.update({key: name for key, name in names.items() if key in held})
        else:
            self._add_instance(referrer, held)

    def _add_mapping(self, mapping: dict[Any, Any], held: dict[int, Any]) -> None:
        module = dict.get(mapping, "__name__")
        if type(module) is str and dict.__contains__(mapping, "__builtins__"):
            self._namespaces[id(mapping)] = f"{{}}, a global of {module}"
        keys = {}
        if dict.__len__(mapping) <= _ITEMS_MAX:
            keys = {id(value): key for key, value in items_of(mapping) if id(value) in held and type(key) is str}
        for each in held:
            self._link(mapping, (each,), keys.get(each))

    def _add_function(self, function: FunctionType, held: dict[int, Any]) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        if id(function.__closure__) in held:
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                self._names[id(cell)] = f"{variable}, a closure of {name}"
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if id(defaults) in held:
                self._names[id(defaults)] = f"a default of {name}"

    def _add_instance(self, instance: Any, held: dict[int, Any]) -> None:
        owner = f"of a {_of(type(instance), '__qualname__')}"
        found = dict(_attributes(instance, held))
        for each, value in held.items():
            if each in found:
                self._names[each] = f"attribute {found[each]} {owner}"
            elif type(value) is dict and value is instance_dictionary(instance):
                self._namespaces[each] = f"attribute {{}} {owner}"
            else:
                self._link(instance, (each,))

    def _link(self, container: Any, held: Iterable[int], key: str | None = None) -> None:
        """Add a container that has no name of its own."""
        text = self._text(container)
        for each in held if text else ():
            links = self._links.setdefault(each, [])
            if len(links) < _LINKS_MAX and all(link.container != id(container) for link in links):
                links.append(_Link(id(container), text, key))
                # A tuple is not kept, because its thread may still resize it.
                if len(self._few) <= _FEW and type(container) is not tuple:
                    self._few[id(container)] = container

    def _text(self, container: Any) -> str:
        kind = type(container)
        if kind is CellType:
            return _CELL
        if kind is dict or kind in _SEQUENCES:
            return f"{kind.__name__} of {len(container)}" if self._sizes else kind.__name__
        return (
            "" if kind is ModuleType or _of(kind, "__module__") in _NOT_FOLLOWED else f"a {_of(kind, '__qualname__')}"
        )

    def _resolve(self, each: int, depth: int) -> tuple[str, bool]:
        """Return the description of an object, and whether it ends with a name."""
        if each not in self._resolved:
            self._resolved[each] = "", False  # ends a cycle of containers
            self._resolved[each] = self._described(each, depth)
        return self._resolved[each]

    def _described(self, each: int, depth: int) -> tuple[str, bool]:
        name = self._names.get(each)
        links = self._links.get(each, ())
        for link in links:
            if link.key is not None and link.container in self._namespaces:
                name = name or self._namespaces[link.container].format(link.key[:_KEY_MAX])
        if name:
            return name, True
        paths = []
        for link in links if depth <= _LEVELS else ():
            text = link.text + (f" under {link.key[:_KEY_MAX]!r}" if link.key is not None else "")
            above, named = self._resolve(link.container, depth + 1)
            paths.append(((above if text == _CELL else f"{text} in {above}") if above else text, named))
        for path in paths:
            if path[1]:
                return path
        if each in self._locals:
            return self._locals[each], True
        return paths[0] if paths else ("", False)


def _local_names(frame: FrameType) -> dict[int, str]:
    """Return descriptions of the local variables of a frame, by the ids of their values."""
    code = frame.f_code
    where = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    return {id(value): f"local variable {name} at {where}" for name, value in variables_of(frame).items()}


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a dictionary without running code of its class; nothing for another object."""
    if dict not in _of(type(value), "__mro__"):
        return []
    try:
        return list(dict.items(value))
    except RuntimeError:  # another thread has changed it
        return []


def instance_dictionary(instance: Any) -> dict[Any, Any] | None:
    """Return the `__dict__` of an instance without running code of its class, or None if it has none."""
    for base in _of(type(instance), "__mro__"):
        descriptor = base.__dict__.get("__dict__")
        if type(descriptor) is GetSetDescriptorType:
            found = descriptor.__get__(instance)
            return found if type(found) is dict else None
    return None


def _attributes(instance: Any, wanted: dict[int, Any]) -> Iterator[tuple[int, str]]:
    """Yield the ids of the wanted objects that are attributes of an instance, with the names of the attributes."""
    for name, value in items_of(instance_dictionary(instance) or {}):
        if id(value) in wanted and type(name) is str:
            yield id(value), name
    for base in _of(type(instance), "__mro__"):
        for name, descriptor in items_of(dict(base.__dict__)):
            if type(descriptor) is MemberDescriptorType:
                try:
                    value = descriptor.__get__(instance)
                except AttributeError:
                    continue
                if id(value) in wanted:
                    yield id(value), name
