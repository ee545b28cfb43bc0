"""Who may act: attacks of other users and of containers on a real exporter of root, over the socket and loopback."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.procfs import pid_namespace, start_time_ticks
from tests.support.builders.builders import MIB, UUIDS, sample
from tests.support.processes.local_users import (
    ACTIONS,
    ADA,
    EVE,
    NEW_PID_NAMESPACE,
    NEW_USER_NAMESPACE,
    LocalUser,
    Reply,
    SharedNode,
    act,
)
from tests.support.processes.other_user import needs_root
from tests.support.servers.exporter_process import token_file

pytestmark = needs_root


@pytest.fixture(scope="module")
def node() -> Iterator[SharedNode]:
    with closing(SharedNode()) as node:
        yield node


@pytest.fixture(scope="module")
def container(node: SharedNode) -> LocalUser:
    """Root of another PID namespace."""
    return node.user(0, NEW_PID_NAMESPACE)


def targets(reply: Reply) -> set[int]:
    assert reply.status == 200, reply
    return {result["pid"] for result in reply.document["results"]}


def test_a_user_reaches_its_own_processes_only(ada: LocalUser, eve: LocalUser, root: LocalUser, url: str) -> None:
    assert targets(act(eve, url, target={"all": True})) == {eve.pid}
    assert targets(act(eve, url, target={"pid": eve.pid})) == {eve.pid}
    for target in ({"pid": ada.pid}, {"pid": root.pid}, {"workload": "ada"}):
        reply = act(eve, url, target=target, dry_run=False)
        assert reply.status == 403
        assert f"uid={EVE}" in reply.detail
    assert targets(act(root, url, target={"all": True})) >= {root.pid, ada.pid, eve.pid}


@pytest.mark.parametrize(
    ("path", "document"),
    [
        (ACTIONS, {"action": "terminate", "target": {"all": True}, "force": True}),
        (ACTIONS, {"action": "set_memory_fraction", "fraction": 0.1, "force": True, "target": {"all": True}}),
        ("/api/v1/nvml/release", {}),
        ("/api/v1/nvml/attach", {}),
        ("/api/v1/alerts", {"version": "4", "alerts": []}),
        ("/-/reload", {}),
    ],
)
def test_what_concerns_all_users_is_refused_to_users_and_to_a_containers_root(
    ada: LocalUser, container: LocalUser, url: str, path: str, document: dict[str, Any]
) -> None:
    for user in (ada, container):
        assert user.request(url, "POST", path, document).status == 403


def test_root_of_a_user_namespace_is_the_user_outside_and_reaches_nothing_there(
    node: SharedNode, ada: LocalUser, root: LocalUser
) -> None:
    contained = LocalUser(ADA, NEW_USER_NAMESPACE | NEW_PID_NAMESPACE)
    try:
        for url in (node.url, node.tcp):
            reply = contained.request(url, "GET", "/api/v1/caller")
            assert (reply.document["uid"], reply.document["rights"]) == (ADA, "own")
            for pid in (root.pid, ada.pid):
                assert act(contained, url, target={"pid": pid}).status == 403
    finally:
        contained.close()


def test_the_caller_learns_what_it_may_do(ada: LocalUser, root: LocalUser, container: LocalUser, url: str) -> None:
    own = ada.request(url, "GET", "/api/v1/caller").document
    assert (own["uid"], own["rights"], own["processes"], own["reason"]) == (ADA, "own", 1, None)
    assert "empty_cache" in own["actions"]
    assert "terminate" not in own["actions"]
    everything = root.request(url, "GET", "/api/v1/caller").document
    assert (everything["uid"], everything["rights"]) == (0, "all")
    assert "terminate" in everything["actions"]
    assert container.request(url, "GET", "/api/v1/caller").document["rights"] == "own"
    proxied = root.request(url, "GET", "/api/v1/caller", X_Forwarded_For="10.0.0.5").document
    assert (proxied["uid"], proxied["rights"]) == (None, "none")


def test_terminate_reaches_no_process_that_a_made_up_report_names(
    node: SharedNode, root: LocalUser, eve: LocalUser, url: str
) -> None:
    victim = subprocess.Popen(["sleep", "600"])
    try:
        ticks = start_time_ticks(f"/proc/{victim.pid}")
        made_up: dict[str, Any] = {
            "start_time_ticks": ticks,
            "pid_namespace": pid_namespace(),
            "session": f"made-up-{url}",
        }
        node.report(eve, pid=victim.pid, workload="left-behind", **made_up)
        reply = act(root, url, "terminate", target={"workload": "left-behind"}, dry_run=False, wait_seconds=1)
        assert reply.status in (200, 404)
        if reply.status == 200:
            assert {result["outcome"] for result in reply.document["results"]} == {"refused"}
        assert victim.poll() is None
        node.report(eve, pid=victim.pid, sequence=2, final=True, **made_up)
    finally:
        victim.kill()
        victim.wait()


def test_the_audit_log_and_the_events_show_a_user_its_own_actions(
    ada: LocalUser, eve: LocalUser, root: LocalUser, url: str
) -> None:
    mine = act(ada, url, "reset_peak", target={"pid": ada.pid}, dry_run=False).document
    others = act(root, url, "reset_peak", target={"pid": ada.pid}, dry_run=False).document
    shown = {action["id"] for action in ada.request(url, "GET", ACTIONS).document["actions"]}
    assert mine["id"] in shown
    assert others["id"] not in shown
    assert eve.request(url, "GET", f"{ACTIONS}/{mine['id']}").status == 404
    assert eve.request(url, "DELETE", f"{ACTIONS}/{mine['id']}").status == 404
    assert {mine["id"], others["id"]} <= {a["id"] for a in root.request(url, "GET", ACTIONS).document["actions"]}
    for action in (mine, others):
        assert root.request(url, "DELETE", f"{ACTIONS}/{action['id']}").document["state"] == "cancelled"
    seen = eve.request(url, "GET", "/api/v1/events?type=action").document["events"]
    assert {event["detail"]["requested_by"].partition(":pid=")[0] for event in seen} <= {
        f"unix:uid={EVE}",
        f"loopback:uid={EVE}",
    }


def test_an_idempotency_key_cannot_be_taken_from_another_caller(ada: LocalUser, eve: LocalUser, url: str) -> None:
    assert act(eve, url, "reset_peak", target={"pid": eve.pid}, key=f"job-{url}").status == 200
    assert targets(act(ada, url, target={"pid": ada.pid}, key=f"job-{url}")) == {ada.pid}


def test_a_flood_of_dry_runs_ends_at_the_limit_and_displaces_no_action() -> None:
    with closing(SharedNode("--action.caller-limit", "20")) as node:
        ada, eve = node.user(ADA), node.user(EVE)
        kept = act(ada, node.url, target={"all": True}, dry_run=False).document["id"]
        statuses = [act(eve, node.tcp, target={"all": True}).status for _ in range(25)]
        assert statuses == [200] * 20 + [429] * 5
        assert act(eve, node.url, target={"all": True}).status == 429
        assert ada.request(node.url, "GET", f"{ACTIONS}/{kept}").status == 200
        assert act(ada, node.url, target={"all": True}).status == 200


def test_with_a_token_file_every_user_needs_the_token(tmp_path: Path) -> None:
    with closing(SharedNode("--action.token-file", token_file(tmp_path, "a-long-token"))) as node:
        users = (node.user(0), node.user(ADA), node.user(0, NEW_PID_NAMESPACE))
        for url in (node.url, node.tcp):
            for user in users:
                assert act(user, url, target={"all": True}).status == 401
                assert user.request(url, "GET", "/api/v1/caller").document["rights"] == "none"
            admitted = act(users[1], url, target={"all": True}, dry_run=True)
            assert admitted.status == 401
            sent = {"action": "empty_cache", "target": {"all": True}, "dry_run": True}
            reply = users[0].request(url, "POST", ACTIONS, sent, Authorization="Bearer a-long-token")
            assert len(targets(reply)) == 3
            assert reply.document["requested_by"].startswith("token:token@")


def test_hidden_identities_are_shown_to_their_owner_and_to_root() -> None:
    with closing(SharedNode("--web.hide-identities")) as node:
        root, ada, eve = node.user(0), node.user(ADA), node.user(EVE)
        node.report(ada, sequence=2, command="python secret.py")
        shown = {}
        for user in (root, ada, eve):
            listed = user.request(node.tcp, "GET", "/api/v1/processes").document["processes"]
            (shown[user.uid],) = [one["command"] for one in listed if one["pid"] == ada.pid]
            live = user.request(node.tcp, "GET", "/api/v1/live").document
            assert ("secret.py" in str(live)) == (user is not eve)
            whole = user.request(node.tcp, "GET", "/api/v1/live?details=all").document
            ones = [one for job in whole["jobs"] for one in job["processes"] if one["pid"] == ada.pid]
            assert [one["command"] for one in ones] == [shown[user.uid]], "`info` shows what the page shows"
            assert whole["node"]["identities_hidden"] == (user is not root)
        assert shown[EVE] is None
        assert shown[0] is not None
        assert shown[ADA] == shown[0]
        assert "secret.py" not in node.exporter.request("GET", "/metrics").body.decode()
        for user, hidden in ((eve, True), (ada, True), (root, False)):
            events = user.request(node.url, "GET", "/api/v1/events?type=process_started").document["events"]
            commands = {event["detail"]["command"] for event in events}
            assert (commands == {None}) == hidden


def test_a_user_does_not_end_the_start_of_another_users_engine(node: SharedNode, root: LocalUser, url: str) -> None:
    uuid = UUIDS[5]  # no other test uses this device
    own, engine = node.user(1003), node.user(1004)  # the processes of the other users are counted
    clear: dict[str, Any] = {"target": {"pid": own.pid}, "dry_run": False, "deadline_seconds": 60}
    on_device: dict[str, Any] = {"devices": (sample(uuid, 0, MIB),)}
    assert node.report(own, sequence=2, **on_device).status == 200
    assert node.report(engine, sequence=2, engine_starting=True, **on_device).status == 200
    waiting = act(own, url, **clear)
    assert waiting.status == 202
    assert [wait["pid"] for wait in waiting.document["waits_for"]] == [engine.pid]
    refused = act(own, url, **clear, force=True)
    assert refused.status == 403
    assert str(engine.pid) in refused.detail
    forced = act(root, url, **clear, force=True)
    assert (forced.status, forced.document["waits_for"]) == (202, [])
    assert node.report(engine, sequence=3, engine_starting=False, **on_device).status == 200
    assert act(own, url, **clear).document["waits_for"] == []
