from __future__ import annotations

import io
from typing import Any

from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.program import replace_missing_characters
from gpumem_exporter.cli.render.node_tables import View, device_lines, node_tables
from gpumem_exporter.cli.render.terminal import open_console, show
from tests.support.builders.live_documents import GIB, device, full_node, job, live, process
from tests.support.truth.golden import assert_golden, printed


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
