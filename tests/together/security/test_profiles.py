"""Who sends and who reads memory profiles: users and containers, and a real exporter of root."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_client.profile.profile_types import MAX_ROWS
from gpumem_client.wire.protocol import PROFILES_PATH, OutOfMemory
from gpumem_exporter.actions.kinds import PROFILES_PER_MINUTE
from tests.support.builders.builders import MIB, UUIDS
from tests.support.builders.profile_documents import body, document, profile
from tests.support.processes.local_users import ADA, EVE, NEW_PID_NAMESPACE, LocalUser, Reply, SharedNode
from tests.support.processes.namespaces import needs_namespaces
from tests.support.processes.other_user import needs_root

pytestmark = [needs_root, needs_namespaces]

MOST_BYTES = 220 * MIB
"""The exporter with the objects of one profile of a million values."""


@pytest.fixture
def node() -> Iterator[SharedNode]:
    with contextlib.closing(SharedNode()) as node:
        yield node


@pytest.fixture
def users(node: SharedNode) -> tuple[LocalUser, ...]:
    """Root, Ada and Eve, and root of another PID namespace; each has had an out-of-memory error."""
    errors = tuple(OutOfMemory(UUIDS[0], number) for number in range(1, 50))
    places = ((0, 0), (ADA, 0), (EVE, 0), (0, NEW_PID_NAMESPACE))
    return tuple(node.user(uid, namespaces, ooms=errors, devices=()) for uid, namespaces in places)


def send(sender: LocalUser, url: str, *, of: LocalUser | None = None, number: int = 1, **changes: Any) -> Reply:
    identity = (of or sender).report(**changes).process
    sent = profile(f"{number:016x}", "out_of_memory", oom_number=number)
    return post(sender, url, body(identity, sent))


def post(sender: LocalUser, url: str, content: bytes) -> Reply:
    return sender.request(url, "POST", PROFILES_PATH, content, Content_Encoding="gzip")


def seen(user: LocalUser, url: str) -> list[str]:
    reply = user.request(url, "GET", PROFILES_PATH)
    assert reply.status == 200, reply
    return [each["id"] for each in reply.document["profiles"]]


def test_a_profile_is_seen_by_its_user_and_by_root_and_is_unknown_to_others(
    users: tuple[LocalUser, ...], url: str
) -> None:
    root, ada, eve, container = users
    ids = {}
    for user in users:
        reply = send(user, url)
        assert reply.status == 201, reply
        ids[user] = reply.document["id"]
    assert sorted(seen(root, url)) == sorted(ids.values())
    for user in (ada, eve, container):
        assert seen(user, url) == [ids[user]]
        own = f"{PROFILES_PATH}/{ids[user]}"
        assert user.request(url, "GET", own).status == 200
        for other in {ids[each] for each in users} - {ids[user]}:
            others = f"{PROFILES_PATH}/{other}"
            for path in (others, f"{own}/diff/{other}", f"{others}/diff/{ids[user]}"):
                assert user.request(url, "GET", path).status == 404
        events = user.request(url, "GET", "/api/v1/events?type=oom&limit=1000").document["events"]
        assert {each["detail"]["profile"] for each in events} == {ids[user], None}
        for victim in users:
            if victim is not user:
                taken = user.request(url, "GET", f"/api/v1/processes/{victim.pid}/profile")
                assert taken.status in (403, 404), taken


def test_no_user_sends_a_profile_of_the_process_of_another(users: tuple[LocalUser, ...], url: str) -> None:
    root, ada, eve, container = users
    for sender in (eve, container):
        for victim in (ada, root):
            for changes in ({}, {"session": "eve"}, {"start_time_ticks": victim.start_time_ticks + 1}):
                reply = send(sender, url, of=victim, **changes)
                assert reply.status in (403, 409), reply
    assert seen(root, url) == []
    assert send(root, url, of=ada).status == 201  # a launcher of root
    assert len(seen(ada, url)) == 1


def test_a_flood_of_one_user_is_limited_and_pushes_out_no_profile_of_another(
    users: tuple[LocalUser, ...], url: str
) -> None:
    _, ada, eve, _ = users
    kept = send(ada, url).document["id"]
    number = 1
    while (status := send(eve, url, number=number).status) == 201:
        number += 1
    # A slow machine sends some more within a minute.
    assert (status, PROFILES_PER_MINUTE < number < 4 * PROFILES_PER_MINUTE) == (429, True)
    assert seen(ada, url) == [kept]
    assert send(ada, url, number=2).status == 201
    assert len(seen(ada, url)) == 2


def test_the_largest_documents_cost_bounded_memory(users: tuple[LocalUser, ...], node: SharedNode) -> None:
    _, ada, eve, _ = users
    large = document(eve.report().process, profile("1", "out_of_memory", oom_number=1))
    large["rows"] = [[0, "default", 0, 0, number, 1, number, 1] for number in range(MAX_ROWS)]
    large["devices"][0]["allocated_bytes"] = large["devices"][0]["peak_bytes"] = sum(range(MAX_ROWS))
    assert post(eve, node.url, gzip.compress(json.dumps(large).encode())).status == 201
    assert eve.request(node.url, "GET", f"{PROFILES_PATH}/{seen(eve, node.url)[0]}").status == 200
    # Each row has a stack whose files are long and in torch: searched for each row, they take minutes.
    large["frames"] = [["f", f"{'a' * 1500}{number}/site-packages/torch/nn.py", 1] for number in range(4300)]
    large["stacks"] = [[(row * 128 + each) % 4300 for each in range(128)] for row in range(1900)]
    large["rows"] = [[0, "default", number % 1900, None, number, 1, number, 1] for number in range(7_000)]
    large["devices"][0]["allocated_bytes"] = large["devices"][0]["peak_bytes"] = sum(range(7_000))
    large["oom_number"] = 2
    large["id"] = "2"
    found = post(eve, node.url, gzip.compress(json.dumps(large).encode()))
    assert found.status == 201
    assert eve.request(node.url, "GET", f"{PROFILES_PATH}/{found.document['id']}").status == 200
    assert node.exporter.peak_bytes() < MOST_BYTES
    assert send(ada, node.url).status == 201
