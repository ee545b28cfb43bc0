from __future__ import annotations

import io
import re
from typing import Any

import pytest

from gpumem_exporter.cli.render.node_tables import clear_summary, node_tables
from gpumem_exporter.cli.render.terminal import open_console, show
from tests.support.golden import assert_golden, printed
from tests.support.top_documents import GIB, device, process

_LOST = device("1", up=False, error="GPU is lost", memory=None, utilization_ratio=None, ledger=None)


def _lines(
    devices: list[dict[str, Any]], processes: list[dict[str, Any]], *, width: int = 80, **document: Any
) -> list[str]:
    nvml = {"up": True, "error": "", "driver_version": "1"}
    of_devices = {"source": "nvml", "nvml": nvml, "devices": devices, **document}
    return printed(*node_tables(of_devices, {"processes": processes}, width=width), width=width)


def _row(lines: list[str], start: str) -> str:
    (row,) = [line for line in lines if line.startswith(start)]
    return row


@pytest.mark.parametrize("width", [80, 100, 149, 150, 400])
def test_every_size_of_a_full_node_is_readable_at_any_width(width: int) -> None:
    long_name = "a-workload-whose-name-is-quite-long-for-a-table"
    named = {"workload": long_name, "command": "python " + "x" * 60, "state": "unreported"}
    one = process(4194304, "0", non_torch_bytes=-(3 << 20), **named)
    lines = _lines([device(str(i)) for i in range(8)], [one], width=width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for size in ("4194304", "10.0 GiB", "6.0 GiB", "9.0 GiB", "2.0 GiB", "1.0 GiB", "-3.0 MiB", "unreported", "0.4 s"):
        assert size in text
    assert "…" not in "".join(line for line in lines if "GiB" in line and long_name[:4] not in line)


def test_the_parts_of_non_torch_are_shown_where_nccl_s_bytes_are_known() -> None:
    known, unknown = process(7, "0"), process(8, "0")
    known["devices"][0]["nccl_bytes"] = 256 << 20
    lines = [line for line in _lines([device("0")], [known, unknown]) if "non-torch is" in line]
    assert lines == ["pid 7 llm on GPU 0: non-torch is NCCL 256 MiB, CUDA context and other 768 MiB"]


def test_an_unknown_category_is_a_dash() -> None:
    ledger = device("0")["ledger"]
    del ledger["non_torch"]
    lines = _lines([device("0", ledger=ledger)], [])
    assert _row(lines, "non_torch").split() == ["non_torch", "-"]
    assert _row(lines, "other_processes").split() == ["other_processes", "0", "B"]


def test_an_ascii_terminal_gets_an_ascii_bar() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    devices = {"nvml": {"up": True}, "devices": [device("0", name="n…"), device("1", name="Ö")]}
    show(open_console(out), node_tables(devices, {}, width=80))
    out.seek(0)
    lines = out.read().splitlines()
    assert re.fullmatch(r"#{10,}\+{5,}%-?\.{4,}", _row(lines, "0 ").split()[-1])
    assert [_row(lines, f"{gpu} ").split()[1] for gpu in (0, 1)] == ["n~", "?"]


def test_text_of_a_process_cannot_control_the_terminal() -> None:
    text = "\n".join(_lines([device("0")], [process(7, workload="\x1b[2Jw\n[b]x[/b]")], width=200))
    assert "?[2Jw?[b]x[/b]" in text
    assert "\x1b" not in text


_SILENT = process(1, "0", state="silent", reporting=False)
_UNABLE = process(1, "0", actions=["reset_peak"])
_EMPTY = process(2, "0", reclaimable_bytes=0, idle_cache_bytes=0)
_UNKNOWN = process(2, "0", reclaimable_bytes=None, idle_cache_bytes=None)
_TWO = process(1, "0", "1")
_HALF_UNKNOWN = {
    **_TWO,
    "devices": [_TWO["devices"][0], {**_TWO["devices"][1], "idle_cache_bytes": None, "reclaimable_bytes": None}],
}
_UNSETTLED = process(2, "0", idle_cache_bytes=None)
_WITHOUT_CACHE = {**_TWO, "devices": [_TWO["devices"][0], {"gpu": "1", "used_bytes": 5}]}


@pytest.mark.parametrize(
    ("processes", "numbers"),
    [
        ([], []),
        ([_SILENT], []),
        ([_UNABLE], []),
        ([_UNKNOWN], []),
        ([process(1, "0"), _EMPTY], ["512 MiB", "2.0 GiB", "1", "2"]),
        ([_TWO], ["1.0 GiB", "4.0 GiB", "1", "1"]),
        ([process(1, "0"), _UNKNOWN], ["512 MiB", "2.0 GiB", "1", "2", "1"]),
        ([_HALF_UNKNOWN], ["512 MiB", "2.0 GiB", "1", "1", "1"]),
        ([_WITHOUT_CACHE], ["512 MiB", "2.0 GiB", "1", "1"]),
        ([process(1, "0", idle_cache_bytes=3 * GIB // 2)], ["1.5 GiB", "2.0 GiB", "512 MiB", "1", "1"]),
        ([process(1, "0", idle_cache_bytes=None)], ["2.0 GiB", "1", "1"]),
        ([process(1, "0", idle_cache_bytes=2 * GIB), _UNSETTLED], ["2.0 GiB", "4.0 GiB", "2", "2"]),
        ([process(1, "0"), _UNSETTLED], ["512 MiB", "4.0 GiB", "1.5 GiB", "2", "2"]),
    ],
)
def test_the_last_line_has_the_sum_that_a_clear_would_free(processes: list[dict[str, Any]], numbers: list[str]) -> None:
    """The idle cache, the sum, and what would be reserved again, as far as that is known, unless it is most of it;
    then the processes that free memory, those that report, and the unknown ones."""
    assert re.findall(r"\d+(?:\.\d+)?(?: [GM]iB)?", clear_summary(processes)) == numbers


def test_the_output_of_info() -> None:
    mig = {**device("2"), "gpu": "2:0", "mig_profile": "1g.10gb"}
    full = [process(7, "0", "1", non_torch_bytes=-(3 << 20)), process(8, "0", rank="1"), process(9)]
    silent = process(1, "0", state="silent", reporting=False, sample_age_seconds=75.0)
    nvml = {"up": False, "error": "no libnvidia-ml.so.1"}
    negative = device("0")
    negative["ledger"] |= {"unattributed": -(2 << 20), "free": 16 * GIB + (2 << 20)}
    devices = [negative, _LOST, mig]
    cases = {
        "80 columns": _lines(devices, [*full, silent]),
        "150 columns": _lines(devices, [*full, silent], width=150),
        "demo": _lines([], full[:1], source="demo"),
        "no driver": _lines([], [process(7, "0", used_bytes=None)], nvml=nvml),
        "nothing": _lines([], [], nvml={"up": False}),
        "not known": _lines([], [_UNKNOWN]),
        "partly known": _lines([], [full[0], _UNKNOWN]),
    }
    assert_golden("info.txt", "\n".join(f"== {name}\n" + "\n".join(lines) + "\n" for name, lines in cases.items()))


def test_a_file_gets_plain_full_lines() -> None:
    out = io.StringIO()
    processes = {"processes": [process(7, "0", workload="w" * 256, command="c" * 256)]}
    console = open_console(out)
    devices = {"source": "nvml", "nvml": {"up": True}, "devices": [device(str(i)) for i in range(16)]}
    show(console, node_tables(devices, processes, width=console.width))
    text = out.getvalue()
    assert "w" * 256 in text
    assert "c" * 256 in text
    assert "…" not in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
