from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.top.cells import join_lines
from gpumem_exporter.cli.top.clearing import Note
from gpumem_exporter.cli.top.frame import Display, Frame, draw, print_lines
from gpumem_exporter.cli.top.rows import SORTS
from gpumem_exporter.cli.top.source import Reading
from gpumem_exporter.cli.top.view import View
from tests.support.golden import assert_golden
from tests.support.top_documents import GIB, device, event, process, reading, unreported

_NAMES = st.text(max_size=40) | st.sampled_from(("漢字" * 20, "\x1b[2J\x1b]0;x\x07", "[bold]x[/bold]", "a\nb\rc\t"))


def _full(devices: int = 8, processes: int = 20) -> Reading:
    return reading(
        [device(str(i)) for i in range(devices)],
        [process(1000 + i, str(i % devices), used_bytes=(i + 1) * GIB) for i in range(processes)],
    )


def _kept(of: Reading, events: int = 40) -> Reading:
    """The same with ten minutes of history and some events."""
    devices = of.devices["devices"]
    return replace(
        of,
        read_seconds=1e4,
        past={d["uuid"]: tuple((1e4 - ago, 40 * GIB) for ago in range(598, -1, -2)) for d in devices},
        events=tuple(event(i, "device_lost", 1e9 + i, detail={"error": f"e{i}"}) for i in range(events)),
    )


def _draw(of: Reading, width: int = 80, height: int = 24, **changes: Any) -> list[str]:
    view = changes.pop("view", View())
    display = Display(of, changes.pop("age_seconds", 0.2), **changes)
    return _lines(draw(display, view, width, height))


def _lines(frame: Frame) -> list[str]:
    return [line.plain.rstrip() for line in frame.lines]


def _row(lines: list[str], start: str) -> list[str]:
    (row,) = [line for line in lines if line.split()[:1] == [start] and not line.startswith(start)] or [
        line for line in lines if line.startswith(f"{start} ")
    ]
    return row.split()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (119, 40), (120, 24), (200, 60), (300, 100)])
def test_no_size_is_cut_from_80_by_24(width: int, height: int) -> None:
    lines = _draw(_full(), width, height)
    assert len(lines) == height
    assert max(map(cell_len, lines)) <= width
    for gpu in range(8):
        row = _row([line for line in lines if "80G" in line], str(gpu))
        assert row[-1] == "80.0G"
        assert {"93", "%"} <= set(row)
        assert "20.0G" in row, "what a clear would free on the device"
    process_row = _row(lines, "1019")
    assert [cell for cell in process_row if cell.endswith("G")][:2] == ["20.0G", "6.0G"]
    assert {"2.0G", "1.0G", "llm"} <= set(process_row)
    assert re.findall(r"\d+(?:\.\d+)?", lines[-2])[:2] == ["10.0", "40.0"], "what a clear of all processes frees"


@given(
    st.integers(1, 260),
    st.integers(1, 80),
    _NAMES,
    st.sampled_from(SORTS),
    st.integers(0, 12),
    st.integers(0, 12),
    st.sampled_from(("processes", "events", "help")),
    st.integers(0, 50),
)
def test_a_frame_fits_any_terminal(
    width: int, height: int, name: str, sort: str, devices: int, processes: int, shows: str, events: int
) -> None:
    listed = [process(10 + i, "0", workload=name, command=name, user=name) for i in range(processes)]
    of = reading([device(str(i), name=name) for i in range(devices)], [*listed, unreported(5, "0", 7)])
    listed_events = tuple(
        event(i, "process_ended", 1e9 + i, workload=name, detail={"reason": name * 5}) for i in range(events)
    )
    of = replace(_kept(of), events=listed_events or None)
    chosen = View(sort=sort, shows_help=shows == "help", shows_events=shows == "events", first_line=3)
    frame = draw(Display(of, 1.0), chosen, width, height)
    assert len(frame.lines) == height
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None).print(join_lines(frame.lines))
    drawn = out.getvalue().removesuffix("\n").split("\n")
    assert len(drawn) == height, "no line wraps"
    assert all(cell_len(line) <= width for line in drawn)
    assert not [c for line in drawn for c in line if not c.isprintable()]


def test_scarce_memory_is_marked_and_a_mig_profile_is_shown_once() -> None:
    def styles(width: int, **changes: Any) -> set[str]:
        frame = draw(Display(reading([device("0", **changes)], []), 0.1), View(), width, 24)
        (row,) = [line for line in frame.lines if line.plain.startswith("0 ")]
        return {str(span.style) for span in row.spans if row.plain[span.start : span.end].strip().endswith(("G", "M"))}

    of = device("0")
    for width in (80, 200):
        for free, style in ((3 * GIB, {"bold red"}), (7 * GIB, {"bold yellow"}), (9 * GIB, set[str]())):
            others = {"torch_allocated": 79 * GIB - free, "driver_reserved": GIB}
            memory, ledger = {**of["memory"], "free_bytes": free}, {**others, "free": free}
            assert styles(width, memory=memory, ledger=ledger) == style, (width, free)
    mig = device("0:1", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", mig_profile="1g.10gb")
    assert "\n".join(_draw(reading([mig], []), 200)).count("1g.10gb") == 1


def test_the_sort_column_is_on_the_screen_at_any_width() -> None:
    for sort in SORTS:
        for width in (72, 80, 100, 120, 200):
            arrow = "▲" if sort in ("workload", "gpu", "pid") else "▼"
            assert arrow in "\n".join(_draw(_full(), width, view=View(sort=sort))), (sort, width)


def test_filtering_does_not_move_the_columns() -> None:
    of = reading([device("0")], [process(1, "0", workload="w" * 30), process(2, "0", workload="short")])
    (before,) = [line for line in _draw(of) if line.lstrip().startswith("pid")]
    (after,) = [line for line in _draw(of, view=View(text="short")) if line.lstrip().startswith("pid")]
    assert before == after


def test_columns_that_few_processes_need_are_shown_only_with_a_value() -> None:
    plain = _draw(_full(), 120)
    assert not any(name in "\n".join(plain) for name in ("NCCL", "unmapped"))
    asleep = process(7, "0", workload="engine", reserved_bytes=0)
    asleep["devices"][0] |= {"unmapped_bytes": 12 * GIB, "nccl_bytes": 0}
    rank = process(8, "0")
    rank["devices"][0] |= {"unmapped_bytes": 0, "nccl_bytes": 256 << 20}
    for width in (80, 120, 200):
        lines = _draw(reading([device("0")], [asleep, rank]), width)
        heading = next(line for line in lines if line.lstrip().startswith("pid"))
        assert "unmapped" in heading
        (engine,) = [line for line in lines if line.split()[:1] == ["7"]]
        end = heading.index("unmapped") + len("unmapped")
        assert engine[:end].endswith(" 12.0G")
        assert ("NCCL" in heading) is any("256M" in line for line in lines) is (width > 80)
        (other,) = [line for line in lines if line.split()[:1] == ["8"]]
        assert other[heading.index("unmapped") : end].strip() == "", "no dash where nothing is unmapped"


def test_the_allocatable_memory_of_a_device_is_beside_its_free_memory() -> None:
    full = reading([device("0"), device("1", allocatable_bytes=None)], [])
    for width in (104, 200):
        lines = _draw(full, width)
        assert re.search(r"free +allocatable +total", lines[1])
        assert [line.split()[-3:] for line in lines[2:4]] == [["16.0G", "17.0G", "80.0G"], ["16.0G", "-", "80.0G"]]
    alone = reading([device("0", ledger=None, allocatable_bytes=None)], [], url="", without_exporter="none")
    assert "allocatable" not in "\n".join(_draw(alone, 200))


def test_the_chosen_row_is_on_the_screen_and_marked() -> None:
    view = View()
    rows = view.rows(_full().rows)
    view = view.press("end", rows, 10)
    frame = draw(Display(_full(), 0.1), view, 80, 24)
    (marked,) = [line for line in frame.lines if any("reverse" in str(span.style) for span in line.spans)]
    assert marked.plain.split()[0] == str(rows[-1].pid)
    assert frame.view.first == len(rows) - frame.page


def test_printed_output_has_every_device_and_row_in_full() -> None:
    of = _full(16, 50)
    long = reading(
        [device("0", name="n" * 80)], [process(7, "0", workload="w" * 200, command="c" * 200, user="u" * 50)]
    )
    text = "\n".join(line.plain for line in print_lines(long, View(), 10_000))
    assert all(name in text for name in ("n" * 80, "w" * 200, "c" * 200, "u" * 50))
    lines = [line.plain for line in print_lines(of, View(), 80)]
    assert len([line for line in lines if line.endswith("80.0G")]) == 16
    assert {line.split()[0] for line in lines} >= {str(1000 + i) for i in range(50)}


def test_at_80_by_24_processes_take_precedence_over_history_and_events() -> None:
    """The last ten minutes and the events are not shown if another part needs their space."""
    assert _draw(_kept(_full())) == _draw(_full())


def test_a_wider_screen_has_the_last_ten_minutes_and_a_readable_bar() -> None:
    for width in (90, 100, 119, 120, 160, 200, 300):
        lines = _draw(_kept(_full()), width)
        row = next(line for line in lines if line.startswith("0 "))
        assert "▄" * 15 in row, width
        assert sum(row.count(part) for part in "█▓▒░·") >= (20 if width < 120 else 12)
        assert row.endswith("80.0G")
    assert "10 min" not in "\n".join(_draw(_full(), 200)), "one point is not a history"


def test_events_are_below_the_processes_if_there_is_space() -> None:
    def events_and_rows(of: Reading, height: int, **changes: Any) -> tuple[int, int]:
        lines = _draw(of, 120, height, **changes)
        return sum("device lost" in line for line in lines), sum(" llm " in line for line in lines)

    assert events_and_rows(_kept(_full(8, 20)), 24) == (0, 10)
    assert events_and_rows(_kept(_full(2, 3)), 24) == (11, 3)
    assert events_and_rows(_kept(_full(8, 20)), 50) == (14, 20)
    assert events_and_rows(_kept(_full(8, 200)), 50) == (8, 27)
    assert events_and_rows(_kept(_full(2, 3), events=2), 24) == (2, 3)


def test_e_shows_all_events_and_scrolls_to_the_last() -> None:
    view = View().press("e", (), 10)
    lines = _draw(_kept(_full()), view=view)
    assert lines[-1].endswith("1-10 of 40")
    assert not any(" llm " in line for line in lines if "device lost" not in line)
    lines = _draw(_kept(_full()), view=view.press("G", (), 10))
    assert lines[-1].endswith("31-40 of 40")
    assert lines[-3].endswith("e0")
    assert _draw(_kept(_full(), events=3), view=view.press("G", (), 10))[-1].endswith("1-3 of 3")


def _all_events() -> tuple[dict[str, Any], ...]:
    """One event of each type, a second apart, and one of the day before."""
    action = {"action": "empty_cache", "requested_by": "loopback", "reason": "requested in top"}
    oom = {
        "requested_bytes": 2 * GIB,
        "device_free_bytes": 3 * GIB,
        "limit_bytes": 40 * GIB,
        "allocator": {"reserved_bytes": 39 * GIB, "fragmented_bytes": GIB},
    }
    done = {**action, "state": "done", "freed_bytes": 3 * GIB, "results": [{"pid": 7}, {"pid": 8}]}
    types = (
        ("oom", oom),
        ("oom", {"requested_bytes": None}),
        ("device_lost", {"error": "GPU is lost"}),
        ("device_lost", {}),
        ("device_returned", {}),
        ("process_started", {}),
        ("process_ended", {"reason": "its reporter stopped"}),
        ("action_asked", {**action, "processes": [[7, "llm", "3"]]}),
        ("action", done),
        ("action", {**done, "action": "reset_peak", "reason": "", "state": "failed"}),
        ("policy_stopped", {"rule": "hoard", "reason": "in vain"}),
    )
    noon = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
    listed = [event(i, type_, noon + i, detail=detail) for i, (type_, detail) in enumerate(types)]
    without_process = {"gpu": None, "uuid": None, "workload": "", "rank": "", "pid": None}
    return (event(99, "process_ended", noon - 86400, detail={"reason": "x"}, **without_process), *listed)


def test_the_output_of_top() -> None:
    busy = [process(1000 + i, str(i % 2), rank=str(i), used_bytes=(i + 1) * GIB) for i in range(3)]
    silent = process(7, "0", state="silent", reporting=False, sample_age_seconds=None)
    lost = device("1", up=False, error="GPU is lost", memory=None, ledger=None, utilization_ratio=None)
    taken = {"taken_unix_seconds": time.mktime((2026, 3, 4, 13, 0, 0, 0, 0, -1))}
    listed = [*busy, silent, unreported(8, "0", 5 * GIB)]
    some = replace(_kept(reading([device("0"), lost], listed, document=taken)), events=_all_events())
    down = {"nvml": {"up": False, "error": "no libnvidia-ml.so.1"}}
    bare = [unreported(7, "0", 3 * GIB) | {"state": None, "reporting": None}]
    alone = reading([device("0", ledger=None)], bare, url="", without_exporter="no exporter answers at X: refused")
    events = View(shows_events=True)
    frames = {
        "80x24": _draw(_kept(_full())),
        "120x30, with events": _draw(some, 120, 30),
        "200x24, by gpu": _draw(some, 200, view=View(sort="gpu")),
        "16 devices": _draw(_full(16)),
        "events": _draw(some, view=events),
        "events, not permitted": _draw(
            replace(_full(), no_events="the exporter refuses to show events: token needed"), view=events
        ),
        "events, none yet": _draw(replace(_full(), events=()), view=events),
        "events, none chosen": _draw(some.of(Target(gpu="7", workload="x")), view=events),
        "events, not known": _draw(_full(), view=events),
        "events, no exporter": _draw(alone, view=events),
        "help": _draw(_full(1), view=View(shows_help=True)),
        "filter": _draw(some, view=View(typing="", text="llm")),
        "no match": _draw(some.of(Target(gpu="99")), view=View(text="unknown")),
        "question": _draw(some, note=Note("pid 7: 3.0 GiB? y/n", 1.0, {"pid": 7})),
        "no process": _draw(reading([device("0")], [])),
        "demo without devices": _draw(reading([], [], document={"source": "demo"})),
        "no driver": _draw(reading([], [], document=down)),
        "NVML alone": _draw(alone),
        "lost": _draw(_full(), lost="no exporter answers at X: refused", age_seconds=12.0),
        "lost, without exporter": _draw(alone, lost="no driver", age_seconds=12.0),
        "too small": _draw(_full(), 50, 5),
        "printed": [line.plain.rstrip() for line in print_lines(some, View(), 10_000)],
        "printed, no match": [line.plain.rstrip() for line in print_lines(some, View(text="unknown"), 10_000)],
    }
    assert_golden("top.txt", "\n".join(f"== {name}\n" + "\n".join(lines) + "\n" for name, lines in frames.items()))
