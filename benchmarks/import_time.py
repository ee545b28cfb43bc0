"""Measures the import of the client, compared with the import of `asyncio`.

    python -m benchmarks.import_time [--quick] [--json]

Each import runs in a fresh interpreter without torch, in turns. The bytecode exists already, as after a first start.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.claims import Options, Progress, compared, show
from benchmarks.place import compiling_once
from tests.support.paths import REPOSITORY

IMPORT_RATIO = 1.5
IMPORTS = {
    "import asyncio": "import asyncio",
    "import gpumem_client": "import gpumem_client as client",
    "the same, and start()": "import gpumem_client as client; client.start()",
    "the same, start() and stop()": "import gpumem_client as client; client.start(); client.stop()",
}
TIMED = "import time; started = time.thread_time(); {}; print(1e3 * (time.thread_time() - started))"


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--turns", 40, 10, "fresh interpreters for each import")
    given = options.read()
    progress = Progress("import_time", 1)
    progress.part("imports")
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    with tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as bytecode:
        environment = {**compiling_once(os.environ, Path(bytecode)), "PYTHONPATH": str(REPOSITORY)}
        for turn in progress.turns(given.turns + 1):
            for name, code in IMPORTS.items():
                command = [sys.executable, "-c", TIMED.format(code)]
                took = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
                if turn:  # the first writes the bytecode
                    times[name].append(float(took))
    base, imported, started, stopped = (statistics.median(values) for values in times.values())
    beside = "import asyncio"
    rows = [
        compared("import gpumem_client", imported, "ms", beside, base, IMPORT_RATIO),
        compared("the same, and start()", started, "ms", beside, base),
        compared("the same, start() and stop()", stopped, "ms", beside, base),
    ]
    return show("import_time", rows, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
