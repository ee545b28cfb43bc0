from __future__ import annotations

import gc
import itertools
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from gpumem_client.objects.referrers import NO_REFERRER, describe_referrers
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


def test_every_one_of_many_objects_is_named_after_its_own_holder() -> None:
    holders = [Holder(Thing()) if number % 2 else Slotted(Thing()) for number in range(2000)]
    targets = [id(each.things[0] if isinstance(each, Holder) else each.thing) for each in holders]
    described = describe_referrers(targets, Slices(), lambda: False, sizes=False)
    expected = ["attribute thing of a Slotted", "list in attribute things of a Holder"] * 1000
    assert [described[each] for each in targets] == expected


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
