"""What a program states of itself, for the test that compares it with the exporter.

The programs of this folder run from here, without this project on their path, so they import this module by its name.
The environment has `STATEMENTS`, the folder of the statements.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def state(role: str, *, rank: int | None = None, world_size: int | None = None, **more: Any) -> Path:
    """Write the pid, the ranks and the allocator's bytes of this process; the caller then leaves its memory alone.

    `rank` is as the library calls it; `more` has further values for the test.
    """
    torch = sys.modules.get("torch")  # a parent of workers may not have imported it
    uses_cuda = torch is not None and torch.cuda.is_initialized()
    statement = {
        "role": role,
        "pid": os.getpid(),
        "rank": rank,
        "world_size": world_size,
        "devices": {
            f"GPU-{torch.cuda.get_device_properties(device).uuid}": [
                torch.cuda.memory_allocated(device),
                torch.cuda.memory_reserved(device),
            ]
            for device in (range(torch.cuda.device_count()) if uses_cuda else ())
            if torch._C._cuda_hasPrimaryContext(device)
        },
        "reporters": [thread.name for thread in threading.enumerate() if thread.name.startswith("gpumem")],
        **more,
    }
    file = Path(os.environ["STATEMENTS"]) / f"{role}-{os.getpid()}.json"
    text = json.dumps(statement)
    if not file.exists() or file.read_text() != text:
        unfinished = file.with_suffix(".part")
        unfinished.write_text(text)
        unfinished.rename(file)
    return file


def state_and_wait(role: str, **values: Any) -> None:
    """Write a statement, and wait until the test has compared it. Ends the process if the test has ended.

    The statement is kept up to date: a thread of gloo may still free the tensors of the last collective.
    """
    file = state(role, **values)
    while not file.with_suffix(".compared").exists():
        if file.with_name("ended").exists():
            os._exit(1)
        time.sleep(0.02)
        state(role, **values)
