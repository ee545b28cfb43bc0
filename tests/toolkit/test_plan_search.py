"""The search for a plan, and the plan of a running job: its sources, its device and its error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_client.reporter.planned_peak import chosen_plan, planned_peak_bytes, with_plan
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.samples import plan_error_ratio
from gpumem_toolkit.planning.devices import Gpu
from gpumem_toolkit.planning.job import Job, TensorSpec
from gpumem_toolkit.planning.plan import Change, Fit, Plan, Target, accumulate
from gpumem_toolkit.planning.search import Sizing
from gpumem_toolkit.planning.trace import Mark, Trace, replay

MIB = 1 << 20
JOB = Job(object, (TensorSpec("float32", ((1, True),)),))


def steps(batch: int, count: int = 2, workspace: int = 0) -> Trace:
    """100 MiB of parameters; in each step 3 MiB of activations per sample, 40 MiB of temporaries and a workspace."""
    trace = Trace()
    trace.allocate(100 * MIB, "parameters")
    for _ in range(count):
        activations = [trace.allocate(batch * MIB, "activations") for _ in range(3)]
        trace.free(trace.allocate(40 * MIB + workspace, "temporaries"))
        for number in activations:
            trace.free(number)
    return trace


class Made(Sizing):
    """A sizing with traces from `steps`, which counts them.

    Args:
        jumps: odd batch sizes have one allocation more.
        workspace: the bytes of temporary memory, by batch size.
    """

    def __init__(self, *, jumps: bool = False, workspace: Callable[[int], int] = lambda _: 0) -> None:
        super().__init__(JOB, make=self._steps)
        self.made = 0
        self._jumps = jumps
        self._workspace = workspace

    def _steps(self, batch: int) -> Trace:
        self.made += 1
        trace = steps(batch, workspace=self._workspace(batch))
        if self._jumps and batch % 2:
            trace.free(trace.allocate(512, "temporaries"))
        return trace


def test_the_breakdown_is_that_of_the_peak() -> None:
    shares, _ = steps(10).shares()
    assert (shares["parameters"], shares["activations"], shares["temporaries"]) == (100 * MIB, 30 * MIB, 40 * MIB)
    assert steps(1).shares()[1]["activations"] == 3 * MIB


def test_consecutive_frees_have_a_fixed_order() -> None:
    forward, backward = Trace(), Trace()
    for trace, order in ((forward, (1, 2)), (backward, (2, 1))):
        for _ in range(2):
            trace.allocate(512, "activations")
        for number in order:
            trace.free(number)
    assert forward.events != backward.events
    assert forward.ordered() == backward.ordered()


def kept_from_step_to_step(count: int, grows: int = 0) -> tuple[Trace, list[Mark]]:
    """Each step frees the output of the step before, after it has allocated its own."""
    trace, marks, output = Trace(), [], 0
    for step in range(count):
        marks.append(trace.mark())
        batch, previous = trace.allocate(MIB, "activations"), output
        output = trace.allocate(2 * MIB + step * grows, "activations")
        if previous:
            trace.free(previous)
        trace.free(batch)
    return trace, [*marks, trace.mark()]


def test_a_step_is_repeated_if_it_leaves_what_it_found() -> None:
    trace, (_, start, end) = kept_from_step_to_step(2)
    assert trace.repeated(start, end) == kept_from_step_to_step(3)[0]
    trace, (_, start, end) = kept_from_step_to_step(2, grows=MIB)
    assert trace.repeated(start, end) is None


@pytest.mark.parametrize("jumps", [False, True])
@given(free=st.integers(1, 5000))
def test_the_largest_batch_fits_and_one_more_sample_does_not(jumps: bool, free: int) -> None:
    sizing = Made(jumps=jumps)
    largest = sizing.largest(free * MIB)
    assert largest == 0 or not replay(steps(largest), free * MIB).out_of_memory
    assert replay(steps(largest + 1), free * MIB).out_of_memory
    assert sizing.made <= (26 if jumps else 3)


def test_a_batch_far_below_the_largest_is_traced_and_not_interpolated() -> None:
    def workspace(batch: int) -> int:
        return 300 * MIB if batch == 16 else 0

    sizing = Made(workspace=workspace)
    assert sizing.largest(5000 * MIB) > 1000
    assert sizing.peaks(16).reserved_bytes == Made(workspace=workspace).peaks(16).reserved_bytes > 400 * MIB


@given(free=st.integers(500, 5000), step=st.integers(2, 100))
def test_the_largest_batch_fits_even_if_memory_does_not_grow_along_a_line(free: int, step: int) -> None:
    def workspace(batch: int) -> int:
        return 200 * MIB * (batch // step % 3)

    largest = Made(workspace=workspace).largest(free * MIB)
    assert not Made(workspace=workspace).peaks(largest, free * MIB).out_of_memory


def test_the_largest_batch_is_a_multiple_of_the_requested_number() -> None:
    exact = Made().largest(1000 * MIB)
    assert Made().largest(1000 * MIB, 64) == exact // 64 * 64


def test_sharding_divides_only_parameters_gradients_and_optimizer_state() -> None:
    whole = Made()
    assert whole.sharded(5, 7 * MIB).peaks(10).allocated_bytes == whole.peaks(10).allocated_bytes - 80 * MIB + 7 * MIB
    assert whole.made == 1, "the trace is the same one"


@pytest.mark.parametrize(
    ("largest", "target", "devices", "answer"),
    [
        (64, None, 1, (64, 1)),
        (64, 48, 1, (48, 1)),
        (1509, 4096, 1, (1024, 4)),
        (3, 256, 8, (2, 16)),
        (0, 512, 1, (1, 1)),
    ],
)
def test_accumulation_reaches_the_target(
    largest: int, target: int | None, devices: int, answer: tuple[int, int]
) -> None:
    assert accumulate(largest, Target(target, devices)) == answer


@given(st.integers(1, 500), st.integers(1, 5000), st.integers(1, 16), st.sampled_from([1, 8, 24]))
def test_accumulation_never_falls_short_and_never_overfills(largest: int, target: int, devices: int, unit: int) -> None:
    batch, passes = accumulate(largest * unit, Target(target, devices, multiple_of=unit))
    assert batch % unit == 0
    assert 1 <= batch <= largest * unit
    assert target <= batch * passes * devices < target + (passes + 1) * unit * devices


@pytest.mark.parametrize(
    ("field", "value"), [("margin", 0.0), ("devices", 0), ("multiple_of", 0), ("effective_batch", 0)]
)
def test_an_impossible_target_is_rejected(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=str(value)):
        Target(**{field: value})  # type: ignore[arg-type]


def test_a_batch_that_is_no_multiple_is_rejected_and_the_smallest_multiple_is_planned_where_none_fits() -> None:
    with pytest.raises(ConfigurationError, match="multiple of 8"):
        Target(batch=79, multiple_of=8)
    assert accumulate(0, Target(512, multiple_of=128)) == (128, 1)


# The plan of a running job


PLAN = Plan(
    source="model",
    gpu=Gpu("24GiB", 24 << 30, 1 << 30),
    margin=0.85,
    largest_batch=8,
    batch=8,
    accumulation=1,
    target_effective_batch=None,
    devices=1,
    allocated_peak_bytes=900,
    reserved_peak_bytes=1000,
    breakdown={},
)


def test_the_table_has_a_row_for_each_device_and_names_the_devices_that_a_change_makes_fit() -> None:
    small, large = Gpu("small", 8 << 30, 1 << 30), Gpu("large", 80 << 30, 1 << 30)
    fits = (Fit(large, True, 5 << 30, 64), Fit(small, False, -(3 << 30), 2))
    changes = tuple(
        Change(f"change {n}", 900, 9, "cost", on) for n, on in enumerate((("large", "small"), ("large",), ()))
    )
    plan = replace(PLAN, gpu=large, on=fits, changes=changes, notes=("compiled",))
    rows = [line.split() for line in str(plan).splitlines()]
    assert ["note", "compiled"] in rows
    assert ["large", "80.0", "GiB", "yes", "5.0", "GiB", "64"] in rows
    assert ["small", "8.0", "GiB", "no", "-3.0", "GiB", "2"] in rows
    assert [row[5] for row in rows if row[:1] == ["change"] and row[1].isdigit()] == ["all", "large", "none"]
    document = json.loads(json.dumps(plan.as_dict()))
    assert [(fit["gpu"]["name"], fit["fits"]) for fit in document["on"]] == [("large", True), ("small", False)]
    assert document["gpu"]["free_bytes"] == document["on"][0]["gpu"]["free_bytes"] == 79 << 30


def test_an_argument_overrides_the_environment_and_a_path_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"GPUMEM_PLAN": " plan.json "}
    assert ReporterSettings.resolve(environ={}).plan is None
    assert ReporterSettings.resolve(environ={"GPUMEM_PLAN": " "}).plan is None
    assert ReporterSettings.resolve(environ=environ).plan == tmp_path / "plan.json"
    assert ReporterSettings.resolve(plan="other.json", environ=environ).plan == tmp_path / "other.json"
    assert ReporterSettings.resolve(plan=PLAN, environ=environ).plan is PLAN


def test_a_removed_working_directory_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert chosen_plan("plan.json", {}) == "plan.json"
    with pytest.raises(ConfigurationError, match=r"plan\.json"):
        planned_peak_bytes("plan.json")


FILE = r"/.*/plan\.json"
NO_JSON = rf"{FILE}.*gpumem-exporter plan.*--json"
INVALID_PLANS: dict[str, tuple[Any, str]] = {
    "an empty mapping": ({}, r"reserved_peak_bytes.*gpumem-exporter plan.*--json"),
    "nothing planned": ({"reserved_peak_bytes": 0}, r"reserved_peak_bytes.*\b1\b.*2\^63 - 1.*\b0$"),
    "more than the exporter takes": ({"reserved_peak_bytes": 2**63}, r"2\^63 - 1.*9223372036854775808"),
    "a table": (b"from    the model\n", NO_JSON),
    "deeper than Python goes": (b"[" * 500_000, NO_JSON),
    "a number of many digits": (b'{"reserved_peak_bytes": 1' + b"0" * 9000 + b"}", FILE),
}
"""Invalid plans, and a pattern of the error: the file, the field, the value, or the command that writes a plan."""


@pytest.mark.parametrize("case", INVALID_PLANS)
def test_the_error_of_an_invalid_plan_is_one_line_with_place_and_reason(case: str, tmp_path: Path) -> None:
    plan, pattern = INVALID_PLANS[case]
    if isinstance(plan, bytes):
        (tmp_path / "plan.json").write_bytes(plan)
        plan = tmp_path / "plan.json"
    with pytest.raises(ConfigurationError, match=pattern) as caught:
        planned_peak_bytes(plan)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_neither_a_folder_nor_a_pipe_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigurationError, match=str(path)):
            planned_peak_bytes(path)


def test_the_plan_is_for_the_device_with_the_highest_peak() -> None:
    def planned(*peaks: int | None, plan: int | None = 1000) -> list[int | None]:
        samples = [DeviceSample(f"GPU-{at}", reserved_peak_bytes=peak) for at, peak in enumerate(peaks)]
        return [sample.planned_reserved_peak_bytes for sample in with_plan(samples, plan)]

    assert planned(2, 900, None) == [None, 1000, None]
    assert planned(5, 5) == [1000, None]
    assert planned(None) == [1000]
    assert planned() == []
    assert planned(2, 900, plan=None) == [None, None]


@pytest.mark.parametrize(
    ("step", "peak", "planned", "expected"),
    [
        (2, 800, 1000, 0.25),
        (100, 1250, 1000, -0.2),
        (1, 800, 1000, None),
        (2, 0, 1000, None),
        (2, 800, None, None),
    ],
)
def test_the_error_is_positive_if_the_plan_was_too_large_and_needs_a_peak_of_two_steps(
    step: int | None, peak: int | None, planned: int | None, expected: float | None
) -> None:
    sample = DeviceSample("GPU-0", reserved_peak_bytes=peak, planned_reserved_peak_bytes=planned)
    assert plan_error_ratio(sample, step) == pytest.approx(expected)
