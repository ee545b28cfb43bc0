"""Reads profiles from files and renders them as the exporter does; prints the memory and the CPU time that it takes.

Arguments: a format, and one file for a profile or two for a difference.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import gpumem_exporter.app  # noqa: F401 - an exporter has it loaded
from gpumem_exporter.features.profiles import (
    profile_formats,
    profile_page,  # noqa: F401
)
from gpumem_exporter.features.profiles.profile_diff import difference
from gpumem_exporter.features.profiles.profile_store import stored_profile
from tests.support.profile_documents import facts


def highest_mib() -> float:
    """Return the highest resident memory of this program. `ru_maxrss` also has the memory of its parent at the fork."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


form, *files = sys.argv[1:]
loaded_mib = highest_mib()
started = time.process_time()
bodies = [Path(file).read_bytes() for file in files]
if len(bodies) == 2:
    before, after = (stored_profile(facts(reported_pid=i), body).at("live") for i, body in enumerate(bodies))
    length = len(profile_formats.render(difference(before, after), form)[0])  # type: ignore[arg-type]
else:
    length = len(profile_formats.render(stored_profile(facts(), bodies[0]), form)[0])  # type: ignore[arg-type]
seconds = time.process_time() - started
print(json.dumps({"mib": highest_mib(), "loaded_mib": loaded_mib, "seconds": seconds, "length": length}))
