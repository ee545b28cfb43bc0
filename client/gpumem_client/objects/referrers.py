"""Describes what refers to an object: `list of 181 in history, a global of train`.

The search follows what refers to an object upward, to the first name: a global, an attribute, a closure, a local
variable, or the cache of a function. An instance in a container says little: then the name has the container, too.

The search first reads which objects refer to which, and then what the few objects on the way are called, all by ids: it
refers to no object of the job while another thread runs, and runs none of the user's code.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections import Counter
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
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import AbstractSet, Any, Callable, Iterable, Iterator, NamedTuple, Sequence

from gpumem_client.objects.holders import (
    CONTAINERS,
    DICTIONARIES,
    are,
    attributes_of,
    bases_of,
    children_of,
    dictionary_of_class,
    facts_of,
    getter_of,
    ids_of,
    name_of_class,
    of_types,
    variables_in,
)
from gpumem_client.objects.tensors import subclasses
from gpumem_client.objects.tracked import Links
from gpumem_client.uninterrupted import Slices, Uninterrupted

_LEVELS = 8
_KEY_MAX = 60
# The number of objects that are followed from one object, and of all objects that are followed.
_LINKS_MAX, _FOLLOWED_MAX = 4, 200_000
_FRAMES: dict[type, str] = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
_CLOSURE = attrgetter("__closure__")
# What refers to these is not searched: they have names.
_ENDS = ids_of((ModuleType, type))
_FUNCTION, _CACHED = id(FunctionType), type(functools.lru_cache(len))
# On the way to a name these say nothing.
_PASSED: dict[type, str] = {
    CellType: "a closure's cell",
    FunctionType: "a function",
    FrameType: "a frame",
    TracebackType: "a traceback",
    **dict.fromkeys(_FRAMES, "a generator"),
}
# Modules whose types are no containers: modules, and the iterators of the search itself.
_NOT_FOLLOWED = ("builtins", "gc", "itertools", "types")
# Modules whose classes are containers: the name of an attribute in them says nothing.
_OF_CONTAINERS = ("_queue", "asyncio.queues", "collections", "queue", "types", "weakref")
NO_REFERRER = "no Python object, perhaps an autograd graph"
GRAPH = 0
"""The id of no object. Its description is what keeps an autograd graph."""
_GRAPH = "perhaps the autograd graph of {}"
_GARBAGE = ", garbage: cycles, and gc is off"

_module_of_class = vars(type)["__module__"].__get__


class _Name(NamedTuple):
    text: str
    holder: int
    """The instance or function that has the object under this name; 0 if what refers to it does not matter."""


def describe_referrers(
    wanted: Iterable[int],
    slices: Slices,
    late: Callable[[], bool],
    frozen: Sequence[Any] = (),
    *,
    sizes: bool = True,
    nodes: Iterable[type] = (),
    tensors: Iterable[type] = (),
) -> dict[int, str]:
    """Return descriptions by id for the objects with the `wanted` ids: `NO_REFERRER` without a Python referrer.

    Takes about 6 s of CPU time and 50 MiB of memory per million objects, for any number of wanted objects. It ends when
    it is `late`; the objects without a description are missing then. With `sizes`, the text has the lengths of
    containers, which change as they grow.

    `nodes` are the types of an autograd graph's nodes. If Python objects refer to nodes, objects without a referrer are
    described by these, and there is a description of `GRAPH`. The dictionaries of `tensors` have hooks.
    """
    return _Search(frozenset(wanted), slices, sizes, ids_of(nodes), ids_of(tensors)).run(late, frozen)


class _Search:
    def __init__(
        self, wanted: AbstractSet[int], slices: Slices, sizes: bool, nodes: AbstractSet[int], tensors: AbstractSet[int]
    ) -> None:
        self._wanted = wanted
        self._slices = slices
        self._sizes = sizes
        self._node_types, self._tensor_types = nodes, tensors
        # Names of objects: attributes, closures, defaults.
        self._names: dict[int, list[_Name]] = {}
        # By the id of a dictionary: a format for the names of its values, and the instance that has the dictionary.
        self._namespaces: dict[int, _Name] = {}
        # What is on the way: texts of objects, of those with a name for what they refer to, and of those without any.
        self._texts: dict[int, str] = {}
        self._final: set[int] = set()
        self._passed: set[int] = set()
        # Frames that do not run, and generators.
        self._framed: set[int] = set()
        # Containers that may grow.
        self._containers: set[int] = set()
        # Classes of containers, and frames: what refers to them is part of a name, wherever it is.
        self._nameless: set[int] = set()
        # By the ids of a container and an object in it.
        self._keys: dict[tuple[int, int], str] = {}
        # What refers to an object, if it has a text.
        self._links: dict[int, list[int]] = {}
        self._locals: dict[int, str] = {}
        self._counts: dict[int, int] = {}
        self._resolved: dict[int, tuple[str, bool]] = {}

    def run(self, late: Callable[[], bool], frozen: Sequence[Any]) -> dict[int, str]:
        collects = gc.isenabled()
        links = Links(self._slices, late, frozen)
        nodes = links.of_types(self._node_types)
        complete, most = links.complete, len(self._wanted) + len(nodes) + _FOLLOWED_MAX
        sources: dict[int, list[int]] = {}
        references: Counter[int] = Counter()
        kinds: dict[int, int] = {}
        level = self._wanted | nodes
        visited = set(level)
        expanded: set[int] = set()
        dropped: set[int] = set()
        for depth in range(_LEVELS):
            if self._slices.stopping():
                return {}
            above: set[int] = set()
            expanded |= level
            for source, kind, target in links.referrers(level, self._slices):
                references[target] += 1
                found = sources.setdefault(target, [])
                if source in found:
                    continue
                if len(found) >= _LINKS_MAX or (source not in visited and len(visited) >= most):
                    dropped.add(target)
                    complete = complete and (depth > 0 or bool(found))
                    continue
                found.append(source)
                if source not in visited:
                    visited.add(source)
                    kinds[source] = kind
                    # All functions of a module refer to the dictionary of its globals.
                    of_globals = kind == _FUNCTION and kinds.get(target) in DICTIONARIES
                    above |= set() if kind in _ENDS or of_globals else {source}
            level = above
            if not level:
                break
        self._read(visited - self._wanted, frozen)
        self._links = {target: [each for each in found if each in self._texts] for target, found in sources.items()}
        alive = {
            each
            for each in visited
            if collects or each not in expanded or each in dropped or self._counts.get(each) != references[each]
        }
        known = 0
        while len(alive) > known:  # what is reached from an object that is alive is alive
            known = len(alive)
            alive |= {target for target, found in sources.items() if not alive.isdisjoint(found)}
        graphs = Counter(name for name, named in map(self._resolve, sorted(nodes)) if named)
        graph = _GRAPH.format(graphs.most_common(1)[0][0]) if graphs else ""
        found_names = {GRAPH: graph}
        for each in self._wanted:
            garbage = "" if each in alive else _GARBAGE
            name = self._resolve(each)[0] or graph or (NO_REFERRER if complete else "")
            found_names[each] = name and name + garbage
        return {each: name for each, name in found_names.items() if name}

    def _read(self, followed: AbstractSet[int], frozen: Sequence[Any]) -> None:
        """Read what the objects with these ids are, and what they call each other and the wanted ones."""
        probe: list[object] = [[]]  # a list that the garbage collector tracks, with one reference
        named = followed | self._wanted
        read = Uninterrupted()
        every = _with_ids(read, named | {id(probe)}, frozen)
        counts = read.kept(zip(map(id, every), map(sys.getrefcount, every)))
        kinds = read.kept(map(type, every))
        self._slices.run(read)
        self._counts = dict(counts)
        own = self._counts.get(id(probe), 0) - 1
        self._counts = {each: number - own for each, number in self._counts.items()}
        types = {id(kind): kind for kind in kinds}
        dictionary_types, classes_types = ids_of(subclasses(dict)), ids_of(subclasses(type))
        exceptions = ids_of(subclasses(BaseException))
        no_instances = CONTAINERS | ids_of(_PASSED) | _ENDS | dictionary_types | classes_types
        getters = {key: found for key, kind in types.items() if (found := getter_of(kind)) is not None}

        def choose(values: Sequence[Any]) -> Iterator[bool]:
            return map(named.__contains__, map(id, values))

        read = Uninterrupted()
        objects = _with_ids(read, followed, frozen)
        mappings = of_types(read, objects, dictionary_types)
        sequences = of_types(read, objects, CONTAINERS - dictionary_types)
        lengths = facts_of(read, mappings, type, dict.__len__), facts_of(read, sequences, type, len)
        in_mappings = children_of(read, map(id, mappings), mappings, choose)
        globals_ = read.held(compress(mappings, map(dict.__contains__, mappings, repeat("__builtins__"))))
        modules = read.kept(zip(map(id, globals_), map(dict.get, globals_, repeat("__name__"))))
        passed_kinds = facts_of(read, of_types(read, objects, ids_of(_PASSED)), type)
        functions = of_types(read, objects, {_FUNCTION})
        names = attrgetter("__module__", "__qualname__", "__code__.co_freevars")
        defaults = read.kept(
            zip(
                facts_of(read, functions, names),
                *(map(id, map(attrgetter(name), functions)) for name in ("__defaults__", "__kwdefaults__")),
            )
        )
        closed = read.held(compress(functions, map(_CLOSURE, functions)))
        closures = read.kept(
            zip(facts_of(read, closed, names), map(list, map(partial(map, id), map(_CLOSURE, closed))))
        )
        classes = of_types(read, objects, classes_types)
        referents = map(list, map(partial(map, id), map(gc.get_referents, classes)))
        in_classes = read.kept(zip(map(name_of_class, classes), referents))
        instances = read.held(compress(objects, map(not_, are(objects, no_instances))))
        kept_instances = facts_of(read, instances, type)
        attributed = of_types(read, instances, getters.keys())
        attributes = attributes_of(read, attributed, getters)
        dictionaries = read.kept(zip(map(id, attributes), facts_of(read, attributed, type)))
        usual = of_types(read, attributes, dictionary_types)
        ids = compress(map(id, attributed), are(attributes, dictionary_types))
        in_instances: list[Iterable[tuple[int, Any, int]]] = [children_of(read, ids, usual, choose)]
        of_caches = read.held(compress(attributes, are(attributed, {id(_CACHED)})))
        cached = read.kept(
            zip(
                compress(map(id, attributed), are(attributed, {id(_CACHED)})),
                *(map(dict.get, of_caches, repeat(name)) for name in ("__module__", "__qualname__")),
            )
        )
        for key, kind in types.items():
            for name, member in _slots(kind) if key not in no_instances else ():
                alike = of_types(read, instances, {key})
                filled = read.held(compress(alike, map(hasattr, alike, repeat(name))))
                in_instances.append(read.kept(zip(map(id, filled), repeat(name), map(id, map(member.__get__, filled)))))
        waiting: list[Iterable[Any]] = [of_types(read, objects, {id(FrameType)})]
        for kind, name in _FRAMES.items():
            waiting.append(map(attrgetter(name), of_types(read, objects, {id(kind)})))
        frames, _, variables = variables_in(read, (), filter(None, chain.from_iterable(waiting)))
        in_frames = children_of(read, count(-1, -1), variables, choose)
        self._slices.run(read)

        for each, kind, length in chain(*lengths):
            if id(kind) in CONTAINERS:
                self._texts[each] = f"{kind.__name__} of {length}" if self._sizes else kind.__name__
            else:
                self._texts[each] = f"a {name_of_class(kind)}"
            self._containers |= set() if kind is tuple else {each}  # as the arguments of a call
        self._texts.update((each, _PASSED[kind]) for each, kind in passed_kinds)
        self._passed.update(each for each, _ in passed_kinds)
        self._nameless.update(each for each, kind in passed_kinds if kind is FrameType)
        self._framed.update(each for each, kind in passed_kinds if kind is FrameType or kind in _FRAMES)
        for each, kind in kept_instances:
            module, text = _module_of(kind), f"a {name_of_class(kind)}"
            if id(kind) in self._tensor_types:
                text = f"the hooks of {text}"
                self._final.add(each)
            elif kind is threading.local:
                text = "a threading.local"
            if id(kind) in exceptions or module not in _NOT_FOLLOWED:
                self._texts[each] = text
            if module in _OF_CONTAINERS:
                self._nameless.add(each)
        for each, *words in cached:
            self._texts[each] = f"functools.lru_cache of {'.'.join(word for word in words if type(word) is str)}"
            self._final.add(each)
        for name, keys in in_classes:
            self._namespaces.update(dict.fromkeys(keys, _Name(f"attribute {{}} of class {name}", 0)))
        for each, (instance, kind) in dictionaries:
            self._namespaces[each] = _Name(f"attribute {{}} of a {name_of_class(kind)}", instance)
        for each, module in modules:
            self._namespaces.update({each: _Name(f"{{}}, a global of {module}", 0)} if type(module) is str else {})
        self._keys = {(holder, child): key[:_KEY_MAX] for holder, key, child in in_mappings if type(key) is str}
        kinds_of = dict(kept_instances)
        for holder, key, child in chain.from_iterable(in_instances):
            if type(key) is str:
                self._add(child, f"attribute {key} of a {name_of_class(kinds_of[holder])}", holder)
        for (holder, (module, function, _)), *values in defaults:
            for each in {*values} - {id(None)}:
                self._add(each, f"a default of {module}.{function}", holder)
        for (holder, (module, function, free)), closure in closures:
            for each, cell in zip(free, closure):
                self._add(cell, f"{each}, a closure of {module}.{function}", holder)
        for holder, key, child in in_frames:
            file, line, function = frames[-1 - holder]
            self._locals.setdefault(child, f"local variable {key} at {file}:{line} in {function}")

    def _add(self, each: int, text: str, holder: int) -> None:
        self._names.setdefault(each, []).append(_Name(text, holder))

    def _resolve(self, each: int, depth: int = 0) -> tuple[str, bool]:
        """Return the description of an object, and whether it ends with a name."""
        if each not in self._resolved:
            self._resolved[each] = "", False  # ends a cycle of containers
            self._resolved[each] = self._described(each, depth)
        return self._resolved[each]

    def _described(self, each: int, depth: int) -> tuple[str, bool]:
        names = list(self._names.get(each, ()))
        for link in self._links.get(each, ()):
            if (link, each) in self._keys and link in self._namespaces:
                text, holder = self._namespaces[link]
                names.append(_Name(text.format(self._keys[link, each]), holder))
        if names:
            # The least one, so that objects with the same holders have the same name.
            name = min(names)
            return name.text + self._beyond(name.holder, " in {}", depth), True
        paths = self._paths(each, depth)
        for path in paths:
            if path[1]:
                return path
        if each in self._locals:
            holders = [link for link in self._links.get(each, ()) if link in self._framed]
            beyond = (self._beyond(holder, ", kept by {}", depth) for holder in holders)
            return self._locals[each] + next(filter(None, beyond), ""), True
        return paths[0] if paths else ("", False)

    def _paths(self, each: int, depth: int, *, containers: bool = False) -> list[tuple[str, bool]]:
        """Return descriptions by what refers to an object, or only by the containers that do, the named ones sorted."""
        paths = []
        for link in self._links.get(each, ()) if depth <= _LEVELS else ():
            if containers and (link not in self._containers or link in self._namespaces):
                continue
            if each in self._locals and link in self._framed:
                continue
            text = self._texts[link] + (f" under {self._keys[link, each]!r}" if (link, each) in self._keys else "")
            above, named = ("", True) if link in self._final else self._resolve(link, depth + 1)
            if link in self._passed:
                paths.append((above or text, named))
            else:
                paths.append((f"{text} in {above}" if above else text, named))
        return sorted(paths, key=lambda path: (not path[1], path[0] if path[1] else ""))

    def _beyond(self, holder: int, text: str, depth: int) -> str:
        """Return what has a holder: a container with a name, or anything with a name if the holder is nameless."""
        if holder in self._nameless:
            path = self._resolve(holder, depth + 1)
        else:
            path = next(iter(self._paths(holder, depth, containers=True)), ("", False))
        return text.format(path[0]) if path[1] else ""


def _with_ids(read: Uninterrupted, ids: AbstractSet[int], frozen: Sequence[Any]) -> list[Any]:
    """Return the objects with these ids."""
    lists = read.tracked()
    every = (chain(chain.from_iterable(lists), frozen) for _ in range(2))
    return read.held(compress(next(every), map(ids.__contains__, map(id, next(every)))))


def _module_of(kind: type) -> Any:
    """Return the module of a class; None for a class that `exec` has made in a namespace without a name."""
    try:
        return _module_of_class(kind)
    except AttributeError:
        return None


def _slots(kind: type) -> list[tuple[str, Any]]:
    """Return the slots of a class whose instances can be asked for them without running code of the class."""
    found: dict[str, Any] = {}
    for base in bases_of(kind)[:-1]:  # the last one is `object`
        for name, each in dict(dictionary_of_class(base)).items():
            if type(name) is str:
                found.setdefault(name, each)  # a property of a derived class may have the name of a slot
    if not found.keys().isdisjoint(("__getattr__", "__getattribute__")):
        return []
    return [(name, each) for name, each in found.items() if type(each) is MemberDescriptorType]


def instance_dictionary(instance: Any) -> dict[Any, Any] | None:
    """Return the `__dict__` of an instance without running code of its class, or None if it has none."""
    getter = getter_of(type(instance))
    found = None if getter is None else getter(instance)
    return found if type(found) is dict else None
