"""Describes what refers to an object: `list of 181 in history, a global of train`.

The search follows containers upward for a few levels, to the first name: a global, an attribute, a local variable or a
closure. It runs none of the user's code: it recognizes dictionaries and lists by their exact type, and reads attributes
through the interpreter's own descriptors.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import CellType, FrameType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from gpumem_toolkit.leaks.frames import all_frames, variables_of
from gpumem_toolkit.leaks.frozen_objects import FrozenObjects
from gpumem_toolkit.leaks.tracked_objects import find_referrers

__all__ = ["NO_REFERRER", "TARGETS_MAX", "Referrers", "instance_dictionary"]

_LEVELS = 4
_KEY_MAX = 40
TARGETS_MAX = 64
_REFERRERS_MAX = 2000
_ITEMS_MAX = 200_000
_SEQUENCES = (list, tuple, set, frozenset, deque)
NO_REFERRER = "no Python object, perhaps an autograd graph"

_Find = Callable[[tuple[Any, ...]], list[Any]]
"""Returns what refers to any of the objects."""


class Referrers:
    """Describes what refers to objects, except the `ignored` containers. Only one thread may use an instance.

    Each level takes one pass over the objects that the garbage collector tracks, for all targets together, and one over
    the `frozen` objects, which the collector does not show.
    """

    def __init__(self, ignored: Iterable[Any] = (), frozen: FrozenObjects | None = None) -> None:
        self._frozen = FrozenObjects() if frozen is None else frozen
        self._ignored = {id(container) for container in (*ignored, self._frozen.objects)}
        self._frames: list[FrameType] = []
        self._names: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self._end = float("inf")

    def describe(self, targets: list[Any], end: float) -> dict[int, str]:
        """Return a description for each target id: `NO_REFERRER` if no Python object refers to the target.

        Args:
            targets: the objects, the most important first. Only the first 64 are described, because one pass compares
                every reference in the heap with all of them, and cannot be interrupted.
            end: time on `time.thread_time()` after which no pass starts.
        """
        all_targets, targets = targets, targets[:TARGETS_MAX]
        self._end = end
        level: dict[int, Any] = {id(target): target for target in targets}
        above: dict[int, Any] = {}
        # For the id of each object: the targets that it refers to, directly or through others.
        holds: dict[int, set[int]] = {id(target): {id(target)} for target in targets}
        self._ignored.update(map(id, (all_targets, targets, level, above)))
        self._frames = all_frames()
        self._ignored.add(id(self._frames))
        complete = True
        for depth in range(_LEVELS):
            for key in [key for key in level if holds[key] <= self._names.keys()]:
                del level[key]
            if not level:
                break
            if time.thread_time() > end:
                complete = False
                break
            alone = self._climb(level, above, holds)
            self._name_locals(level, alone, holds)
            if depth == 0 and complete:
                for key in alone:
                    self._name(holds[key], NO_REFERRER)
            level.clear()
            level.update(above)
            above.clear()
        level.clear()
        self._frames = []
        return {target: self._names.get(target) or self._paths[target] for target in {*self._names, *self._paths}}

    def _climb(self, level: dict[int, Any], above: dict[int, Any], holds: dict[int, set[int]]) -> set[int]:
        """Name what refers to this level, or add it to the next level. Returns the ids without any referrer."""
        alone = set(level)
        dictionaries: list[dict[Any, Any]] = []
        arguments = tuple(level.values())
        self._ignored.update(map(id, (dictionaries, arguments)))
        referrers = self._find(arguments)
        self._ignored.add(id(referrers))
        found: dict[int, list[int]] = {}
        cut = not self._frozen.complete
        for referrer in referrers[:_REFERRERS_MAX]:
            cut = cut or time.thread_time() > self._end
            if cut:
                break
            kind = type(referrer)
            if id(referrer) in self._ignored or kind is FrameType:
                continue
            keys = [key for key in dict.fromkeys(map(id, gc.get_referents(referrer))) if key in level]
            alone.difference_update(keys)
            if kind is dict:
                dictionaries.append(referrer)
                found[id(referrer)] = keys
                continue
            for key in keys:
                description = self._named(referrer, level[key])
                if description:
                    self._name(holds[key], description)
            self._put(referrer, keys, above, holds)
        owners = _owners(dictionaries, self._find)
        for dictionary in dictionaries:
            owner = owners.get(id(dictionary), "")
            keys = found[id(dictionary)]
            names = {key: _key_of(dictionary, level[key]) for key in keys}
            for key, name in names.items():
                if owner and name:
                    self._name(holds[key], owner.format(name))
            self._put(dictionary, keys, above, holds, next(filter(None, names.values()), ""))
        self._ignored -= {id(dictionaries), id(arguments), id(referrers)}
        return set() if cut else alone

    def _put(
        self, referrer: Any, keys: list[int], above: dict[int, Any], holds: dict[int, set[int]], under: str = ""
    ) -> None:
        if len(above) >= TARGETS_MAX:
            return
        kind = _container(referrer)
        kind = f"{kind} under {under[:_KEY_MAX]!r}" if kind and under else kind
        held = {target for key in keys for target in holds[key] if target not in self._names}
        held -= holds.get(id(referrer), set())  # was already followed for these
        if not kind or not held:
            return
        for target in held:
            path = self._paths.get(target, "")
            if path.count(" in ") < _LEVELS - 1:
                self._paths[target] = f"{path} in {kind}" if path else kind
        above[id(referrer)] = referrer
        holds.setdefault(id(referrer), set()).update(held)

    def _name_locals(self, level: dict[int, Any], alone: set[int], holds: dict[int, set[int]]) -> None:
        """Name the local variables that refer to objects without any other referrer."""
        for frame in self._frames:
            if not alone:
                return
            for key, name in _local_names(frame, level).items():
                if key in alone:
                    alone.discard(key)
                    self._name(holds[key], name)

    def _find(self, objects: tuple[Any, ...]) -> list[Any]:
        """Return what refers to any of the objects."""
        found = find_referrers(objects)
        found += self._frozen.referrers(objects, self._end)
        return found

    def _named(self, referrer: Any, target: Any) -> str:
        """Return the name that a referrer other than a dictionary gives to the target."""
        kind = type(referrer)
        if kind is CellType:  # makes two more searches
            return _closure(referrer, self._find) if time.thread_time() <= self._end else ""
        if kind is FunctionType:
            defaults = target is referrer.__defaults__ or target is referrer.__kwdefaults__
            return f"a default of {_function_name(referrer)}" if defaults else ""  # otherwise its globals or closure
        if kind in _SEQUENCES or kind is ModuleType:
            return ""
        attribute = _attribute_of(referrer, target)
        return f"attribute {attribute} of a {kind.__qualname__}" if attribute else ""

    def _name(self, targets: set[int], holder: str) -> None:
        for target in targets:
            if target not in self._names:
                path = self._paths.get(target)
                self._names[target] = f"{path} in {holder}" if path else holder


def _local_names(frame: FrameType, wanted: dict[int, Any]) -> dict[int, str]:
    """Return descriptions of the wanted objects that are local variables of this frame, by id."""
    code = frame.f_code
    where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
    variables = variables_of(frame)
    return {id(value): f"local variable {name} at {where}" for name, value in variables.items() if id(value) in wanted}


def _closure(cell: Any, find: _Find) -> str:
    for closure in find((cell,)):
        if type(closure) is tuple:
            for function in find((closure,)):
                if type(function) is FunctionType and function.__closure__ is closure:
                    index = next((at for at, each in enumerate(closure) if each is cell), 0)
                    return f"{function.__code__.co_freevars[index]}, a closure of {_function_name(function)}"
    return ""


def _owners(dictionaries: list[dict[Any, Any]], find: _Find) -> dict[int, str]:
    """Return a format for the names in each dictionary of a module or an instance, by id."""
    found: dict[int, str] = {}
    instances: list[dict[Any, Any]] = []
    for dictionary in dictionaries:
        module = dictionary.get("__name__")
        if type(module) is str and "__builtins__" in dictionary:
            found[id(dictionary)] = f"{{}}, a global of {module}"
        else:
            instances.append(dictionary)
    if instances:
        for referrer in find(tuple(instances)):
            if type(referrer) not in (dict, list, tuple, FrameType):
                own = instance_dictionary(referrer)
                if own is not None:
                    found[id(own)] = f"attribute {{}} of a {type(referrer).__qualname__}"
    return found


def _container(referrer: Any) -> str:
    kind = type(referrer)
    if kind is dict:
        return f"dict of {len(referrer)}"
    if kind in _SEQUENCES:
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
    found = instance_dictionary(instance)
    if found is not None:
        key = _key_of(found, target)
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
