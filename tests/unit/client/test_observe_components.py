"""Steps, components and the table of sizes, without torch."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from gpumem_exporter.client.hooks.steps import Steps
from gpumem_exporter.client.measure.components import Watch
from gpumem_exporter.client.measure.observed import Observed, WatchedBytes
from gpumem_exporter.client.measure.summary import DeviceSummary, Summary, settings_in_force
from gpumem_exporter.units import human_bytes, human_growth
from tests.support.waiting import patient


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


def test_each_listener_is_called_at_a_step_until_it_stops() -> None:
    steps = Steps()
    heard: list[str] = []
    stop = steps.listen(lambda optimizer: heard.append(f"one {optimizer}"))
    steps.listen(lambda optimizer: heard.append(f"two {optimizer}"))
    steps.mark()
    stop()
    stop()
    steps.mark()
    assert heard == ["one None", "two None", "two None"]


class Kept:
    """A listener that stops when it is deleted. It refers to itself, so only the garbage collector deletes it."""

    def __init__(self, steps: Steps) -> None:
        self.itself = self
        stops: list[Callable[[], None]] = []
        self.reference = weakref.ref(self, lambda _: stops.pop()())
        stops.append(steps.listen(lambda _: None))


def test_the_garbage_collector_may_end_a_listener_while_others_are_called() -> None:
    steps = Steps()
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    gc.disable()
    try:
        for later in range(12):  # the collection starts at another object each time
            references = [Kept(steps).reference for _ in range(30)]
            pairs = [(number, number) for number in range(2500)]  # uses up the free list of tuples
            gc.set_threshold(gc.get_count()[0] + later)
            gc.enable()
            steps.mark()
            gc.disable()
            assert references
            assert pairs
            del pairs
            gc.collect()
    finally:
        gc.set_threshold(*thresholds)
        if enabled:
            gc.enable()


def test_setting_components_waits_for_no_lock() -> None:
    observed = Observed()
    watch = threading.Thread(target=observed.set_components, args=(observed, None), daemon=True)
    ended = []

    def read(_: int) -> None:
        """Run under the lock."""
        watch.start()
        watch.join(patient(60))
        ended.append(not watch.is_alive())

    observed.look(0, read)
    assert ended == [True]


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


def test_human_bytes() -> None:
    assert [human_bytes(value) for value in (None, 0, 1023, 1024, -3 << 10, 1536 << 20, 999 << 30)] == [
        *("-", "0 B", "1023 B", "1.0 KiB", "-3.0 KiB", "1.5 GiB", "999 GiB")
    ]
    assert [human_growth(value) for value in (None, 0, 1024, -1024)] == ["-", "0 B", "+1.0 KiB", "-1.0 KiB"]


def test_unknown_values_are_none_and_a_dash_in_the_table() -> None:
    names = [name for name in DeviceSummary.__dataclass_fields__ if name.endswith(("_bytes", "_ratio"))]
    device = DeviceSummary(0, "GPU-1", "GPU", alloc_retries=None, ooms=None, **dict.fromkeys(names))
    assert (device.slack_bytes, device.fragmented_bytes, device.non_torch_bytes, device.device_used_bytes) == (
        None,
    ) * 4
    rows = str(Summary(devices=(device,))).splitlines()[3:]
    assert len(rows) == 19
    assert {row.split()[-1] for row in rows} == {"-"}
