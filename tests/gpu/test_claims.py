"""Every claim of `tests/claims` on a real device; integration tests measure the same on emulated nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.claims.place import Place
from tests.claims.table import CLAIMS, check
from tests.claims.values import Claim

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return this machine with one exporter and the shared processes."""
    with Place(tmp_path_factory.mktemp("place")) as place:
        yield place


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_is_true(claim: Claim, place: Place) -> None:
    check(claim, place)
