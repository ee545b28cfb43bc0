from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import REPOSITORY
from tests.support.waiting import patient


def _main(*arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run the console script in a process that cannot import the module `without`."""
    block = f"sys.modules[{without!r}] = None; " if without else ""
    script = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {block}"
        "from gpumem_exporter.main import main; code = main(); "
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.__stderr__); sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=patient(60), check=False
    )


def test_plan_without_the_toolkit_says_what_to_install() -> None:
    ended = _main("plan", "--help", without="gpumem_toolkit")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "gpumem-toolkit" in ended.stderr.splitlines()[0]
    assert _main("--help", without="gpumem_toolkit").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (("--version",), {"rich", "pydantic"}),
        (("run", "--help"), {"rich", "click", "pydantic", "argparse"}),
        (("serve", "--log.level", "nonsense"), {"rich", "textual", "fastapi", "uvicorn", "pynvml"}),
        (("clear",), {"rich", "textual", "fastapi", "uvicorn", "pynvml", "prometheus_client"}),
        (
            ("top", "--once", "--json", "--url", "unix:///nonexistent.sock"),
            {"rich", "textual", "fastapi", "uvicorn", "pynvml"},
        ),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: tuple[str, ...], unwanted: set[str]) -> None:
    ended = _main(*arguments)
    imported = set(ended.stderr.splitlines()[-1].split())
    assert "gpumem_exporter" in imported
    assert imported & unwanted == set()
