from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.program import replace_missing_characters
from gpumem_exporter.cli.render.columns import DEVICES, FINDINGS, JOBS, SORTS, device_ranges
from gpumem_exporter.cli.render.layout import Layout, Order, Row
from gpumem_exporter.cli.render.node_tables import View, device_lines, node_tables, rows_of, unfolded
from gpumem_exporter.cli.render.terminal import open_console, show
from tests.support.builders.live_documents import GIB, device, finding, full_node, job, live, process
from tests.support.truth.golden import assert_golden, printed

_NAMES = st.text(max_size=40) | st.sampled_from(("漢字" * 20, "\x1b[2J\x1b]0;x\x07", "[bold]x[/bold]", "a\nb\rc\t"))


def _jobs(*jobs: dict[str, Any]) -> list[Row]:
    return rows_of([Node(live([], list(jobs)))])[2]


def _names(*jobs: dict[str, Any], order: Order) -> list[str]:
    return [row["name"] for row in order.sorted(_jobs(*jobs), JOBS)]


@settings(max_examples=15)
@given(st.integers(1, 260), _NAMES)
@example(1, " ")
def test_a_table_fits_any_width_and_has_no_control_character(width: int, name: str) -> None:
    busy = job(name, process(1, "0", workload=name or None, user=name), owner=name)
    told = finding("oom", "warning", name, f"{name} {name}", job=busy["id"])
    nodes = [Node(live([device("0", busy, name=name), device("1", memory=None)], [busy], [told]), name="node-1")]
    findings, devices, jobs = rows_of(nodes)
    tables = ((JOBS, unfolded(jobs)), (DEVICES, devices), (FINDINGS, findings))
    for columns, rows in tables:
        lines = printed(Layout(columns, rows, width).table(rows), width=width)
        assert len(lines) > len(rows)
        assert all(cell_len(line) <= width and line.isprintable() for line in lines)


@pytest.mark.parametrize("sort", sorted({*SORTS} - {"node", "nccl", "unmapped", "kv-cache", "engine"}))
def test_the_sort_column_is_shown_on_a_narrow_screen(sort: str) -> None:
    rows = rows_of([Node(full_node())])[2]
    order = Order(SORTS[sort])
    layout = Layout(JOBS, rows, 80, order)
    assert order.column in [column.name for column, _ in layout.columns]
    assert sum(cell.plain.rstrip()[-1:] in ("▼", "▲") for cell in layout.heading()) == 1


def test_a_value_that_appears_later_pushes_out_no_column_of_a_live_table() -> None:
    def shown(growth: int | None, kept: list[str]) -> list[str]:
        rows = _jobs(job("j", process(1, "0"), growth_bytes_per_hour=growth))
        return [column.name for column, _ in Layout(JOBS, rows, 79, Order("used"), kept).columns]

    before, growing = shown(None, []), shown(1 << 30, [])
    assert ("allocated" in before, "allocated" in growing) == (True, False)
    assert shown(1 << 30, before) == before
    assert shown(None, growing) == growing, "an empty column stays"


def test_names_are_whole_before_columns_that_few_need_are_added() -> None:
    columns = {column.name: width for column, width in Layout(JOBS, rows_of([Node(full_node())])[2], 120).columns}
    assert columns["owner"] == len("carol, pod serving/chat-0")
    assert "allocated" in columns
    assert "reserved" not in columns


@pytest.mark.parametrize("sort", ["used", "growth_bytes_per_hour"])
def test_unknown_values_are_last_in_both_orders(sort: str) -> None:
    column = sort.removesuffix("_bytes_per_hour")
    field = sort if column != sort else f"{sort}_bytes"
    jobs = [job(f"j{i}", process(i, "0"), **{field: size}) for i, size in enumerate((3, None, 1, 9))]
    assert _names(*jobs, order=Order(column)) == ["j3", "j0", "j2", "j1"]
    assert _names(*jobs, order=Order(column, reverse=True)) == ["j2", "j0", "j3", "j1"]


def test_names_are_sorted_without_case_and_devices_as_numbers() -> None:
    jobs = [job(name, process(i, gpu)) for i, (name, gpu) in enumerate((("beta", "10"), ("Alpha", "0:9"), ("c", "2")))]
    assert _names(*jobs, order=Order("job")) == ["Alpha", "beta", "c"]
    assert _names(*jobs, order=Order("devices")) == ["Alpha", "c", "beta"]


def test_the_processes_of_a_job_are_sorted_by_rank_and_then_by_pid() -> None:
    ranks = [process(pid, "0", rank=rank) for pid, rank in ((1, "10"), (2, "9"), (3, "0"), ("1@4026532008", "0"))]
    job_and_ranks = unfolded(_jobs(job("llm", *ranks)))
    assert [row.get("pid") for row in job_and_ranks] == [None, "1@4026532008", 3, 2, 1]


@pytest.mark.parametrize(
    ("text", "jobs", "devices", "findings"),
    [
        ("", 6, 8, 3),
        ("ALICE finetune", ["moe-finetune"], ["6", "7"], 1),
        ("51145", ["moe-finetune"], ["6", "7"], 1),
        ("serving/chat-0", ["chat-70b"], ["5"], 0),
        ("GPU-4", ["rag-indexer", "tritonserver"], ["4"], 1),
        ("grows", [], [], 1),
        ("alice eval", [], [], 0),
    ],
)
def test_a_filter_hides_jobs_devices_and_findings(text: str, jobs: Any, devices: Any, findings: int) -> None:
    found, on_devices, rows = rows_of([Node(full_node())], text)
    shown, gpus = [row["name"] for row in rows], [row["gpu"] for row in on_devices]
    assert (shown, gpus) == (jobs, devices) if text else (len(shown), len(gpus)) == (jobs, devices)
    assert sum(row["since"] != "" for row in found) == findings


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [
        ([], ""),
        (["3"], "3"),
        (["2", "0", "1", "6"], "0-2,6"),
        (["10", "9"], "9-10"),
        (["0:1", "0:0", "1"], "0:0,0:1,1"),
    ],
)
def test_neighboring_devices_are_one_range(gpus: list[str], shown: str) -> None:
    assert device_ranges(gpus) == shown


def _lines(document: dict[str, Any], width: int = 80, **options: Any) -> list[str]:
    return _of([Node(document)], width=width, **options)


def _of(nodes: list[Node], view: View | None = None, width: int = 80, **options: Any) -> list[str]:
    return printed(*node_tables(nodes, view or View(), width, **options), width=width)


def test_an_ascii_terminal_gets_an_ascii_strip() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    replace_missing_characters(out)
    show(open_console(out), node_tables([Node(full_node())], View(), 80))
    out.seek(0)
    (line,) = [line for line in out.read().splitlines() if line.startswith("5 ")]
    assert line.split()[1].strip("#%.") == "chat-70b"


def test_the_output_of_info_and_of_top_once() -> None:
    unknown: dict[str, Any] = dict.fromkeys(
        ("memory", "ledger", "utilization_ratio", "idle_cache_bytes", "allocatable_bytes")
    )
    lost = device("8", up=False, error="GPU is lost", **unknown)
    node = full_node()
    node["devices"].append(lost)
    busy = job("llm", process(7, "0", used_gib=12, unmapped_bytes=2 * GIB, nccl_bytes=GIB // 4))
    name = "a-workload-whose-name-is-quite-long-for-a-table"
    long = job(name, process(4194304, "0", workload=name, command="python " + "x" * 60, used_gib=40))
    cases = {
        "80 columns": _lines(node, ledger=True),
        "wide": _lines(node, 10_000, ledger=True, wide=True),
        "120 columns, sleeping": _lines(live([device("0", busy)], [busy], source="demo"), 120),
        "80 columns, long names": _lines(live([device("0", long)], [long]), ledger=True),
        "one line for each device": device_lines(node),
        "nothing": _lines(live([], [])),
        "no exporter": _of([]),
        "driver alone": _of([Node(live([device("0", ledger=None, idle_cache_bytes=None)], []), "")]),
        "no match": _of([Node(full_node())], View("unknown")),
        "fleet": _of([Node(full_node(), "http://a", "a"), Node(None, "http://b", "b", "refused")]),
    }
    assert_golden("info.txt", "\n".join(f"== {name}\n" + "\n".join(lines) + "\n" for name, lines in cases.items()))


def test_a_file_gets_plain_full_lines() -> None:
    out = io.StringIO()
    console = open_console(out)
    one = job("w" * 256, process(7, "0", workload="w" * 256, command="c" * 256))
    show(console, node_tables([Node(live([device("0", one)], [one]))], View(), console.width, wide=True))
    text = out.getvalue()
    assert "w" * 256 in text
    assert "c" * 256 in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
