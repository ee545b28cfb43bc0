"""Describes what refers to an object: `list of 181 in history, a global of train`.

The search follows containers upward for a few levels, to the first name: a global, an attribute, a local variable or a
closure. It runs none of the user's code: it recognizes dictionaries and lists by their exact type, and reads attributes
through the interpreter's own descriptors.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterable
from types import CellType, FrameType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from gpumem_toolkit.leaks.interpreter_objects import Frozen, all_frames, tracked_referrers, variables_of

_LEVELS = 4
_KEY_MAX = 40
TARGETS_MAX = 64
"""One pass compares every reference in the heap with all targets, and cannot be interrupted."""
_REFERRERS_MAX = 2000
_ITEMS_MAX = 200_000
_SEQUENCES = (list, tuple, set, frozenset, deque)
NO_REFERRER = "no Python object, perhaps an autograd graph"


def describe_referrers(
    targets: list[Any], end: float, *, ignored: Iterable[Any] = (), frozen: Frozen | None = None
) -> dict[int, str]:
    """Return a description for the id of each target: `NO_REFERRER` if no Python object refers to the target.

    Each level takes one pass over the objects that the garbage collector tracks, for all targets together, and one over
    the frozen objects. Only the first 64 targets are described. No pass starts after `end`, a time on
    `time.thread_time()`. The `ignored` containers of the caller refer to the targets, too.
    """
    return _Search(targets, end, ignored, frozen or Frozen([])).run()


class _Search:
    def __init__(self, targets: list[Any], end: float, ignored: Iterable[Any], frozen: Frozen) -> None:
        self._level: dict[int, Any] = {id(target): target for target in targets[:TARGETS_MAX]}
        self._holds: dict[int, set[int]] = {key: {key} for key in self._level}
        """For the id of each object: the targets that it refers to, directly or through others."""
        self._names: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self._end = end
        self._frozen = frozen
        self._complete = frozen.complete
        self._own: list[Any] = []  # kept alive, so that no other object gets the id of one of them
        self._own_ids: set[int] = set()
        self._ignore(targets, frozen.objects, *ignored)

    def run(self) -> dict[int, str]:
        frames = all_frames()
        self._ignore(frames)
        for depth in range(_LEVELS):
            level = {key: each for key, each in self._level.items() if not self._holds[key] <= self._names.keys()}
            if not level or self._late():
                break
            self._level = {}
            self._ignore(level, self._level)
            alone = self._climb(level)
            for frame in frames if alone else ():
                for key, name in _local_names(frame, alone).items():
                    alone.discard(key)
                    self._name(key, name)
            for key in alone if depth == 0 else ():
                self._name(key, NO_REFERRER)
        return self._paths | self._names

    def _climb(self, level: dict[int, Any]) -> set[int]:
        """Name the referrers of a level, or add them to the next level. Returns the ids without any referrer."""
        alone = set(level)
        referrers = self._find(tuple(level.values()))[:_REFERRERS_MAX]
        dictionaries = [each for each in referrers if type(each) is dict and id(each) not in self._own_ids]
        self._ignore(referrers, dictionaries)
        owners = self._owners(dictionaries)
        for referrer in referrers:
            if self._late():
                return set()
            if id(referrer) in self._own_ids or type(referrer) is FrameType:
                continue
            keys = [key for key in dict.fromkeys(map(id, gc.get_referents(referrer))) if key in level]
            alone.difference_update(keys)
            under = ""
            for key in keys:
                if type(referrer) is dict:
                    entry = _key_of(referrer, level[key]) or ""
                    under = under or entry
                    name = owners.get(id(referrer), "").format(entry) if entry else ""
                else:
                    name = self._named(referrer, level[key])
                if name:
                    self._name(key, name)
            self._follow(referrer, keys, under)
        return alone if self._complete and not self._late() else set()

    def _follow(self, referrer: Any, keys: list[int], under: str) -> None:
        """Add a container to the next level, for the targets that have no name yet."""
        kind = _container(referrer)
        held = {target for key in keys for target in self._holds[key] if target not in self._names}
        held -= self._holds.get(id(referrer), set())  # was already followed for these
        if not kind or not held or len(self._level) >= TARGETS_MAX:
            return
        kind += f" under {under[:_KEY_MAX]!r}" if under else ""
        for target in held:
            path = self._paths.get(target, "")
            if path.count(" in ") < _LEVELS - 1:
                self._paths[target] = f"{path} in {kind}" if path else kind
        self._level[id(referrer)] = referrer
        self._holds.setdefault(id(referrer), set()).update(held)

    def _name(self, key: int, name: str) -> None:
        """Name the targets of an object."""
        for target in self._holds[key] - self._names.keys():
            path = self._paths.get(target)
            self._names[target] = f"{path} in {name}" if path else name

    def _named(self, referrer: Any, target: Any) -> str:
        """Return the name that a referrer other than a dictionary gives to the target."""
        kind = type(referrer)
        if kind is CellType:
            return self._closure(referrer)
        if kind is FunctionType:
            defaults = target is referrer.__defaults__ or target is referrer.__kwdefaults__
            return f"a default of {_function_name(referrer)}" if defaults else ""  # otherwise its globals or closure
        if kind in _SEQUENCES or kind is ModuleType:
            return ""
        attribute = _attribute_of(referrer, target)
        return f"attribute {attribute} of a {kind.__qualname__}" if attribute else ""

    def _closure(self, cell: Any) -> str:
        for closure in self._find((cell,)):
            if type(closure) is not tuple:
                continue
            place = list(map(id, closure)).index(id(cell))
            for function in self._find((closure,)):
                if type(function) is FunctionType and function.__closure__ is closure:
                    return f"{function.__code__.co_freevars[place]}, a closure of {_function_name(function)}"
        return ""

    def _owners(self, dictionaries: list[dict[Any, Any]]) -> dict[int, str]:
        """Return a format for the names in each dictionary of a module or an instance, by id."""
        found: dict[int, str] = {}
        for dictionary in dictionaries:
            module = dictionary.get("__name__")
            if type(module) is str and "__builtins__" in dictionary:
                found[id(dictionary)] = f"{{}}, a global of {module}"
        others = [dictionary for dictionary in dictionaries if id(dictionary) not in found]
        for referrer in self._find(tuple(others)) if others else ():
            if type(referrer) not in (dict, list, tuple, FrameType):
                own = instance_dictionary(referrer)
                if own is not None:
                    found[id(own)] = f"attribute {{}} of a {type(referrer).__qualname__}"
        return found

    def _find(self, objects: tuple[Any, ...]) -> list[Any]:
        """Return what refers to any of the objects; nothing after the end."""
        self._ignore(objects)
        if self._late():
            return []
        return tracked_referrers(objects) + self._frozen.referrers(objects, self._end)

    def _late(self) -> bool:
        return time.thread_time() > self._end

    def _ignore(self, *containers: Any) -> None:
        """Take containers of the search itself for no referrers."""
        self._own += containers
        self._own_ids.update(map(id, containers))


def _local_names(frame: FrameType, wanted: set[int]) -> dict[int, str]:
    """Return descriptions of the wanted objects that are local variables of this frame, by id."""
    code = frame.f_code
    where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
    variables = variables_of(frame)
    return {id(value): f"local variable {name} at {where}" for name, value in variables.items() if id(value) in wanted}


def _container(referrer: Any) -> str:
    kind = type(referrer)
    if kind is dict or kind in _SEQUENCES:
        return f"{kind.__name__} of {len(referrer)}"
    if kind is CellType:
        return "a closure's cell"
    if kind in (FrameType, FunctionType, ModuleType) or kind.__module__ in ("builtins", "gc"):
        return ""
    return f"a {kind.__qualname__}"


def _key_of(mapping: dict[Any, Any], target: Any) -> str | None:
    if len(mapping) > _ITEMS_MAX:
        return None
    for key, value in list(mapping.items()):
        if value is target:
            return key if type(key) is str else None
    return None


def _function_name(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def instance_dictionary(instance: Any) -> dict[Any, Any] | None:
    """Return the `__dict__` of an instance without running code of its class, or None if it has none."""
    for base in type(instance).__mro__:
        descriptor = base.__dict__.get("__dict__")
        if type(descriptor) is GetSetDescriptorType:
            found = descriptor.__get__(instance)
            return found if type(found) is dict else None
    return None


def _attribute_of(instance: Any, target: Any) -> str | None:
    key = _key_of(instance_dictionary(instance) or {}, target)
    if key is not None:
        return key
    for base in type(instance).__mro__:
        for name, descriptor in list(base.__dict__.items()):
            if type(descriptor) is MemberDescriptorType:
                try:
                    if descriptor.__get__(instance) is target:
                        return name
                except AttributeError:
                    continue
    return None
