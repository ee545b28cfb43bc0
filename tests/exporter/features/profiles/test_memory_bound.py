"""The memory that the exporter takes for profiles that a hostile user has made, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.builders.hostile_profiles import HOSTILE
from tests.support.waiting import patient

MOST_MIB = 160
"""The chart's pod may take 256 MiB."""


@pytest.mark.parametrize("shape", HOSTILE)
def test_a_difference_of_hostile_profiles_stays_within_the_memory_of_the_pod(shape: str, tmp_path: Path) -> None:
    files = []
    for number in (1, 2):
        file = tmp_path / str(number)
        file.write_bytes(HOSTILE[shape](number))
        files.append(str(file))
    command = [sys.executable, "-m", "tests.support.builders.hostile_profiles", *files]
    done = subprocess.run(command, check=True, capture_output=True, timeout=patient(120))
    assert float(done.stdout) <= MOST_MIB
