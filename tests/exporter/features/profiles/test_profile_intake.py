"""Profiles of out-of-memory errors that no report names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.features.profiles.profile_document import OUT_OF_MEMORY
from gpumem_exporter.features.profiles.profile_intake import ProfileIntake
from gpumem_exporter.features.profiles.profile_store import Profiles
from tests.support.builders.builders import reporting
from tests.support.builders.profile_documents import body, profile

USERS = range(1000, 1008)
SENT = 100
"""More than may wait for a turn of one owner."""


async def test_all_profiles_of_unknown_errors_are_deleted_although_many_are_late_at_once(tmp_path: Any) -> None:
    clock = [0.0]
    profiles = Profiles(tmp_path, max_bytes=1 << 30)
    errors = Mock(has_error=Mock(return_value=False), knows_error=AsyncMock(return_value=False))
    senders, store = Mock(), Mock()
    node = Mock(errors=errors, senders=senders, store=store, clock=lambda: clock[0], wall_clock=lambda: 1.7e9)
    node.snapshot.return_value, node.settings.action_caller_limit = Mock(gpus={}, node=None), 600
    intake = ProfileIntake(profiles, node)
    for number in range(1, SENT + 1):
        process = reporting(number, owner_uid=USERS[number % len(USERS)], session=f"of-{number}")
        store.find.return_value = process
        senders.identify = AsyncMock(return_value=Mock(owner_uid=process.owner_uid, place=process.key.place))
        await intake.receive(request(process.report.process))
    assert len(profiles.newest_first()) == SENT
    clock[0] = 61.0
    for _ in range(200):
        intake.expire()
        await asyncio.sleep(0.01)
        if not profiles.newest_first():
            break
    assert profiles.newest_first() == []


def request(identity: ProcessIdentity) -> Any:
    """Return a request with the profile of an out-of-memory error."""
    content = body(identity, profile("error-1", OUT_OF_MEMORY, oom_number=1))
    sent = MagicMock(body=AsyncMock(return_value=content))
    sent.scope = {"state": {"exchange": SimpleNamespace(owner="uid:1000", peer=None)}}
    sent.__getitem__.side_effect = sent.scope.__getitem__
    return sent
