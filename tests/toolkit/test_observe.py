"""Steps, components, the table of sizes, and bounds of the peaks of phases, without torch."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_client import memory_context, phase
from gpumem_client.hooks.steps import Steps
from gpumem_client.phases.measured_block import Measured, MemoryUse
from gpumem_client.phases.observed import Observed, WatchedBytes
from gpumem_client.phases.peaks import DevicePeaks, Span
from gpumem_client.summary import DeviceSummary, Summary, settings_in_force
from gpumem_client.wire.protocol import MAX_PHASES
from gpumem_toolkit import milestones, watch
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


# Phases, compared with all values of an allocator


class Device:
    """PyTorch's statistics of one device, with their single peak, and all values of the allocated bytes."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self.course = [0]
        self.used = True

    def to(self, allocated: int) -> None:
        self.allocated = allocated
        self.peak = max(self.peak, allocated)
        self.course.append(allocated)

    def devices(self) -> list[int]:
        return [0] if self.used else []

    def state(self, index: int) -> dict[str, Any]:
        return {name: {"current": self.allocated, "peak": self.peak} for name in ("allocated_bytes", "reserved_bytes")}

    def reset_peaks(self, index: int) -> None:
        self.peak = self.allocated


def observed_on(device: Device) -> Observed:
    return Observed(lambda: device)  # type: ignore[arg-type,return-value]


def measured(observed: Observed, name: str = "a", **options: Any) -> Measured:
    return Measured(name, kept=True, observed=observed, **options)


STEPS = st.one_of(
    st.tuples(st.just("to"), st.integers(0, 20)),
    st.tuples(st.just("enter"), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 5)),
    st.tuples(st.just("look"), st.just(0)),
    st.tuples(st.just("command"), st.just(0)),
)


@given(st.lists(STEPS, max_size=60))
def test_bounds_of_nested_and_overlapping_phases_contain_the_true_peak_and_are_equal_after_a_reset(
    steps: list[tuple[str, int]],
) -> None:
    device = Device()
    observed = observed_on(device)
    running: list[tuple[Span, int]] = []
    for what, value in [*steps, *[("leave", 0)] * len(steps)]:
        if what == "to":
            device.to(value)
        elif what == "enter":
            span = Span("a", reset_peaks=bool(value))
            running.append((span, len(device.course) - 1))
            observed.enter(span)
        elif what == "leave" and running:
            span, since = running.pop(value % len(running))
            observed.leave(span)
            true_peak = max(device.course[since:])
            bounds = span.bounds[0].peak
            assert bounds.at_most_bytes is not None
            assert bounds.at_least_bytes <= true_peak <= bounds.at_most_bytes
            assert bounds.exact or not span.reset_peaks
        elif what == "look":
            observed.read(0)
        elif what == "command":
            observed.reset_peaks(0)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_resets_by_phases_do_not_change_the_overall_peak(runs: list[tuple[int, bool, bool]]) -> None:
    device = Device()
    observed = observed_on(device)
    for allocated, reset, inside in runs:
        with measured(observed, reset_peaks=reset):
            if inside:
                device.to(allocated)
        device.to(allocated)
    observed.read(0)
    assert observed.lifted(0, "allocated_bytes", device.peak) == max(device.course)
    assert observed.lifted(0, "reserved_bytes", None) is None
    assert observed.peak_resets(0) == 0  # resets by phases do not count


def test_a_reset_by_the_program_removes_the_upper_bound() -> None:
    device = Device()
    observed = observed_on(device)
    device.to(100)
    with measured(observed) as use:
        device.to(80)
        device.to(10)
        device.reset_peaks(0)
        device.to(30)
    assert use.devices[0].peak_bytes == 100  # the value at its start
    assert use.devices[0].peak_at_most_bytes is None
    assert not use.exact
    assert observed.peak_resets(0) == 1


def test_a_phase_keeps_its_largest_peak_until_it_runs_after_a_reset() -> None:
    device = Device()
    observed = observed_on(device)

    def run(peak: int) -> int:
        with measured(observed, "forward"):
            device.to(peak)
            device.to(1)
        return observed.phases(0)["forward"].at_least_bytes

    assert [run(50), run(90), run(60)] == [50, 90, 90]
    device.reset_peaks(0)
    observed.read(0)
    assert observed.phases(0)["forward"].at_least_bytes == 90  # the phase has not run since
    assert [run(20), run(30)] == [20, 30]
    device.reset_peaks(0)
    observed.read(0)
    with measured(observed, "forward"):
        device.to(40)
        device.to(1)
        with measured(observed, "forward"):
            assert observed.phases(0)["forward"].at_least_bytes == 40  # of the run around it
    observed.reset_peaks(0)
    assert run(5) == 5


@pytest.mark.parametrize(
    ("readings", "resets"),
    [
        ([{"active": 50, "segment": 8}, {"active": 60, "segment": 3}], 1),
        ([{"active": 50, "segment": 8}, {"segment": 8}, {}, {"active": 50, "segment": 8}], 0),
    ],
    ids=["others have risen again", "a statistic is missing"],
)
def test_any_falling_peak_is_a_reset(readings: list[dict[str, int]], resets: int) -> None:
    device = DevicePeaks()
    for peaks in readings:
        device.note({name: {"peak": peak} for name, peak in peaks.items()})
    assert device.resets == resets


def test_a_running_phase_is_reported_with_the_samples_so_far() -> None:
    device = Device()
    observed = observed_on(device)
    device.to(100)
    device.to(10)
    with measured(observed, "training"):
        device.to(70)
        observed.read(0)
        device.to(20)
        reported = observed.phases(0)["training"]
    assert (reported.at_least_bytes, reported.at_most_bytes, reported.exact) == (70, 100, False)


def test_64_names_are_reported_and_further_phases_are_measured_only(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    observed = observed_on(device)
    for number in range(MAX_PHASES + 10):
        with measured(observed, f"phase {number}") as use:
            device.to(number + 1)
        assert use.peak_bytes == number + 1
    assert list(observed.phases(0)) == [f"phase {number}" for number in range(MAX_PHASES)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("given", "kept"), [("", "unnamed"), ("x" * 300, "x" * 128), ("caf\udce9", "caf?"), ("é", "é")], ids=repr
)
def test_names_become_valid_label_values(given: str, kept: str) -> None:
    assert observed_on(Device()).name_phase(given) == kept


def test_errors_of_statistics_do_not_reach_the_program() -> None:
    class Broken(Device):
        def state(self, index: int) -> dict[str, Any]:
            raise RuntimeError("no")

    observed = observed_on(Broken())
    with measured(observed) as use:
        pass
    assert (use.devices, use.peak_bytes, observed.current_phase()) == ((), None, None)


def test_a_decorated_function_is_measured_at_each_call_also_if_it_fails() -> None:
    device = Device()
    uses: list[MemoryUse] = []
    observed = observed_on(device)
    phase = measured(observed, ended=uses.append)

    @phase
    def fall(n: int) -> int:
        """Docs."""
        device.to(device.allocated + 1)
        return n if n == 0 else fall(n - 1)

    assert (fall(3), fall.__name__, fall.__doc__) == (0, "fall", "Docs.")
    assert [use.growth_bytes for use in uses] == [1, 2, 3, 4]

    @phase
    def fail() -> None:
        device.to(8)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert uses[-1].peak_bytes == 8
    assert observed.current_phase() is None


def test_a_decorated_generator_is_measured_to_its_last_value_and_accepts_send() -> None:
    device = Device()
    uses: list[MemoryUse] = []

    @measured(observed_on(device), ended=uses.append)
    def values() -> Generator[int, int, None]:
        device.to(7)
        got = yield 1
        device.to(5)
        yield got

    generator: Any = values()
    assert (next(generator), uses) == (1, [])
    assert generator.send(3) == 3
    assert list(generator) == []
    assert [(use.peak_bytes, use.after_bytes) for use in uses] == [(7, 5)]


def test_concurrent_coroutines_are_measured_separately() -> None:
    device = Device()
    uses: list[MemoryUse] = []

    @measured(observed_on(device), ended=uses.append)
    async def work(first: asyncio.Event, then: asyncio.Event, nbytes: int) -> None:
        device.to(device.allocated + nbytes)
        then.set()
        await first.wait()

    async def main() -> None:
        a, b = asyncio.Event(), asyncio.Event()
        one = asyncio.create_task(work(b, asyncio.Event(), 10))  # ends when the second has started
        await asyncio.sleep(0)
        two = asyncio.create_task(work(a, b, 100))
        await one
        a.set()
        await two

    asyncio.run(main())

    async def values() -> Any:
        yield 1

    with pytest.raises(TypeError, match="asynchronous generator"):
        measured(observed_on(device))(values)
    assert [(use.before_bytes, use.growth_bytes) for use in uses] == [(0, 110), (10, 100)]


def test_a_running_phase_can_be_copied_and_pickled() -> None:
    for block in (phase("copied", reset_peaks=True), memory_context("copied")):
        with block:
            copies = [copy.deepcopy({"of a model": block})["of a model"], pickle.loads(pickle.dumps(block))]
        for copied in copies:
            with copied as use:
                pass
            assert (use.name, use.devices) == ("copied", ())


def test_copies_of_watches_and_milestones_are_closed_and_keep_their_records() -> None:
    with watch(None) as watching, milestones() as seen:
        seen.record("loaded")
        for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            assert copied(watching).look() == ()
            assert copied(seen).records == seen.records
