"""The tutorials of the documentation, executed as written, on an emulated node and in a network namespace.

A block `python title="…"` is written to that file, a block `sh` is run, and each line of a block `text` must be in the
output of the command before it; `…` stands for anything. `test_documented_outputs.py` compares the marked blocks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient

TUTORIALS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'(?<! -->\n)^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
ATTEMPTS = 3
ABORTED_AT_EXIT = "terminate called without an active exception"
OWN_NETWORK = ("unshare", "--net", "--")


def can_have_an_own_network() -> bool:
    tried = [*OWN_NETWORK, "ip", "link", "set", "lo", "up"]
    return bool(shutil.which("ip")) and subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_have_an_own_network(), reason="making network namespaces is not allowed here (unshare)")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_does_what_it_says(page: Path, node: EmulatedNode, tmp_path: Path) -> None:
    if page.stem == "explain-an-oom" and sys.version_info < (3, 11):
        pytest.skip("Python prints the notes of an error since 3.11")
    script = ["ip link set lo up", "exec 2>&1"]
    expected: list[str] = []
    for language, title, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            (tmp_path / title).write_text(body, encoding="utf-8")
        elif language == "sh":
            script.append(body)
            script.append(f"echo '@@ {len(expected)}'")
            expected.append("")
        else:
            expected[-1] = body
    outputs = re.split(r"^@@ \d+\n", run("\n".join(script), node, tmp_path), flags=re.MULTILINE)
    assert len(outputs) == len(expected) + 1, outputs[-1]
    for output, lines in zip(outputs, expected, strict=False):
        for line in lines.splitlines():
            pattern = "".join(".*" if part == "…" else re.escape(part) for part in re.split("(…)", line))
            assert re.search(f"^{pattern}$", output, re.MULTILINE), f"{line!r} is not in:\n{output}"


def run(script: str, node: EmulatedNode, folder: Path) -> str:
    """Run the commands of a tutorial in one shell, which stops at the first that fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_")}
    variables = {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "XDG_RUNTIME_DIR": str(folder),
    }
    # A program that exits right after a backward pass may be aborted on a busy machine: autograd's thread then waits
    # for the GIL in a destructor, and Python before 3.14 ends threads that wait for it during the exit.
    for _ in range(ATTEMPTS):
        ended = subprocess.run(
            [*OWN_NETWORK, "bash", "-e", "-c", script],
            cwd=folder,
            env={**kept, **node.environment(), **variables},
            capture_output=True,
            text=True,
            timeout=patient(100),
            check=False,
        )
        if ABORTED_AT_EXIT not in ended.stdout:
            break
    return ended.stdout
