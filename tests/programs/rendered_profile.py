"""Compares the profiles in two files and renders the difference in each format, as the exporter does.

Prints the highest memory that it took, in MiB.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpumem_exporter.app  # noqa: F401 - an exporter has it loaded
from gpumem_exporter.features.profiles.profile_diff import difference
from gpumem_exporter.features.profiles.profile_formats import SUFFIXES, render
from gpumem_exporter.features.profiles.stored_profile import StoredProfile
from tests.support.builders.profile_documents import facts


def highest_mib() -> float:
    """Return the highest resident memory of this program. `ru_maxrss` also has the memory of its parent at the fork."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


before, after = (
    StoredProfile.of(facts(reported_pid=i), Path(file).read_bytes()).at("live") for i, file in enumerate(sys.argv[1:])
)
for form in SUFFIXES:
    render([difference(before, after)], form)
print(highest_mib())
