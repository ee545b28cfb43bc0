"""Reads profiles from files and renders them as the exporter does; prints the memory and the CPU time that it takes.

Arguments: a format, and one file for a profile or two for a difference.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import gpumem_exporter.app  # noqa: F401 - an exporter has it loaded
from gpumem_exporter.features.profiles import (
    profile_formats,
    profile_page,  # noqa: F401
)
from gpumem_exporter.features.profiles.profile_diff import at_moment, difference
from gpumem_exporter.features.profiles.profile_store import stored_profile
from tests.support.profile_documents import facts

form, *files = sys.argv[1:]
loaded_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.process_time()
bodies = [Path(file).read_bytes() for file in files]
if len(bodies) == 2:
    before, after = (at_moment(stored_profile(facts(reported_pid=i), body), "live") for i, body in enumerate(bodies))
    length = len(profile_formats.render(difference(before, after), form)[0])  # type: ignore[arg-type]
else:
    length = len(profile_formats.render(stored_profile(facts(), bodies[0]), form)[0])  # type: ignore[arg-type]
seconds = time.process_time() - started
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"mib": mib, "loaded_mib": loaded_kib / 1024, "seconds": seconds, "length": length}))
