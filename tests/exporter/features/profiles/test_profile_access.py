"""Which callers see a profile: as they may act on its process, also after the process has ended."""

from __future__ import annotations

import pytest

from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.container import HERE, UNKNOWN, Place
from gpumem_exporter.features.profiles.profile_routes import ProfileAccess
from gpumem_exporter.features.profiles.profile_store import Profiles
from tests.support.builders.dispatching import Bench
from tests.support.builders.profile_documents import facts

ADA, EVE = 1001, 1002
CONTAINER, ANOTHER = (Place(known=True, container=digit * 64) for digit in "ab")
NAMESPACES = Place(known=True, container="pid4026532007.user4026532008")


def caller(uid: int, place: Place, rights: Rights = Rights.OWN) -> Caller:
    return Caller(CallerKind.UNIX, rights, uid=uid, place=place)


@pytest.mark.parametrize(
    ("viewer", "place", "seen"),
    [
        (caller(ADA, HERE), HERE, True),
        (caller(EVE, HERE), HERE, False),
        (caller(ADA, HERE, Rights.NONE), HERE, False),
        (caller(0, HERE, Rights.ALL), HERE, True),
        (caller(0, HERE), HERE, False),
        (caller(ADA, HERE), CONTAINER, True),
        (caller(EVE, HERE), CONTAINER, False),
        (caller(ADA, CONTAINER), HERE, False),
        (caller(ADA, CONTAINER), CONTAINER, True),
        (caller(0, CONTAINER), CONTAINER, True),
        (caller(EVE, CONTAINER), CONTAINER, False),
        (caller(ADA, ANOTHER), CONTAINER, False),
        (caller(ADA, UNKNOWN), HERE, False),
        # The numbers of namespaces are used again: a later container may have the same ones.
        (caller(ADA, NAMESPACES), NAMESPACES, False),
        (caller(0, NAMESPACES), NAMESPACES, False),
        (caller(ADA, HERE), NAMESPACES, True),
        (caller(ADA, HERE), UNKNOWN, False),
        (caller(0, HERE, Rights.ALL), UNKNOWN, True),
    ],
)
def test_a_profile_of_a_process_that_has_ended(viewer: Caller, place: Place, seen: bool) -> None:
    access = ProfileAccess(Profiles(None, max_bytes=8 << 20), Bench().store)
    # Only a token vouches for a profile whose place is unknown.
    assert access.visible(viewer, facts(owner_uid=None if place is UNKNOWN else ADA, place=place)) is seen


def test_a_container_without_an_id_sees_its_profiles_while_the_process_reports() -> None:
    bench = Bench()
    bench.put(7, owner_uid=ADA, place=NAMESPACES)
    access = ProfileAccess(Profiles(None, max_bytes=8 << 20), bench.store)
    for session, seen in (("first", True), ("earlier", False)):
        shown = facts(owner_uid=ADA, place=NAMESPACES, session=session)
        assert access.visible(caller(ADA, NAMESPACES), shown) is seen
