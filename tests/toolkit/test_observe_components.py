"""Steps, components and the table of sizes, without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from gpumem_client.hooks.steps import Steps
from gpumem_client.phases.observed import Observed, WatchedBytes
from gpumem_client.summary import DeviceSummary, Summary, settings_in_force
from gpumem_toolkit.measure.components import Watch


def watched_bytes(index: int, allocated: int | None, seconds: float = 60.0, **components: int) -> WatchedBytes:
    return WatchedBytes({index: (components, allocated)}, time.monotonic() + seconds)


def test_components_of_several_watches_add_up_and_other_is_the_rest() -> None:
    observed = Observed()
    one, two = object(), object()
    assert observed.components(0) == {}
    observed.set_components(one, watched_bytes(0, 100, parameters=10, gradients=5))
    assert observed.components(0) == {"parameters": 10, "gradients": 5, "other": 85}
    observed.set_components(two, watched_bytes(0, 120, seconds=61, parameters=30))
    assert observed.components(0) == {"parameters": 40, "gradients": 5, "other": 75}
    assert observed.components(1) == {}
    observed.set_components(one, None)
    observed.set_components(one, None)
    assert observed.components(0) == {"parameters": 30, "other": 90}


def test_other_is_left_out_if_it_is_unknown_or_negative() -> None:
    observed = Observed()
    for allocated in (None, 9):
        observed.set_components(observed, watched_bytes(0, allocated, parameters=10))
        assert observed.components(0) == {"parameters": 10}


def test_a_count_expires() -> None:
    observed = Observed()
    observed.set_components(observed, watched_bytes(0, 100, seconds=-1, parameters=10))
    assert observed.components(0) == {}


def test_a_listener_may_end_others_while_they_are_called() -> None:
    steps = Steps()
    stops: list[Callable[[], None]] = []
    heard: list[object] = []

    def end_others(_: object) -> None:
        for stop in stops:
            stop()

    steps.listen(end_others)
    stops += [steps.listen(heard.append) for _ in range(3)]
    steps.mark()
    assert heard == []


def test_watching_something_else_than_a_module_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"list.*torch\.nn\.Module.*None"):
        Watch([], None)


OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("in_force", "environ", "expected"),
    [
        ("", {}, ("", "", "")),
        ("a:1", {OLD: "a:1"}, ("a:1", OLD, "")),
        ("a:1", {NEW: "a:1"}, ("a:1", NEW, "")),
        ("a:1", {OLD: "a:1", NEW: "b:2"}, ("a:1", OLD, NEW)),
        ("", {OLD: "", NEW: "b:2"}, ("", "", NEW)),
        ("c:3", {OLD: "a:1"}, ("c:3", "the program", "")),
        ("c:3", {}, ("c:3", "the program", "")),
        ("", {NEW: "b:2"}, ("", "the program", "")),
        (None, {}, ("", "", "")),
        (None, {OLD: "a:1"}, ("a:1", OLD, "")),
        (None, {NEW: "b:2"}, ("", "", NEW)),
        (None, {OLD: "a:1", NEW: "b:2"}, ("a:1", OLD, NEW)),
    ],
)
def test_the_source_of_the_allocator_settings_and_the_ignored_variable_are_named(
    in_force: str | None, environ: dict[str, str], expected: tuple[str, str, str]
) -> None:
    assert settings_in_force(in_force, environ) == expected


def _summary(**known: Any) -> DeviceSummary:
    return DeviceSummary("GPU-1", name="GPU", **known)


def test_unknown_values_are_none_and_a_dash_in_the_table() -> None:
    device = _summary()
    assert (device.slack_bytes, device.fragmented_bytes, device.non_torch_bytes, device.device_used_bytes) == (
        None,
    ) * 4
    rows = str(Summary(devices=(device,))).splitlines()[3:]
    assert len(rows) == 19
    assert {row.split()[-1] for row in rows} == {"-"}


def test_a_cache_of_which_nothing_is_known_is_not_called_fragmented() -> None:
    text = str(Summary(devices=(_summary(reserved_bytes=5 << 30, allocated_bytes=3 << 30),)))
    (row,) = [line.split() for line in text.splitlines() if "cache, may be released" in line]
    assert row[-2:] == ["2.0", "GiB"]
    assert "fragmented" not in text
