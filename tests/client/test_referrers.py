from __future__ import annotations

import functools
import gc
import itertools
import queue
import re
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gpumem_client.objects.referrers import GRAPH, NO_REFERRER, describe_referrers
from gpumem_client.uninterrupted import Slices


class Thing:
    """A target of references."""


class Holder:
    """Fails the test if its own code runs."""

    def __init__(self, thing: Thing) -> None:
        self.things = [thing]

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} was read")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    __slots__ = ("thing",)

    def __init__(self, thing: Thing) -> None:
        self.thing = thing


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Search only what the test creates: the interpreter of a long run has millions of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def untraced() -> Iterator[None]:
    """Measure no coverage: the variables of a traced frame are left to its debugger."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


def _described(target: int) -> str:
    """Describe what refers to the object with this id."""
    return describe_referrers([target], Slices(), lambda: False)[target]


def _of_a_function(thing: Thing) -> Callable[[], Thing]:
    def inner() -> Thing:
        return thing

    return inner


def _with_a_default(thing: Thing) -> Callable[..., Thing]:
    def inner(given: Thing = thing) -> Thing:
        return given

    return inner


def test_the_holder_of_an_object_is_named() -> None:
    instance, slotted, nested = Holder(Thing()), Slotted(Thing()), {"deep": [(Thing(),)]}
    closure, default, iterator = _of_a_function(Thing()), _with_a_default(Thing()), itertools.repeat(Thing())
    expected = {
        id(instance.things[0]): "list of 1 .*things.*Holder",
        id(slotted.thing): ".*thing .*Slotted",
        id(closure()): ".*thing.*closure",
        id(default()): "tuple of 1 .*default",
        id(nested["deep"][0][0]): "tuple of 1 .*list of 1 .*dict of 1 .*'deep'",
        id(next(iterator)): NO_REFERRER,
    }
    described = describe_referrers(expected, Slices(), lambda: False)
    assert described.keys() == expected.keys()
    assert [text for target, text in described.items() if not re.match(expected[target], text)] == []


def _local_list() -> str:
    # no assertion here: pytest calls locals() in frames with assertions, and the search skips such frames
    others = [Thing()]
    return _described(id(others[0]))


@pytest.mark.usefixtures("untraced")
def test_a_local_variable_is_named_with_its_place() -> None:
    described = _local_list()
    assert re.match(r"list of 1 .*local variable.*others.*_local_list$", described), described


def _generator(thing: Thing) -> Iterator[None]:
    yield
    print(thing)


@pytest.mark.usefixtures("untraced")
def test_a_variable_of_a_generator_that_waits_is_named() -> None:
    waiting = _generator(Thing())
    next(waiting)
    thing = id(waiting.gi_frame.f_locals["thing"])  # type: ignore[attr-defined]
    assert re.match(r".*\bthing\b.*_generator$", _described(thing))


def test_a_dictionary_from_locals_is_not_changed() -> None:
    def program() -> list[str]:
        first = Thing()
        mine = locals()
        second = Thing()
        _described(id(second))
        assert first is mine["first"]
        return sorted(mine)

    assert program() == ["first"]


def test_nothing_is_kept_alive() -> None:
    thing = Thing()
    box = [thing]
    before = sys.getrefcount(thing)
    _described(id(thing))
    assert sys.getrefcount(thing) == before
    assert box[0] is thing


def test_no_pass_starts_after_the_end() -> None:
    box = [Thing()]
    assert describe_referrers([id(box[0])], Slices(), lambda: True) == {}


class HookedTensor(list[Any]):
    """Refers to a dictionary of hooks, but has no attribute with it, as torch's tensors do."""


class Module:
    def __init__(self) -> None:
        self._forward_hooks: OrderedDict[int, Callable[..., object]] = OrderedDict()


@dataclass
class Transition:
    observation: Thing


class Cache:
    """Has the instances of another class in a list."""

    def __init__(self, thing: Thing) -> None:
        self.layers = [Transition(thing)]


def _with_a_hook(thing: Thing) -> Module:
    module = Module()
    module._forward_hooks[0] = _of_a_function(thing)
    return module


def _with_a_tensor_hook(thing: Thing) -> HookedTensor:
    return HookedTensor([OrderedDict({3: functools.partial(print, thing)})])


def _filled(box: queue.Queue[Thing] | queue.SimpleQueue[Thing], thing: Thing) -> Any:
    box.put(thing)
    return box


def _per_thread(thing: Thing) -> threading.local:
    state = threading.local()
    state.thing = thing
    return state


HOLDERS: dict[str, tuple[Callable[[Thing], object], str]] = {
    "queue": (lambda thing: _filled(queue.Queue(), thing), "deque in attribute queue of a Queue in attribute held of"),
    "simple queue": (
        lambda thing: _filled(queue.SimpleQueue(), thing),
        ".*a SimpleQueue in attribute held",
    ),
    "deque": (lambda thing: deque([thing]), "deque in attribute held of"),
    "set": (lambda thing: ({thing},), "set in tuple in attribute held of"),
    "dataclass": (
        lambda thing: deque([Transition(thing)]),
        "attribute observation of a Transition in deque in attribute held of",
    ),
    "layers": (
        lambda thing: {1: Cache(thing)},
        "attribute observation of a Transition in list in attribute layers of a Cache in dict in attribute held of",
    ),
    "partial": (lambda thing: functools.partial(print, thing), "tuple in a partial in attribute held of"),
    "hook": (
        _with_a_hook,
        r"thing, a closure of .*\.inner in OrderedDict in attribute _forward_hooks of a Module$",
    ),
    "tensor hook": (_with_a_tensor_hook, "tuple in a partial in OrderedDict in the hooks of a HookedTensor$"),
    "local of a thread": (_per_thread, "dict under 'thing' in dict in a threading.local in attribute held of"),
}


class Kept:
    """Has what the test names."""

    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize("kind", HOLDERS)
def test_the_name_goes_on_to_what_has_a_nameless_holder(kind: str) -> None:
    make, expected = HOLDERS[kind]
    thing = Thing()
    kept = Kept(make(thing))
    wanted = id(thing)
    del thing
    described = describe_referrers([wanted], Slices(), lambda: False, sizes=False, tensors=[HookedTensor])[wanted]
    assert re.match(expected, described), described
    del kept


def test_the_cache_of_a_function_has_its_name() -> None:
    @functools.cache
    def mask(length: int) -> Thing:
        return Thing()

    @functools.lru_cache(4)
    def boxed(length: int) -> list[Thing]:
        return [Thing()]

    wanted = {id(mask(3)): ("dict", "mask"), id(boxed(3)[0]): ("list", "boxed")}
    described = describe_referrers(wanted, Slices(), lambda: False, sizes=False)
    place = f"functools.lru_cache of {__name__}.test_the_cache_of_a_function_has_its_name.<locals>"
    assert described == {each: f"{kind} in {place}.{name}" for each, (kind, name) in wanted.items()}


def test_the_holder_of_a_node_names_what_its_graph_keeps() -> None:
    class Node:
        """Refers to tensors in C++ only."""

    kept, unseen = Kept([Node()]), itertools.repeat(Thing())
    described = describe_referrers([id(next(unseen))], Slices(), lambda: False, sizes=False, nodes=[Node])
    graph = "perhaps the autograd graph of list in attribute held of a Kept"
    assert described == {id(next(unseen)): graph, GRAPH: graph}
    del kept


def _fails(thing: Thing) -> None:
    raise ValueError(id(thing))


def _failed() -> ValueError:
    try:
        _fails(Thing())
    except ValueError as error:
        return error
    raise AssertionError


@pytest.mark.usefixtures("untraced")
def test_a_local_variable_that_an_exception_keeps_has_the_holder_of_the_exception() -> None:
    kept = Kept([_failed()])
    described = _described(kept.held[0].args[0])  # type: ignore[index]
    place = rf"{re.escape(__file__)}:\d+ in _fails"
    assert re.fullmatch(
        rf"local variable thing at {place}, kept by a ValueError in list of 1 in attribute held of a Kept", described
    ), described


@pytest.mark.usefixtures("untraced")
def test_the_variables_of_a_kept_frame_stay_with_a_debugger_and_are_not_kept_otherwise() -> None:
    error, other = _failed(), _failed()
    frames = [each.__traceback__.tb_next.tb_frame for each in (error, other)]  # type: ignore[union-attr]
    seen = frames[0].f_locals
    describe_referrers([each.args[0] for each in (error, other)], Slices(), lambda: False)
    assert "thing" in seen
    if sys.version_info < (3, 13):
        assert [each for each in gc.get_referents(frames[1]) if type(each) is dict and "thing" in each] == []


def _freed_after_a_search_among_errors() -> bool:
    thing, errors = Thing(), [_failed(), _failed()]
    freed = weakref.ref(thing)
    describe_referrers([each.args[0] for each in errors], Slices(), lambda: False)
    del thing
    return freed() is None


@pytest.mark.usefixtures("untraced")
def test_a_running_function_that_has_called_kept_frames_keeps_no_variable() -> None:
    assert _freed_after_a_search_among_errors()


def test_what_only_a_cycle_keeps_is_garbage_while_collections_are_off() -> None:
    garbage, shared = Kept(Thing()), Kept(Thing())
    wanted = [id(garbage.held), id(shared.held)]
    garbage.me, shared.me = garbage, shared  # type: ignore[attr-defined]
    gc.disable()
    try:
        del garbage
        described = describe_referrers(wanted, Slices(), lambda: False)
    finally:
        gc.enable()
    name = "attribute held of a Kept"
    assert [described[each] for each in wanted] == [f"{name}, garbage: cycles, and gc is off", name]
    del shared


class PerThread(threading.local):
    def __init__(self) -> None:
        if not main:
            raise AssertionError("the search has run code of the class")
        self.thing = Thing()


main: list[bool] = [True]


def test_a_search_in_a_thread_creates_no_local_of_that_thread() -> None:
    kept = PerThread()
    wanted, found = id(kept.thing), dict[int, str]()
    main.clear()
    thread = threading.Thread(target=lambda: found.update(describe_referrers([wanted], Slices(), lambda: False)))
    thread.start()
    thread.join()
    main.append(True)
    assert re.match("dict of 1 under 'thing' in dict of 1 in a PerThread", found[wanted])


class Ran:
    """Counts what runs of the code of classes."""

    count = 0


class CountedClass(type):
    """A metaclass with code of its own."""

    def __getattribute__(cls, name: str) -> Any:
        Ran.count += 1
        return super().__getattribute__(name)

    __hash__ = None  # type: ignore[assignment]


class Lengthless(dict):  # type: ignore[type-arg]
    def __len__(self) -> int:
        Ran.count += 1
        return 0


class OfAClass(metaclass=CountedClass):
    pass


class OverASlot(Slotted):
    @property
    def thing(self) -> None:  # type: ignore[override]
        Ran.count += 1


def _under_a_slot(thing: Thing) -> Slotted:
    holder = OverASlot.__new__(OverASlot)
    vars(Slotted)["thing"].__set__(holder, thing)
    return holder


def _of_a_class(thing: Thing) -> object:
    holder = OfAClass()
    holder.__dict__["kept"] = thing
    return holder


def _of_dictionary(thing: Thing) -> object:
    holder = Holder.__new__(Holder)
    object.__setattr__(holder, "__dict__", Lengthless(kept=thing))
    return holder


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (lambda thing: Lengthless(kept=thing), "a Lengthless under 'kept'"),
        (_of_dictionary, "attribute kept of a Holder"),
        (_of_a_class, "attribute kept of a OfAClass"),
        (_under_a_slot, "a OverASlot"),
    ],
)
def test_no_code_of_the_classes_runs(hold: Callable[[Thing], object], words: str) -> None:
    thing = Thing()
    holder = hold(thing)
    Ran.count = 0
    described = _described(id(thing))
    assert Ran.count == 0
    assert words in described
    del holder


def test_the_search_goes_on_at_an_instance_of_a_class_without_a_module() -> None:
    names: dict[str, Any] = {}
    exec("class Made: pass", names)  # as of a template
    thing, made = Thing(), names.pop("Made")()
    made.kept = thing
    assert _described(id(thing)) == "attribute kept of a Made"
