"""The size of each room, in lines of Python with blanks.

To exceed a number, change it in the same commit, and say in its message why.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

EXPORTER = REPOSITORY / "gpumem_exporter"
FEATURES = EXPORTER / "features"
BUDGETS = {
    "gpumem_exporter": 1_992,
    "gpumem_exporter/actions": 4_033,
    "gpumem_exporter/cli": 4_502,
    "gpumem_exporter/core": 2_479,
    "gpumem_exporter/demo": 1_206,
    "gpumem_exporter/edge": 2_378,
    "gpumem_exporter/metrics": 1_490,
    "gpumem_exporter/node": 2_424,
    "gpumem_exporter/page": 2_631,
    "gpumem_exporter/reports": 775,
    "gpumem_exporter/features": 145,
    "gpumem_exporter/features/engines": 1_291,
    "gpumem_exporter/features/events": 2_105,
    "gpumem_exporter/features/fleet": 608,
    "gpumem_exporter/features/history": 735,
    "gpumem_exporter/features/oom": 469,
    "gpumem_exporter/features/orphans": 222,
    "gpumem_exporter/features/policy": 1_048,
    "gpumem_exporter/features/profiles": 2_346,
    "gpumem_exporter/features/webhook": 590,
    "client/gpumem_client": 12_912,
    "toolkit/gpumem_toolkit": 8_300,
    "tests": 53_125,
}
"""Rooms with modules beside folders, `gpumem_exporter` and `gpumem_exporter/features`, count the modules only."""


def lines(files: Iterable[Path]) -> int:
    """Return the number of lines of the files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def files_of(room: Path) -> Iterable[Path]:
    """Return the modules of a room."""
    return room.glob("*.py") if room in (EXPORTER, FEATURES) else room.rglob("*.py")


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_is_within_its_budget(room: str) -> None:
    assert lines(files_of(REPOSITORY / room)) <= BUDGETS[room]


def test_every_room_has_a_budget() -> None:
    folders = [path.parent for top in (EXPORTER, FEATURES) for path in top.glob("*/*.py")]
    assert {str(folder.relative_to(REPOSITORY)) for folder in (EXPORTER, *folders)} <= BUDGETS.keys()
    assert all(any(files_of(REPOSITORY / room)) for room in BUDGETS)
