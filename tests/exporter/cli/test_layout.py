from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.cli.render.columns import DEVICE_COLUMNS, PROCESS_COLUMNS, rows_of
from gpumem_exporter.cli.render.layout import Layout
from gpumem_exporter.cli.top.content import SORTS, View
from tests.support.top_documents import GIB, device, process, unreported

_NAMES = st.text(max_size=40) | st.sampled_from(("漢字" * 20, "\x1b[2J\x1b]0;x\x07", "[bold]x[/bold]", "a\nb\rc\t"))


def _lines(width: int, *processes: dict[str, Any], keep: str = "") -> list[str]:
    rows = rows_of({"processes": processes or [process(7, "0")]})
    layout = Layout(PROCESS_COLUMNS, rows, width, compact=True, keep=keep)
    return [line.plain.rstrip() for line in layout.lines(rows, keep, "▼")]


@given(st.integers(1, 260), _NAMES, st.booleans())
def test_a_table_fits_any_width_and_has_no_control_character(width: int, name: str, compact: bool) -> None:
    processes = rows_of({"processes": [process(1, "0", workload=name, user=name), unreported(5, "0", 7)]})
    past = {"past": [(float(second), second * GIB) for second in range(80)], "now": 80.0}
    devices = [device("0", name=name, **past), device("1", memory=None, ledger=None)]
    for columns, rows in ((PROCESS_COLUMNS, processes), (DEVICE_COLUMNS, devices)):
        lines = list(Layout(columns, rows, width, compact=compact).lines(rows))
        assert len(lines) == len(rows) + 1
        assert all(line.cell_len <= width and line.plain.isprintable() for line in lines)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("sort", SORTS)
def test_the_sort_column_is_shown_at_any_width(width: int, sort: str) -> None:
    column = View(sort=sort).column
    heading, _ = _lines(width, keep=column)
    assert "▼" in heading
    assert column.split()[0][:4] in heading


def test_columns_that_few_processes_need_are_shown_only_with_a_value() -> None:
    assert not any(name in _lines(200)[0] for name in ("NCCL", "unmapped"))
    asleep, rank = process(7, "0", workload="engine", reserved_bytes=0), process(8, "0")
    asleep["devices"][0] |= {"unmapped_bytes": 12 * GIB, "nccl_bytes": 0}
    rank["devices"][0] |= {"unmapped_bytes": 0, "nccl_bytes": 256 << 20}
    for width in (80, 120, 200):
        heading, engine, other = _lines(width, asleep, rank)
        end = heading.index("unmapped") + len("unmapped")
        assert engine[:end].endswith(" 12.0G")
        assert other[heading.index("unmapped") : end].strip() == "", "no dash where nothing is unmapped"
        assert ("NCCL" in heading) is ("256M" in other)


def test_scarce_memory_is_marked_and_a_mig_profile_is_shown_once() -> None:
    def free_style(**changes: Any) -> str:
        rows = [device("0", **changes)]
        layout = Layout(DEVICE_COLUMNS, rows, 120)
        names = [column.name for column, _ in layout.columns]
        return str(layout.cells(rows[0])[names.index("free")].style)

    memory = device("0")["memory"]
    for free, style in ((3 * GIB, "bold red"), (7 * GIB, "bold yellow"), (9 * GIB, "")):
        ledger = {"torch_allocated": 79 * GIB - free, "driver_reserved": GIB, "free": free}
        assert free_style(memory={**memory, "free_bytes": free}, ledger=ledger) == style
    mig = [device("0:1", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", mig_profile="1g.10gb")]
    assert "\n".join(line.plain for line in Layout(DEVICE_COLUMNS, mig, 200).lines(mig)).count("1g.10gb") == 1


def test_a_wide_terminal_has_the_last_ten_minutes_of_devices_with_two_points() -> None:
    points = tuple((1e4 - ago, 40 * GIB) for ago in range(598, -1, -2))
    for past, shown in ((points, True), (points[:1], False)):
        rows = [device("0", past=past, now=1e4)]
        heading, line = (line.plain for line in Layout(DEVICE_COLUMNS, rows, 120, compact=True).lines(rows))
        assert ("10 min" in heading) is ("▄" * 15 in line) is shown
        assert line.rstrip().endswith("80.0G")
