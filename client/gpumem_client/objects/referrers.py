"""Describes what refers to an object: `list of 181 in history, a global of train`.

The search follows containers upward for a few levels, to the first name: a global, an attribute, a closure or a local
variable. It first reads which objects refer to which, and then what the few objects on the way are called, all by ids:
it refers to no object of the job while another thread runs, and runs none of the user's code.
"""

from __future__ import annotations

import gc
from functools import partial
from itertools import chain, compress, count, repeat
from operator import attrgetter, not_
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
from typing import AbstractSet, Any, Callable, Iterable, Iterator, NamedTuple, Sequence

from gpumem_client.objects.holders import (
    CONTAINERS,
    are,
    children_of,
    getter_of,
    ids_of,
    variables_in,
)
from gpumem_client.objects.links import Links
from gpumem_client.objects.tensors import subclasses
from gpumem_client.uninterrupted import Slices, Uninterrupted

_LEVELS = 5
_KEY_MAX = 60
# The number of containers that are followed from one object, and of all containers that are followed.
_LINKS_MAX, _FOLLOWED_MAX = 4, 200_000
_FRAMES = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
# What refers to these is not searched: they have names, or none that helps.
_CLOSURE = attrgetter("__closure__")
_ENDS = ids_of((ModuleType, FunctionType, FrameType, type, *_FRAMES))
# Modules whose types are no containers: functions, modules, and the iterators of the search itself.
_NOT_FOLLOWED = ("builtins", "gc", "itertools", "functools", "types")
NO_REFERRER = "no Python object, perhaps an autograd graph"
_CELL = "a closure's cell"

# Returns an attribute of a class without running code of its metaclass.
_of = type.__getattribute__
_QUALIFIED = vars(type)["__qualname__"].__get__


class _Link(NamedTuple):
    """A container that refers to an object."""

    container: int
    text: str
    key: str | None
    """The key of the object, if the container is a dictionary with keys of text."""


def describe_referrers(
    wanted: Iterable[int],
    slices: Slices,
    late: Callable[[], bool],
    frozen: Sequence[Any] = (),
    *,
    sizes: bool = True,
) -> dict[int, str]:
    """Return descriptions by id for the objects with the `wanted` ids: `NO_REFERRER` without a Python referrer.

    Takes about 6 s of CPU time and 50 MiB of memory per million objects, for any number of wanted objects. It ends when
    it is `late`; the objects without a description are missing then. With `sizes`, the text has the lengths of
    containers, which change as they grow.
    """
    return _Search(frozenset(wanted), slices, sizes).run(late, frozen)


class _Search:
    def __init__(self, wanted: AbstractSet[int], slices: Slices, sizes: bool) -> None:
        self._wanted = wanted
        self._slices = slices
        self._sizes = sizes
        # Names of objects: globals, attributes, closures.
        self._names: dict[int, str] = {}
        # By the id of a dictionary: a format for the names of its values.
        self._namespaces: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        # By the ids of a container and an object in it.
        self._keys: dict[tuple[int, int], str] = {}
        self._links: dict[int, list[_Link]] = {}
        self._locals: dict[int, str] = {}
        self._resolved: dict[int, tuple[str, bool]] = {}

    def run(self, late: Callable[[], bool], frozen: Sequence[Any]) -> dict[int, str]:
        links = Links(self._slices, late, frozen)
        complete, most = links.complete, len(self._wanted) + _FOLLOWED_MAX
        sources: dict[int, list[int]] = {}
        visited, level = set(self._wanted), set(self._wanted)
        for _ in range(_LEVELS):
            if self._slices.stopping():
                return {}
            above: set[int] = set()
            for source, kind, target in links.referrers(level, self._slices):
                found = sources.setdefault(target, [])
                if len(visited) >= most:
                    complete = False
                elif len(found) < _LINKS_MAX and source not in found:
                    found.append(source)
                    if source not in visited:
                        visited.add(source)
                        above |= set() if kind in _ENDS else {source}
            level = above
        followed = visited - self._wanted
        self._read(followed, frozen)
        for target, found in sources.items():
            self._links[target] = [
                _Link(each, self._texts[each], self._keys.get((each, target))) for each in found if each in self._texts
            ]
        names = {each: self._resolve(each, 0)[0] or (NO_REFERRER if complete else "") for each in self._wanted}
        return {each: name for each, name in names.items() if name}

    def _read(self, followed: AbstractSet[int], frozen: Sequence[Any]) -> None:
        """Read what the objects with these ids are, and what they call each other and the wanted ones."""
        read = Uninterrupted()
        kinds = read.kept(map(type, _with_ids(read, followed, frozen)))
        self._slices.run(read)
        types = {id(kind): kind for kind in kinds}
        dictionary_types, classes_types = ids_of(subclasses(dict)), ids_of(subclasses(type))
        no_instances = CONTAINERS | _ENDS | dictionary_types | classes_types | ids_of((CellType,))
        getters = {key: found for key, kind in types.items() if (found := getter_of(kind)) is not None}
        named = followed | self._wanted

        def choose(values: Sequence[Any]) -> Iterator[bool]:
            return map(named.__contains__, map(id, values))

        read = Uninterrupted()
        objects = _with_ids(read, followed, frozen)
        mappings = read.held(compress(objects, are(objects, dictionary_types)))
        sequences = read.held(compress(objects, are(objects, CONTAINERS - dictionary_types)))
        lengths = (
            read.kept(zip(map(id, mappings), map(type, mappings), map(dict.__len__, mappings))),
            read.kept(zip(map(id, sequences), map(type, sequences), map(len, sequences))),
        )
        in_mappings = children_of(read, map(id, mappings), mappings, [], choose)[0]
        globals_ = read.held(compress(mappings, map(dict.__contains__, mappings, repeat("__builtins__"))))
        modules = read.kept(zip(map(id, globals_), map(dict.get, globals_, repeat("__name__"))))
        cells = read.kept(map(id, compress(objects, are(objects, ids_of((CellType,))))))
        functions = read.held(compress(objects, are(objects, ids_of((FunctionType,)))))
        defaults = read.kept(
            zip(
                map(attrgetter("__module__", "__qualname__"), functions),
                map(id, map(attrgetter("__defaults__"), functions)),
                map(id, map(attrgetter("__kwdefaults__"), functions)),
            )
        )
        closed = read.held(compress(functions, map(_CLOSURE, functions)))
        closures = read.kept(
            zip(
                map(attrgetter("__module__", "__qualname__", "__code__.co_freevars"), closed),
                map(list, map(partial(map, id), map(_CLOSURE, closed))),
            )
        )
        classes = read.held(compress(objects, are(objects, classes_types)))
        in_classes = read.kept(
            zip(map(_QUALIFIED, classes), map(list, map(partial(map, id), map(gc.get_referents, classes))))
        )
        instances = read.held(compress(objects, map(not_, are(objects, no_instances))))
        kept_instances = read.kept(zip(map(id, instances), map(type, instances)))
        attributed = read.held(compress(instances, are(instances, getters.keys())))
        attributes = read.held(
            map(next, map(map, map(getters.__getitem__, map(id, map(type, attributed))), zip(attributed)))
        )
        dictionaries = read.kept(zip(map(id, attributes), map(type, attributed)))
        usual = read.held(compress(attributes, are(attributes, dictionary_types)))
        ids = compress(map(id, attributed), are(attributes, dictionary_types))
        in_instances = [children_of(read, ids, usual, [], choose)[0]]
        for key, kind in types.items():
            for name, member in _slots(kind) if key not in no_instances else ():
                alike = read.held(compress(instances, are(instances, {key})))
                filled = read.held(compress(alike, map(hasattr, alike, repeat(name))))
                in_instances.append(read.kept(zip(map(id, filled), repeat(name), map(id, map(member.__get__, filled)))))
        waiting = [
            map(attrgetter(name), compress(objects, are(objects, ids_of((kind,))))) for kind, name in _FRAMES.items()
        ]
        frames, _, variables = variables_in(read, (), filter(None, chain.from_iterable(waiting)))
        in_frames = children_of(read, count(-1, -1), variables, [], choose)[0]
        self._slices.run(read)

        for each, kind, length in chain(*lengths):
            known = id(kind) in CONTAINERS
            self._texts[each] = (
                (f"{kind.__name__} of {length}" if self._sizes else kind.__name__)
                if known
                else (f"a {_of(kind, '__qualname__')}")
            )
        self._texts.update(dict.fromkeys(cells, _CELL))
        for each, kind in kept_instances:
            if _of(kind, "__module__") not in _NOT_FOLLOWED:
                self._texts[each] = f"a {_of(kind, '__qualname__')}"
        self._namespaces.update({key: f"attribute {{}} of class {name}" for name, keys in in_classes for key in keys})
        self._namespaces.update({key: f"attribute {{}} of a {_of(kind, '__qualname__')}" for key, kind in dictionaries})
        self._namespaces.update({key: f"{{}}, a global of {name}" for key, name in modules if type(name) is str})
        self._keys = {(holder, child): key for holder, key, child in in_mappings if type(key) is str}
        kinds_of = dict(kept_instances)
        for holder, key, child in chain.from_iterable(in_instances):
            if type(key) is str:
                self._names[child] = f"attribute {key} of a {_of(kinds_of[holder], '__qualname__')}"
        for (module, function), *values in defaults:
            self._names.update(dict.fromkeys({*values} - {id(None)}, f"a default of {module}.{function}"))
        for (module, function, names), closure in closures:
            self._names.update(
                {cell: f"{each}, a closure of {module}.{function}" for each, cell in zip(names, closure)}
            )
        for holder, key, child in in_frames:
            file, line, function = frames[-1 - holder]
            self._locals.setdefault(child, f"local variable {key} at {file}:{line} in {function}")

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


def _with_ids(read: Uninterrupted, ids: AbstractSet[int], frozen: Sequence[Any]) -> list[Any]:
    """Return the objects with these ids."""
    lists = read.tracked()
    every = (chain(chain.from_iterable(lists), frozen) for _ in range(2))
    return read.held(compress(next(every), map(ids.__contains__, map(id, next(every)))))


def _slots(kind: type) -> list[tuple[str, Any]]:
    """Return the slots of a class whose instances can be asked for them without running code of the class."""
    bases = [base for base in _of(kind, "__mro__") if base is not object]
    if any("__getattr__" in base.__dict__ or "__getattribute__" in base.__dict__ for base in bases):
        return []
    members = [(name, each) for base in bases for name, each in items_of(dict(base.__dict__))]
    return [(name, each) for name, each in members if type(each) is MemberDescriptorType and type(name) is str]


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
