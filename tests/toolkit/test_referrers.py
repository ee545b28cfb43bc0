from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpumem_toolkit.leaks.referrers import NO_REFERRER, describe_referrers


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


kept: list[object] = []


def _described(target: object) -> str:
    targets = [target]
    described = describe_referrers(targets, time.thread_time() + 60)
    return described.get(id(target), "")


def _of_a_function(thing: Thing) -> Callable[[], Thing]:
    def inner() -> Thing:
        return thing

    return inner


def _with_a_default(thing: Thing) -> Callable[..., Thing]:
    def inner(given: Thing = thing) -> Thing:
        return given

    return inner


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str]] = {
    "a module's list": (lambda: kept.append(Thing()), lambda _: kept[-1], "list of 1 .*kept"),
    "an instance's list": (lambda: Holder(Thing()), lambda holder: holder.things[0], "list of 1 .*things.*Holder"),
    "a slot": (lambda: Slotted(Thing()), lambda holder: holder.thing, ".*thing .*Slotted"),
    "a closure": (lambda: _of_a_function(Thing()), lambda f: f(), ".*thing.*closure"),
    "a default": (lambda: _with_a_default(Thing()), lambda f: f(), "tuple of 1 .*default"),
    "nested containers": (
        lambda: {"deep": [(Thing(),)]},
        lambda d: d["deep"][0][0],
        "tuple of 1 .*list of 1 .*dict of 1 .*'deep'",
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_the_holder_of_an_object_is_named(name: str) -> None:
    make, find, expected = HOLDERS[name]
    kept.clear()
    holder = make()
    try:
        # found in another function's frame, because a local variable here would be a referrer
        target = id(find(holder))
        described = _described_by_id(holder, find)
        assert re.match(expected, described[target]), described
    finally:
        kept.clear()


def _described_by_id(holder: object, find: Callable[[object], object]) -> dict[int, str]:
    return describe_referrers([find(holder)], time.thread_time() + 60)


def _local_list() -> str:
    # no assertion here: pytest calls locals() in frames with assertions, and the search skips such frames
    others = [Thing()]
    return next(iter(describe_referrers([others[0]], time.thread_time() + 60).values()))


def test_a_local_variable_is_named_with_its_place() -> None:
    described = _local_list()
    assert re.match(r"list of 1 .*local variable.*others.*_local_list$", described), described


def test_a_dictionary_from_locals_is_not_changed() -> None:
    def program() -> list[str]:
        first = Thing()
        mine = locals()
        second = Thing()
        _described(second)
        assert first is mine["first"]
        return sorted(mine)

    assert program() == ["first"]


def test_nothing_is_kept_alive() -> None:
    thing = Thing()
    box = [thing]
    before = sys.getrefcount(thing)
    _described(thing)
    assert sys.getrefcount(thing) == before
    assert box[0] is thing


def test_an_object_without_python_referrers_is_described_as_such() -> None:
    assert next(iter(describe_referrers([Thing()], time.thread_time() + 60).values())) == NO_REFERRER


def test_no_pass_starts_after_the_end() -> None:
    assert describe_referrers([Thing()], time.thread_time() - 1) == {}
