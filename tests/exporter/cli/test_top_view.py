from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.cli.render.columns import rows_of
from gpumem_exporter.cli.top.content import SORTS, View
from tests.support.top_documents import GIB, process, unreported


def _pids(*processes: dict[str, Any], text: str = "", sort: str = "pid", reverse: bool = False) -> list[object]:
    rows = View(text, sort, reverse).rows(rows_of({"processes": processes}))
    return [row["pid"] for row in rows]


def test_a_process_has_a_row_for_each_device_or_one_without_devices() -> None:
    rows = rows_of({"processes": [process(1, "0", "1"), process(2)]})
    assert [(row["pid"], row["gpu"]) for row in rows] == [(1, "0"), (1, "1"), (2, None)]
    assert rows[2]["used_bytes"] is None


@pytest.mark.parametrize("sort", [sort for sort in SORTS if sort not in ("gpu", "pid", "workload")])
def test_unknown_sizes_are_last_in_both_orders(sort: str) -> None:
    field = f"{sort.replace('-', '_')}_bytes"
    listed = [process(pid, "0", **{field: size}) for pid, size in enumerate((3, None, -1, 9), start=1)]
    assert _pids(*listed, sort=sort) == [4, 1, 3, 2]
    assert _pids(*listed, sort=sort, reverse=True) == [3, 1, 4, 2]


def test_numbers_in_names_are_sorted_as_numbers() -> None:
    by_gpu = [process(gpu, gpu) for gpu in ("0:10", "2", "0:9", "10")]
    assert _pids(*by_gpu, sort="gpu") == ["0:9", "0:10", "2", "10"]
    by_pid = [process(pid) for pid in (10, "1@4026532008", 9, "1@4026532007")]
    assert _pids(*by_pid) == ["1@4026532007", "1@4026532008", 9, 10]
    by_rank = [process(pid, workload="W", rank=str(rank)) for pid, rank in ((1, 10), (2, 9))]
    assert _pids(*by_rank, sort="workload") == [2, 1]


def test_workloads_are_sorted_without_case_and_missing_ones_last() -> None:
    listed = [process(1, workload="beta"), unreported(2, "0", 5), process(3, workload="Alpha")]
    assert _pids(*listed, sort="workload") == [3, 1, 2]


@given(st.permutations([(pid, gpu) for pid in (1, 2, 3) for gpu in ("0", "1")]), st.sampled_from(SORTS), st.booleans())
def test_the_order_does_not_depend_on_the_order_of_the_exporter(
    listed: list[tuple[int, str]], sort: str, reverse: bool
) -> None:
    view = View("", sort, reverse)
    shuffled = rows_of({"processes": [process(pid, gpu) for pid, gpu in listed]})
    straight = rows_of({"processes": [process(pid, gpu) for pid, gpu in sorted(listed)]})
    assert view.rows(shuffled) == view.rows(straight)


@pytest.mark.parametrize(
    ("text", "pids"),
    [
        ("", [1, 2, 3]),
        ("ALICE train", [1, 3]),
        ("bob eval", []),
        ("trito", [2]),
        ("unreported", [2]),
        ("jobs eval-0", [3]),
    ],
)
def test_rows_are_filtered_by_words(text: str, pids: list[int]) -> None:
    listed = (
        process(1, "0"),
        unreported(2, "0:1", GIB) | {"user": "bob"},
        process(3, "1", workload="train-2", k8s_namespace="jobs", k8s_pod="eval-0", command="x"),
    )
    assert _pids(*listed, text=text) == pids
