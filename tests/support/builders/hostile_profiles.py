"""Valid profiles that any local user can send, made to take as much memory and time as possible.

`python -m` compares the profiles in two files and renders the difference in each format, as the exporter does. It
prints the highest memory that it took, in MiB.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpumem_client.profile.profile_types import FORMAT, MAX_LISTS, MAX_ROWS, MAX_VALUES
from gpumem_exporter.features.profiles.profile_document import MAX_TEXT
from tests.support.builders.builders import UUIDS, report

Document = dict[str, Any]


def _document(rows: list[list[Any]], **parts: Any) -> bytes:
    size = sum(row[4] for row in rows)
    document: Document = {
        "id": "a" * 32,
        "cause": "action",
        "format": FORMAT,
        "process": vars(report(100).process),
        "devices": [{"uuid": UUIDS[0], "allocated_bytes": size, "peak_bytes": size}],
        "recorded_seconds": 1.0,
        "rows": rows,
        **parts,
    }
    return gzip.compress(json.dumps(document).encode())


def _rows(count: int, pool: Callable[[int], str], stack: Any = None, owner: Any = None) -> list[list[Any]]:
    """Return rows whose stack and owner are the index that a function returns, or None."""
    return [
        [0, pool(i), stack and stack(i), owner and owner(i), size, 1, size, 1]
        for i in range(count)
        for size in [512 * (i % 7 + 1)]
    ]


def deep_stacks(number: int) -> bytes:
    """Thousands of different stacks, each as deep as is shown."""
    frames = [[f"f{i}", f"/src/{i}.py", i + number] for i in range(256)]
    count = (MAX_VALUES - 10 * MAX_ROWS) // 128
    stacks = [[i % 256, i // 256, *range(126)] for i in range(count)]
    return _document(
        _rows(MAX_ROWS, lambda _: "default", lambda i: i % len(stacks), lambda i: i % 9),
        stacks=stacks,
        frames=frames,
        owners=[["tensors", f"o{i}"] for i in range(9)],
    )


def many_frames(number: int) -> bytes:
    """As many frames as a profile may have, each in a stack of its own."""
    count = (MAX_LISTS - MAX_ROWS) // 2 - 100
    frames = [[f"f{number}{i}", f"{i}.py", i] for i in range(count)]
    return _document(
        _rows(MAX_ROWS, lambda _: "default", lambda i: i % count), stacks=[[i] for i in range(count)], frames=frames
    )


def long_texts(number: int) -> bytes:
    """Names and files of the maximum length, of which every prefix looks like what the readers search for."""
    file = ("/site-packages/torc" * MAX_TEXT)[: MAX_TEXT - 8]
    name = ("1.2." * MAX_TEXT)[: MAX_TEXT - 8]
    count = 1_000
    frames = [[name, f"{file}{number}{i}", i] for i in range(count)]
    owners = [["parameters", f"{name}{number}{i}", "1x1", "f"] for i in range(count)]
    return _document(
        _rows(MAX_ROWS, lambda _: "default", lambda i: i % count, lambda i: i // 7 % count),
        stacks=[[i, (i + 1) % count] for i in range(count)],
        frames=frames,
        owners=owners,
    )


def long_tables(number: int) -> bytes:
    """The largest owners and lines have texts of the maximum length, which JSON must escape."""
    count, wide = 500, "\N{GRINNING FACE}" * 1000
    frames = [["<" * (MAX_TEXT - 8), f"{wide}{number}{i}", i] for i in range(count)]
    owners = [["parameters", f"{'<.' * (MAX_TEXT // 2 - 8)}{number}{i}", "<" * MAX_TEXT, "x"] for i in range(count)]
    return _document(
        _rows(MAX_ROWS, lambda _: "default", lambda i: i % count, lambda i: i % count),
        stacks=[[i, (i + 1) % count] for i in range(count)],
        frames=frames,
        owners=owners,
    )


def long_kinds(number: int) -> bytes:
    """Each owner has a kind of its own, which is as long as it may be."""
    owners = [[f"{'<' * 50}{number}{i}"] for i in range(MAX_ROWS)]
    return _document(_rows(MAX_ROWS, lambda _: "default", owner=lambda i: i), owners=owners)


HOSTILE: Mapping[str, Callable[[int], bytes]] = {
    each.__name__: each for each in (deep_stacks, many_frames, long_texts, long_tables, long_kinds)
}
"""Each returns the body of a profile; another number makes another profile of the same shape."""


def main(*files: str) -> None:
    """Render the difference of two profiles, and print the highest memory; `ru_maxrss` counts the parent, too."""
    import gpumem_exporter.app  # noqa: F401 - an exporter has it loaded
    from gpumem_exporter.features.profiles.profile_diff import difference
    from gpumem_exporter.features.profiles.profile_formats import SUFFIXES, render
    from gpumem_exporter.features.profiles.stored_profile import StoredProfile
    from tests.support.builders.profile_documents import facts

    before, after = (
        StoredProfile.of(facts(reported_pid=i), Path(file).read_bytes()).at("live") for i, file in enumerate(files)
    )
    for form in SUFFIXES:
        render([difference(before, after)], form)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
