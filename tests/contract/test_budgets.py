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
    "gpumem_exporter": 2_114,
    "gpumem_exporter/actions": 4_241,
    "gpumem_exporter/cli": 4_502,
    "gpumem_exporter/core": 2_480,
    "gpumem_exporter/demo": 1_473,
    "gpumem_exporter/edge": 2_467,
    "gpumem_exporter/metrics": 1_490,
    "gpumem_exporter/node": 2_424,
    "gpumem_exporter/page": 2_649,
    "gpumem_exporter/reports": 775,
    "gpumem_exporter/features": 145,
    "gpumem_exporter/features/engines": 1_291,
    "gpumem_exporter/features/events": 2_337,
    "gpumem_exporter/features/fleet": 807,
    "gpumem_exporter/features/history": 1_001,
    "gpumem_exporter/features/oom": 480,
    "gpumem_exporter/features/orphans": 222,
    "gpumem_exporter/features/policy": 1_425,
    "gpumem_exporter/features/profiles": 2_516,
    "gpumem_exporter/features/webhook": 590,
    "client/gpumem_client": 12_999,
    "toolkit/gpumem_toolkit": 8_300,
    "tests": 57_999,
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
