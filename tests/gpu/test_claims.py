"""Every claim of `tests/claims`, on a real device with its real driver: the very functions that are measured on the
emulated node.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.claims.figures import Claim, NotHereError, require
from tests.claims.place import Place
from tests.claims.table import CLAIMS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """This machine, one exporter on it and the processes that claims share."""
    with Place(tmp_path_factory.mktemp("place")) as place:
        yield place


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if not claim.alone], ids=lambda claim: claim.name)
def test_a_claim_holds(claim: Claim, place: Place) -> None:
    try:
        figures = claim.measure(place)
    except NotHereError as reason:
        pytest.skip(str(reason))
    except BaseException:
        place.rest()
        raise
    require(figures)
