"""The releases of torch that the client acts on are those that the tests install and the documents name."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from gpumem_client.profile.owners import TESTED_TORCH
from tests.support.paths import REPOSITORY

OLDEST, NEWEST = (".".join(map(str, release)) for release in TESTED_TORCH)
VERSIONS = (REPOSITORY / "docs" / "versions.md").read_text()


def test_the_documents_name_the_releases() -> None:
    assert f"name owners with torch {OLDEST} to {NEWEST} only" in VERSIONS
    (row,) = re.findall(r"^\| torch, CUDA build \|.*$", VERSIONS, re.MULTILINE)
    assert f"{NEWEST} in" in row
    assert f"| {OLDEST}.0 |" in row


def test_the_oldest_release_is_the_oldest_that_the_tests_accept() -> None:
    assert f'"torch>={OLDEST}"' in (REPOSITORY / "pyproject.toml").read_text()


@pytest.mark.tools
def test_the_tests_run_with_a_release_in_the_range() -> None:
    """A newer release fails here until TESTED_TORCH has it: profiles would come without owners."""
    installed = tuple(map(int, version("torch").split(".")[:2]))
    assert TESTED_TORCH[0] <= installed <= TESTED_TORCH[1]
