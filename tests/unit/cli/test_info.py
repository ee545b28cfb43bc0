from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from gpumem_exporter.cli.render.node_tables import clear_summary, node_tables
from gpumem_exporter.cli.render.terminal import open_console, show
from tests.support.golden import assert_golden

_GIB = 1 << 30


def _device(gpu: int, **changes: Any) -> dict[str, Any]:
    ledger = {
        "torch_allocated": 40 * _GIB,
        "torch_reclaimable": 20 * _GIB,
        "torch_fragmented": _GIB,
        "non_torch": 500 << 20,
        "other_processes": 0,
        "driver_reserved": 600 << 20,
        "unattributed": -(2 << 20),
    }
    total = 80 * _GIB
    return {
        "gpu": str(gpu),
        "uuid": f"GPU-{gpu}",
        "name": "NVIDIA H100 80GB HBM3",
        "mig_profile": "",
        "up": True,
        "error": "",
        "memory": {"total_bytes": total, "used_bytes": 1, "free_bytes": 1, "reserved_bytes": 1},
        "utilization_ratio": 0.93,
        "ledger": {**ledger, "free": total - sum(ledger.values())},
        **changes,
    }


def _lost(gpu: int) -> dict[str, Any]:
    return _device(gpu, up=False, error="GPU is lost", memory=None, utilization_ratio=None, ledger=None)


def _process(pid: int, *devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "pid": pid,
        "reporting": True,
        "state": "reporting",
        "workload": "llm",
        "rank": "0",
        "command": "python train.py",
        "sample_age_seconds": 0.42,
        "actions": ["empty_cache"],
        "devices": list(devices),
        **changes,
    }


def _memory(**changes: Any) -> dict[str, Any]:
    return {
        "gpu": "0",
        "uuid": "GPU-0",
        "used_bytes": 62 * _GIB,
        "allocated_bytes": 40 * _GIB,
        "reserved_bytes": 61 * _GIB,
        "reclaimable_bytes": 20 * _GIB,
        "fragmented_bytes": _GIB,
        "non_torch_bytes": -(3 << 20),
        **changes,
    }


def _lines(
    devices: list[dict[str, Any]],
    processes: list[dict[str, Any]],
    *,
    width: int = 80,
    **document: Any,
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width)
    nvml = {"up": True, "error": "", "driver_version": "1"}
    of_devices = {"source": "nvml", "nvml": nvml, "devices": devices, **document}
    for renderable in node_tables(of_devices, {"processes": processes}, width=width):
        console.print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _row(lines: list[str], start: str) -> str:
    (row,) = [line for line in lines if line.startswith(start)]
    return row


@pytest.mark.parametrize("width", [80, 100, 149, 150, 400])
def test_every_size_of_a_full_node_is_readable_at_any_width(width: int) -> None:
    long_name = "a-workload-whose-name-is-quite-long-for-a-table"
    process = _process(4194304, _memory(), workload=long_name, command="python " + "x" * 60, state="unreported")
    lines = _lines([_device(i) for i in range(8)], [process], width=width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for size in (
        "4194304",
        "62.0 GiB",
        "40.0 GiB",
        "61.0 GiB",
        "20.0 GiB",
        "1.0 GiB",
        "-3.0 MiB",
        "unreported",
        "0.4 s",
    ):
        assert size in text
    assert "…" not in "".join(line for line in lines if "GiB" in line and long_name[:4] not in line)


def test_the_ledger_has_every_category_and_the_total_for_each_device() -> None:
    lines = _lines([_device(i) for i in range(8)], [])
    for category in ("torch_allocated", "non_torch", "other_processes", "unattributed", "free", "total"):
        cells = [line.split() for line in lines if line.startswith(f"{category} ")]
        assert sum(len(row) - 1 for row in cells) == 8 * 2
    headings = " ".join(line.removeprefix("category") for line in lines if line.startswith("category"))
    assert headings.split() == [word for i in range(8) for word in ("gpu", str(i))]


def test_an_unknown_category_is_a_dash() -> None:
    ledger = _device(0)["ledger"]
    del ledger["non_torch"]
    lines = _lines([_device(0, ledger=ledger)], [])
    assert _row(lines, "non_torch").split() == ["non_torch", "-"]
    assert _row(lines, "other_processes").split() == ["other_processes", "0", "B"]


def test_an_ascii_terminal_gets_an_ascii_bar() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    devices = {"nvml": {"up": True}, "devices": [_device(0, name="n…"), _device(1, name="Ö")]}
    show(open_console(out), node_tables(devices, {}, width=80))
    out.seek(0)
    lines = out.read().splitlines()
    assert _row(lines, "0 ").split()[-1] == "############++++++......"
    assert [_row(lines, f"{gpu} ").split()[1] for gpu in (0, 1)] == ["n~", "?"]


def test_text_of_a_process_cannot_control_the_terminal() -> None:
    text = "\n".join(_lines([_device(0)], [_process(7, workload="\x1b[2Jw\n[b]x[/b]")], width=200))
    assert "?[2Jw?[b]x[/b]" in text
    assert "\x1b" not in text


_SILENT = _process(1, _memory(), state="silent", reporting=False)
_UNABLE = _process(1, _memory(), actions=["reset_peak"])
_EMPTY = _process(2, _memory(reclaimable_bytes=0))
_UNKNOWN = _process(2, _memory(reclaimable_bytes=None))


@pytest.mark.parametrize(
    ("processes", "numbers"),
    [
        ([], []),
        ([_SILENT], []),
        ([_UNABLE], []),
        ([_UNKNOWN], []),
        ([_process(1, _memory()), _EMPTY], ["20.0 GiB", "1", "2"]),
        ([_process(1, _memory(), _memory(gpu="1"))], ["40.0 GiB", "1", "1"]),
        ([_process(1, _memory()), _UNKNOWN], ["20.0 GiB", "1", "2", "1"]),
        ([_process(1, _memory(), _memory(gpu="1", reclaimable_bytes=None))], ["20.0 GiB", "1", "1", "1"]),
        (
            [_process(1, _memory(), _memory(gpu="1", reclaimable_bytes=None, reserved_bytes=None))],
            ["20.0 GiB", "1", "1"],
        ),
    ],
)
def test_the_last_line_has_the_sum_that_a_clear_would_free(processes: list[dict[str, Any]], numbers: list[str]) -> None:
    """The sum, the processes that free memory, the reporting processes, and the unknown ones."""
    assert re.findall(r"\d+(?:\.\d+)?(?: GiB)?", clear_summary(processes)) == numbers


def test_the_output_of_info() -> None:
    mig = {**_device(2), "gpu": "2:0", "mig_profile": "1g.10gb"}
    full = [_process(7, _memory(), _memory(gpu="1")), _process(8, _memory(), rank="1"), _process(9)]
    silent = _process(1, _memory(), state="silent", reporting=False, sample_age_seconds=75.0)
    nvml = {"up": False, "error": "no libnvidia-ml.so.1"}
    devices = [_device(0), _lost(1), mig]
    cases = {
        "80 columns": _lines(devices, [*full, silent]),
        "150 columns": _lines(devices, [*full, silent], width=150),
        "demo": _lines([], full[:1], source="demo"),
        "no driver": _lines([], [_process(7, _memory(used_bytes=None))], nvml=nvml),
        "nothing": _lines([], [], nvml={"up": False}),
        "not known": _lines([], [_UNKNOWN]),
        "partly known": _lines([], [full[0], _UNKNOWN]),
    }
    assert_golden("info.txt", "\n".join(f"== {name}\n" + "\n".join(lines) + "\n" for name, lines in cases.items()))


def test_a_file_gets_plain_full_lines() -> None:
    out = io.StringIO()
    processes = {"processes": [_process(7, _memory(), workload="w" * 256, command="c" * 256)]}
    console = open_console(out)
    devices = {"source": "nvml", "nvml": {"up": True}, "devices": [_device(i) for i in range(16)]}
    show(console, node_tables(devices, processes, width=console.width))
    text = out.getvalue()
    assert "w" * 256 in text
    assert "c" * 256 in text
    assert "…" not in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
