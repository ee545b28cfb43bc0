from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.cli.top.rows import SORTS, Row, arrange, rows_of
from tests.support.top_documents import GIB, process, unreported


def _rows(*processes: dict[str, object]) -> tuple[Row, ...]:
    return rows_of({"processes": processes})


def _pids(rows: tuple[Row, ...]) -> list[object]:
    return [row.pid for row in rows]


def test_a_process_has_a_row_for_each_device_or_one_without_devices() -> None:
    rows = _rows(process(1, "0", "1"), process(2))
    assert [(row.pid, row.gpu) for row in rows] == [(1, "0"), (1, "1"), (2, None)]
    assert rows[2].used_bytes is None


@pytest.mark.parametrize("sort", [sort for sort in SORTS if sort not in ("gpu", "pid", "workload")])
def test_unknown_sizes_are_last_in_both_orders(sort: str) -> None:
    field = f"{sort.replace('-', '_')}_bytes"
    rows = _rows(*(process(pid, "0", **{field: size}) for pid, size in enumerate((3, None, -1, 9), start=1)))
    assert _pids(arrange(rows, "", sort, reverse=False)) == [4, 1, 3, 2]
    assert _pids(arrange(rows, "", sort, reverse=True)) == [3, 1, 4, 2]


def test_numbers_in_names_are_sorted_as_numbers() -> None:
    by_gpu = _rows(*(process(pid, gpu) for pid, gpu in enumerate(("0:10", "2", "0:9", "10"))))
    assert [row.gpu for row in arrange(by_gpu, "", "gpu", reverse=False)] == ["0:9", "0:10", "2", "10"]
    by_pid = _rows(process(10), process("1@4026532008"), process(9), process("1@4026532007"))
    assert _pids(arrange(by_pid, "", "pid", reverse=False)) == ["1@4026532007", "1@4026532008", 9, 10]
    by_rank = _rows(*(process(pid, workload="W", rank=str(rank)) for pid, rank in ((1, 10), (2, 9))))
    assert _pids(arrange(by_rank, "", "workload", reverse=False)) == [2, 1]


def test_workloads_are_sorted_without_case_and_missing_ones_last() -> None:
    rows = _rows(process(1, workload="beta"), unreported(2, "0", 5), process(3, workload="Alpha"))
    assert _pids(arrange(rows, "", "workload", reverse=False)) == [3, 1, 2]


@given(st.permutations([(pid, gpu) for pid in (1, 2, 3) for gpu in ("0", "1")]), st.sampled_from(SORTS), st.booleans())
def test_the_order_does_not_depend_on_that_of_the_exporter(
    listed: list[tuple[int, str]], sort: str, reverse: bool
) -> None:
    rows = _rows(*(process(pid, gpu) for pid, gpu in listed))
    straight = _rows(*(process(pid, gpu) for pid, gpu in sorted(listed)))
    assert arrange(rows, "", sort, reverse=reverse) == arrange(straight, "", sort, reverse=reverse)


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
    rows = _rows(
        process(1, "0"),
        unreported(2, "0:1", GIB) | {"user": "bob"},
        process(3, "1", workload="train-2", k8s_namespace="jobs", k8s_pod="eval-0", command="x"),
    )
    assert _pids(arrange(rows, text, "pid", reverse=False)) == pids
