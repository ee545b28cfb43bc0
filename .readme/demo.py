"""Runs `serve --demo` on a port that the operating system chooses."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ADDRESS = re.compile(r"msg=listening addresses=(http://127[.]0[.]0[.]1:\d+)")


@contextlib.contextmanager
def demo() -> Iterator[str]:
    """Start the demo, yield its URL, and stop it.

    Raises:
        RuntimeError: the exporter exited, or did not listen in time; the text has its log.
    """
    with tempfile.NamedTemporaryFile() as log:
        exporter = subprocess.Popen(
            [sys.executable, "-m", "gpumem_exporter", "serve", "--demo", "--web.listen-address", "127.0.0.1:0"],
            cwd=Path(__file__).parents[1],
            stdout=log,
            stderr=log,
        )
        try:
            yield _url(exporter, Path(log.name))
        finally:
            exporter.terminate()
            exporter.wait(30)


def _url(exporter: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + 60
    while exporter.poll() is None and time.monotonic() < end:
        listening = ADDRESS.search(log.read_text())
        if listening:
            return listening[1]
        time.sleep(0.1)
    raise RuntimeError(f"the demo does not listen:\n{log.read_text()}")
