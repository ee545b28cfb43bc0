"""Reads where tensors are and what obviously holds them, without a reference to any of it afterwards.

Uninterrupted programs select the tracked objects by type, and list what is in models, optimizers, caches, globals of
the user's modules, and local variables, a few containers deep. They follow no other reference, and run none of the
user's code. The result has ids and text only. A program also reads the tensors that it reaches, so a name and an
address belong together even if another object gets the same id between two programs.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from functools import partial
from itertools import chain, compress, count, islice, repeat, starmap
from operator import and_, attrgetter, getitem, is_, is_not, itemgetter, not_
from pathlib import Path
from types import GetSetDescriptorType, ModuleType
from typing import AbstractSet, Any, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Tuple

import gpumem_client
from gpumem_client import torch_access
from gpumem_client.objects.tensors import TensorReader, subclasses
from gpumem_client.uninterrupted import CALL, Slices, Uninterrupted, windows

# The levels of containers below an object: such as `state`, the state of a parameter, and a list in it.
_LEVELS = 5
# With a frozen heap, each module is found below the module that contains it, two levels deeper.
_FROZEN_LEVELS = 24
# The longest container that is read, and the numbers of children and of containers that are read on each level.
_LENGTH_MAX, _CHILDREN_MAX, _CONTAINERS_MAX = 100_000, 200_000, 15_000
# The tensors that one program reads on each level, at 1.7 µs each.
_TENSORS_MAX = 50_000
# The least objects of a window, and the most windows of a generation: each lists all objects of the generation.
_WINDOW, _WINDOWS_MAX = 8_000, 3
# The instances that one program reads.
_INSTANCES = 500
_is_read = range(1, _LENGTH_MAX + 1).__contains__
# The depth of the stacks whose local variables are read.
_FRAMES_MAX = 200
_SHOWS_LOCALS = frozenset({"locals", "vars", "eval", "exec"})
_OPTIMIZED = 0x1  # CO_OPTIMIZED: a function's frame, whose f_locals is a copy
# From Python 3.13 on (PEP 667), `f_locals` is a view, and reading it has no effect.
_COPIED_LOCALS = sys.version_info < (3, 13)
_OWN = f"{Path(gpumem_client.__file__).parent}/"
_INSTALLED = (f"{Path(os.__file__).parent}/", "site-packages", "dist-packages")
# The references to a frame's own dictionary: of the frame, of a list, and of the call that counts them.
_UNSHARED = 3
# These run no code of a metaclass.
dictionary_of_class: Callable[[type], Any] = vars(type)["__dict__"].__get__
"""Returns the `__dict__` of a class."""
name_of_class: Callable[[type], str] = vars(type)["__qualname__"].__get__
"""Returns the qualified name of a class."""
bases_of: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__
"""Returns a class and its base classes, in the order in which attributes are looked up."""
_dictionary_of_module: Callable[[Any], Any] = vars(ModuleType)["__dict__"].__get__


Child = Tuple[int, Any, int]
"""The id of a container or a negative number, a key, and the id of what is there.

A key that is neither text nor a number is the id of the key."""


def ids_of(types: Iterable[type]) -> frozenset[int]:
    """Return the ids of types."""
    # Types are compared by id, because a metaclass may have a hash or a comparison of its own.
    return frozenset(map(id, types))


DICTIONARIES = ids_of((dict, OrderedDict, defaultdict))
CONTAINERS = DICTIONARIES | ids_of((list, tuple, set, frozenset, deque))
_KEYS = ids_of((str, int))


class Holders:
    """Reads the tensors, and what instances of these types and variables hold. `types` must allow weak references.

    Each program keeps the GIL for a third to three quarters of the time of a full garbage collection. Below 500
    instances, 15,000 containers of each level are read. Between the programs, and afterwards, this has only ids, text,
    and weak references to instances.
    """

    def __init__(self, torch: Any, reader: TensorReader, types: Collection[type], slices: Slices) -> None:
        self.tensors: list[tuple[int, int, int, int, tuple[int, ...], Any]] = []
        """Of each tensor with memory on a device: id, device, storage's address, bytes of an element, shape, dtype."""
        self.wrapped: list[tuple[int, list[int]]] = []
        """The ids of tensors that wrap others, such as a DTensor, and of dictionaries in them: what they refer to."""
        self.instances: list[tuple[int, type]] = []
        """The found modules, optimizers, caches, and the instances in variables."""
        self.containers: list[tuple[int, type]] = []
        self.children: list[Child] = []
        """What is in containers, and attributes of instances. The holder of a local variable is -1, -2 and so on."""
        self.frames: list[tuple[str, int, str]] = []
        """The file, line and name of the functions -1, -2 and so on."""
        self.globals: list[str] = []
        """The modules whose globals follow these functions."""
        self._torch = torch
        self._slices = slices
        self._plain, self._wrapping = ids_of(reader.types), ids_of(reader.all_types - reader.types)
        self._own = ids_of(types)
        self._getters = _getters(types)
        self._frozen = gc.get_freeze_count() > 0
        self._references: list[Callable[[], Any]] = []
        self._seen: set[int] = set()
        # The numbers of containers and of tensors of each level.
        self._sizes: list[int] = []
        self._ends: list[int] = []
        self._read_tracked()
        self._read_variables(user_modules())
        self._read_instances()

    @property
    def unread(self) -> int:
        """The number of containers and tensors that were not read, because others of their level were."""
        limits = (self._sizes, _CONTAINERS_MAX), (self._ends, _TENSORS_MAX)
        return sum(max(0, size - most) for sizes, most in limits for size in sizes)

    def _read_tracked(self) -> None:
        """Read the tracked tensors, and find the tracked instances."""
        for listed, window in windows(self._slices, _WINDOW, _WINDOWS_MAX):
            if self._slices.stopping():
                return
            sizes = [_TENSORS_MAX]
            while sizes[-1] == _TENSORS_MAX:
                first = (len(sizes) - 1) * _TENSORS_MAX
                read = Uninterrupted()
                objects = read.held(chain.from_iterable(map(itemgetter(window), map(CALL, (listed,)))))
                chosen = compress(objects, are(objects, self._plain | self._wrapping | self._own))
                found = read.held(islice(chosen, first, first + _TENSORS_MAX))
                read.call(sizes.extend, map(len, (found,)))
                read.call(self._references.extend, map(weakref.ref, compress(found, are(found, self._own))))
                self._add_tensors(read, found)
                self._slices.run(read)

    def _read_variables(self, names: Sequence[str]) -> None:
        """Read the variables of functions, and the globals of the modules with these names."""
        self._getters.update(_getters(_types_of_variables(names, self._slices)))
        read = Uninterrupted()
        self.frames, self.globals, variables = variables_in(read, names)
        # A variable's instance is read, whatever it is; below that only what belongs to models, optimizers and caches.
        self._add_below(read, self._level_of(read, count(-1, -1), variables, [], self._getters.keys()))
        self._slices.run(read)

    def _read_instances(self) -> None:
        """Read what the tracked instances hold."""
        for start in range(0, len(self._references), _INSTANCES):
            if self._slices.stopping():
                return
            read = Uninterrupted()
            found = read.held(map(CALL, self._references[start : start + _INSTANCES]))
            self._add_below(read, compress(found, map(is_not, found, repeat(None))))
            self._slices.run(read)

    def _add_below(self, read: Uninterrupted, found: Iterable[Any]) -> None:
        """Read what instances and containers hold."""
        # What the garbage collector does not track is found below modules that contain it.
        followed = self._own if self._frozen else frozenset()
        for number in range(_FROZEN_LEVELS if self._frozen else _LEVELS):
            fresh = read.unseen(found, self._seen)
            holding = of_types(read, fresh, followed if number else self._getters.keys())
            attributes = attributes_of(read, holding, self._getters)
            usual = read.kept(are(attributes, DICTIONARIES))
            mappings, sequences = (of_types(read, fresh, each) for each in (DICTIONARIES, CONTAINERS - DICTIONARIES))
            read.call(self.instances.extend, zip(map(id, holding), map(type, holding)))
            for each in (mappings, sequences):
                read.call(self.containers.extend, zip(map(id, each), map(type, each)))
            ids = read.kept(chain(compress(map(id, holding), usual), map(id, mappings)))
            dictionaries = read.held(chain(compress(attributes, usual), mappings))
            found = self._level_of(read, ids, dictionaries, sequences, followed)

    def _level_of(
        self,
        read: Uninterrupted,
        ids: Iterable[int],
        dictionaries: Sequence[Any],
        sequences: Sequence[Any],
        followed: AbstractSet[int],
    ) -> list[Any]:
        """Read what dictionaries, whose holders have these ids, and other containers hold.

        Returns the containers in it, and the instances of the types to be followed.
        """
        holders, keys, values = _items_in(read, ids, dictionaries, sequences)
        chosen = read.kept(are(values, self._plain | self._wrapping | self._own | followed))
        shown, ends = _rows(read, *(islice(compress(each, chosen), _TENSORS_MAX) for each in (holders, keys, values)))
        read.call(self._ends.extend, map(sum, (chosen,)))
        inside = read.kept(are(values, CONTAINERS))
        inner = read.held(compress(values, inside))
        # Most containers of a model are empty: the hooks of its modules. They are left out at once.
        readable = read.kept(map(_is_read, map(len, inner)))
        read.call(self._sizes.extend, map(sum, (readable,)))
        of_holders, of_keys, of_inner = (
            islice(compress(each, readable), _CONTAINERS_MAX)
            for each in (compress(holders, inside), compress(keys, inside), inner)
        )
        rows, short = _rows(read, of_holders, of_keys, of_inner)
        read.call(self.children.extend, chain.from_iterable((shown, rows)))
        # Now, because another tensor may have the same id later.
        self._add_tensors(read, ends)
        return read.held(chain(compress(ends, are(ends, followed)), short))

    def _add_tensors(self, read: Uninterrupted, objects: Sequence[Any]) -> None:
        """Read the tensors among objects."""
        read.call(self.tensors.extend, _places(read, self._torch, compress(objects, are(objects, self._plain))))
        wrappers = of_types(read, objects, self._wrapping)
        referents = read.held(map(gc.get_referents, wrappers))
        inside = read.held(chain.from_iterable(referents))
        inner = of_types(read, inside, DICTIONARIES)
        read.call(self.wrapped.extend, zip(map(id, wrappers), map(list, map(partial(map, id), referents))))
        values = map(dict.values, inner)
        read.call(self.wrapped.extend, zip(map(id, inner), map(list, map(partial(map, id), values))))


def are(objects: Iterable[Any], types: AbstractSet[int]) -> Iterator[bool]:
    """Yield for each object whether its type is one of the types with these ids."""
    return map(types.__contains__, map(id, map(type, objects)))


def of_types(read: Uninterrupted, objects: Sequence[Any], types: AbstractSet[int]) -> list[Any]:
    """Return the objects whose type is one of the types with these ids."""
    return read.held(compress(objects, are(objects, types)))


def facts_of(read: Uninterrupted, objects: Sequence[Any], *columns: Callable[[Any], Any]) -> list[Any]:
    """Return of each object a tuple of its id and of what these functions in C return, which keeps no memory alive."""
    return read.kept(zip(map(id, objects), *(map(column, objects) for column in columns)))


def attributes_of(
    read: Uninterrupted, objects: Sequence[Any], getters: Mapping[int, Callable[[Any], Any]]
) -> list[Any]:
    """Return of each object what the getter of its type returns; `getters` has them by the ids of types."""
    return read.held(map(next, map(map, map(getters.__getitem__, map(id, map(type, objects))), zip(objects))))


def children_of(
    read: Uninterrupted,
    ids: Iterable[int],
    dictionaries: Sequence[Any],
    choose: Callable[[Sequence[Any]], Iterator[bool]],
) -> list[Child]:
    """Return the chosen children in dictionaries, whose holders have these ids."""
    holders, keys, values = _items_in(read, ids, dictionaries, [])
    chosen = read.kept(choose(values))
    return _rows(read, compress(holders, chosen), compress(keys, chosen), compress(values, chosen))[0]


def _items_in(
    read: Uninterrupted, ids: Iterable[int], dictionaries: Sequence[Any], sequences: Sequence[Any]
) -> tuple[array[int], list[Any], list[Any]]:
    """Return the holders, keys and values of dictionaries, whose holders have these ids, and of other containers."""
    holders = array("q")
    of_each = chain(
        chain.from_iterable(map(repeat, ids, map(dict.__len__, dictionaries))),
        chain.from_iterable(map(repeat, map(id, sequences), map(len, sequences))),
    )
    keys = chain(
        chain.from_iterable(map(dict.keys, dictionaries)), chain.from_iterable(map(range, map(len, sequences)))
    )
    items = chain(chain.from_iterable(map(dict.values, dictionaries)), chain.from_iterable(sequences))
    read.call(holders.extend, islice(of_each, _CHILDREN_MAX))
    return holders, read.held(islice(keys, _CHILDREN_MAX)), read.held(islice(items, _CHILDREN_MAX))


def _rows(
    read: Uninterrupted, holders: Iterable[int], keys: Iterable[Any], values: Iterable[Any]
) -> tuple[list[Child], list[Any]]:
    """Return children, and the objects themselves."""
    kept_keys, kept_values = read.held(keys), read.held(values)
    # A tuple of two, and whether to take its first or its second item.
    texts = map(getitem, zip(map(id, kept_keys), kept_keys), are(kept_keys, _KEYS))
    return read.kept(zip(holders, texts, map(id, kept_values))), kept_values


def _places(read: Uninterrupted, torch: Any, objects: Iterable[Any]) -> Iterable[Any]:
    """Yield what `Holders.tensors` has. Tensors without memory of their own are left out: sparse and nested ones."""
    base, tensors = torch_access.tensor_base_class(torch), read.held(objects)
    on_device = read.held(compress(tensors, map(base.is_cuda.__get__, tensors)))
    flat = read.held(compress(on_device, map(not_, map(base.is_nested.__get__, on_device))))
    stored = read.held(compress(flat, map(torch_access.has_storage(torch), flat)))
    addresses = read.kept(map(torch_access.storage_address(torch), stored))
    # While torch.compile traces, the size of a tensor without memory may run Python code of torch.
    there = read.held(compress(stored, addresses))
    others = (base.element_size, base.size, base.dtype.__get__)
    return zip(
        map(id, there), map(base.get_device, there), filter(None, addresses), *(map(each, there) for each in others)
    )


def variables_in(
    read: Uninterrupted, names: Sequence[str], suspended: Iterable[Any] = ()
) -> tuple[list[Any], list[str], list[Any]]:
    """Return the functions of all frames, the modules, and the dictionaries with the variables of both.

    `suspended` are further frames, such as the frames of generators.
    """
    running = chain.from_iterable(map(dict.values, starmap(sys._current_frames, ((),))))  # noqa: SLF001
    seen: set[int] = set()  # frames that exceptions keep have callers in common
    frames = read.unseen(chain(running, suspended), seen)
    stacks = [frames]
    for _ in range(_FRAMES_MAX):
        frames = read.unseen(filter(None, map(attrgetter("f_back"), frames)), seen)
        stacks.append(frames)
    frames = read.held(chain.from_iterable(stacks))
    own = map(str.startswith, map(attrgetter("f_code.co_filename"), frames), repeat(_OWN))
    frames = read.held(compress(frames, map(not_, own)))
    # Other code, such as a module's, has its variables in a dictionary of its own.
    frames = read.held(compress(frames, map(and_, map(attrgetter("f_code.co_flags"), frames), repeat(_OPTIMIZED))))
    if _COPIED_LOCALS:
        # Reading f_locals would overwrite the dictionary that `locals()` has returned, and write a debugger's changes
        # back to the variables.
        shown = map(_SHOWS_LOCALS.isdisjoint, map(attrgetter("f_code.co_names"), frames))
        frames = read.held(compress(frames, shown))
        frames = read.held(compress(frames, map(is_, map(attrgetter("f_trace"), frames), repeat(None))))
    locals_ = read.held(map(attrgetter("f_locals"), frames))
    copies = read.held(map(dict, locals_))
    if _COPIED_LOCALS:  # the frame has kept its dictionary, and the user's code may have it, too
        counts = read.kept(map(sys.getrefcount, locals_))
        # A function of `sys.settrace` or `sys.setprofile` has the frame as an argument. When it returns, the
        # interpreter copies the frame's variables back from the dictionary.
        values: set[int] = set()
        read.call(values.update, map(id, chain.from_iterable(map(dict.values, copies))))
        untraced = map(not_, map(values.__contains__, map(id, frames)))
        unshared = map(_UNSHARED.__eq__, counts)
        read.call(any, map(dict.clear, compress(locals_, map(and_, unshared, untraced))))
    functions = read.kept(map(attrgetter("f_code.co_filename", "f_code.co_firstlineno", "f_code.co_name"), frames))
    loaded = read.held(map(sys.modules.get, names))
    usual = read.kept(are(loaded, ids_of(subclasses(ModuleType))))
    modules = read.kept(compress(names, usual))
    return functions, modules, read.held(chain(copies, map(_dictionary_of_module, compress(loaded, usual))))


def _getters(types: Iterable[type]) -> dict[int, Callable[[Any], Any]]:
    return {id(kind): getter for kind in types if (getter := getter_of(kind))}


def _types_of_variables(names: Sequence[str], slices: Slices) -> list[type]:
    read = Uninterrupted()
    variables = variables_in(read, names)[2]
    types = read.kept(map(type, chain.from_iterable(map(dict.values, variables))))
    slices.run(read)
    return list({id(kind): kind for kind in types}.values())


def is_derived(kind: type, base: type) -> bool:
    """Return whether a class is another one or is derived from it."""
    return id(base) in map(id, bases_of(kind))


def getter_of(kind: type) -> Callable[[Any], Any] | None:
    """Return the interpreter's own getter of the `__dict__` of instances; None if there is none."""
    for base in bases_of(kind):
        descriptor = dictionary_of_class(base).get("__dict__")
        if descriptor is not None:
            # The first reading of a `threading.local` in a thread runs `__init__` of its class.
            usual = type(descriptor) is GetSetDescriptorType and base is not threading.local
            return descriptor.__get__ if usual else None
    return None


def user_modules() -> list[str]:
    """Return the names of the modules that are neither installed nor part of Python."""
    found = []
    for name, module in list(sys.modules.items()):
        file = _dictionary_of_module(module).get("__file__") if is_derived(type(module), ModuleType) else None
        installed = type(file) is not str or file.startswith(_OWN) or any(each in file for each in _INSTALLED)
        if name == "__main__" or not installed:
            found.append(name)
    return found
