"""The plan of a running job: its sources, its device and its error."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.reporter.planned_peak import chosen_plan, planned_peak_bytes, with_plan
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.samples import plan_error_ratio
from gpumem_toolkit.planning.devices import Gpu
from gpumem_toolkit.planning.plan import Change, Fit, Plan

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
