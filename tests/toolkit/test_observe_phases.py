"""Bounds of the peaks of phases, compared with all values of an allocator."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_client import memory_context, phase
from gpumem_client.phases.measured_block import Measured, MemoryUse
from gpumem_client.phases.observed import Observed
from gpumem_client.phases.peaks import DevicePeaks, Span
from gpumem_client.wire.protocol import MAX_PHASES
from gpumem_toolkit import milestones, watch


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
