"""A container is a boundary for every uid: attacks from containers on exporters of several users, with real kernels."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from gpumem_client.wire.protocol import MODES, CommandResult
from tests.support.processes.local_users import (
    ADA,
    CONTAINER,
    EVE,
    KINDS,
    NEW_PID_NAMESPACE,
    NEW_USER_NAMESPACE,
    Cgroup,
    LocalUser,
    SharedNode,
    act,
    needs_cgroups,
)
from tests.support.processes.other_user import needs_root
from tests.support.waiting import patient

pytestmark = [needs_root, needs_cgroups]

GPUMEM = 1003
EXPORTERS = {
    "root": (),
    "root without capabilities": ("setpriv", "--bounding-set=-all", "--inh-caps=-all"),
    "another user": ("setpriv", f"--reuid={GPUMEM}", f"--regid={GPUMEM}", "--clear-groups", "--bounding-set=-all"),
}


def node_of(exporter: str, *flags: str) -> SharedNode:
    """Return a node with one of `EXPORTERS`."""
    return SharedNode(*flags, launcher=EXPORTERS[exporter], owner=GPUMEM if exporter == "another user" else 0)


def shown(node: SharedNode) -> dict[int | str, str | None]:
    """Return the workload of each reporting process, by name."""
    processes = node.exporter.get("/api/v1/processes")["processes"]
    return {each["pid"]: each["workload"] for each in processes if each["reporting"]}


@pytest.fixture
def node() -> Iterator[SharedNode]:
    with contextlib.closing(SharedNode()) as node:
        yield node


def reached(user: LocalUser, url: str) -> set[int]:
    """Return the processes that an action of a user on all processes has."""
    reply = act(user, url, target={"all": True})
    assert reply.status in (200, 403), reply
    return {result["pid"] for result in reply.document["results"]} if reply.status == 200 else set()


@pytest.mark.parametrize(
    ("exporter", "kind", "way"),
    [
        *(("root", kind, "unix") for kind in KINDS),
        *((exporter, "docker", "unix") for exporter in EXPORTERS if exporter != "root"),
        ("root", "docker", "loopback"),
    ],
)
def test_a_container_reaches_its_own_processes_only(exporter: str, kind: str, way: str) -> None:
    """Root of a container becomes uid 1001, and two pods run as uid 1001, which is Ada's on the host."""
    with contextlib.closing(node_of(exporter)) as node:
        url = node.url if way == "unix" else node.tcp
        ada, root = node.user(ADA), node.user(0)
        first, second = node.container(kind), node.container(kind)
        one, its_root, two = node.user(ADA, **first), node.user(0, **first), node.user(ADA, **second)
        assert reached(ada, url) == {ada.pid, one.pid, two.pid}, "as with kill(2)"
        assert reached(one, url) == {one.pid}
        assert reached(two, url) == {two.pid}
        # Without a cgroup, each process here has namespaces of its own.
        assert reached(its_root, url) == ({its_root.pid, one.pid} if first["cgroup"] else {its_root.pid})
        assert reached(root, url) >= {ada.pid, root.pid, one.pid, its_root.pid, two.pid}
        for attacker in (one, its_root):
            for victim in (ada, root, two):
                assert act(attacker, url, target={"pid": victim.pid}, dry_run=False).status == 403
                stolen: dict[str, Any] = {"workload": "stolen", "session": "later", "session_started_seconds": 1e12}
                for final in (False, True):
                    reply = node.report(attacker, victim, url, **stolen, final=final)
                    assert reply.status == 403, reply
                    assert f"pid {victim.own_pid} belongs to uid" in reply.detail
        assert node.report(one, url=url, sequence=2).status == 200
        assert set(shown(node).values()) == {"train"}
        assert len(shown(node)) == 5


def test_a_nested_cgroup_with_the_name_of_another_container_is_in_its_own(node: SharedNode) -> None:
    """A container with a writable cgroup creates one below its own and names it after the victim's."""
    victim_at = node.container()
    victim = node.user(ADA, **victim_at)
    attacker_at = node.container()
    name = victim_at["cgroup"].path.name.removeprefix("docker-").removesuffix(".scope")
    forged = Cgroup(name, attacker_at["cgroup"].path.name)
    node.cgroups.append(forged)
    attacker = node.user(ADA, namespaces=CONTAINER, cgroup=forged)
    assert reached(attacker, node.url) == {attacker.pid}
    assert node.report(attacker, victim, workload="stolen").status == 403


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_root_of_a_container_does_not_take_over_a_process_of_another_one(exporter: str) -> None:
    """A wrong start time is enough for a process not to be found; the later start won, and got the commands."""
    with contextlib.closing(node_of(exporter)) as node:
        victim, attacker = node.user(0, **node.container()), node.user(0, **node.container())
        root = node.user(0)
        wrong = {
            "pid": victim.own_pid,
            "pid_namespace": victim.pid_namespace,
            "start_time_ticks": victim.start_time_ticks + 10**6,
            "session": "later",
            "session_started_seconds": 1e12,
            "workload": "stolen",
        }
        assert node.report(attacker, **wrong).status == 200
        assert shown(node)[victim.pid] == "train"
        action = act(root, node.url, target={"pid": victim.pid}, dry_run=False, deadline_seconds=60)
        assert action.status == 202, action
        assert "commands" not in node.report(attacker, **wrong, sequence=2).document
        claimed = (CommandResult(action.document["id"], "done", reason="a lie"),)
        assert node.report(attacker, **wrong, sequence=3, results=claimed).status == 200
        (command,) = node.report(victim, sequence=2).document["commands"]
        assert command["id"] == action.document["id"]
        assert node.report(attacker, **wrong, sequence=4, final=True).status == 200
        assert shown(node)[victim.pid] == "train"


def test_the_name_of_a_process_that_cannot_be_seen_cannot_be_contested_away(node: SharedNode) -> None:
    ada, eve, inside = node.user(ADA), node.user(EVE), node.user(ADA, **node.container())
    unseen: dict[str, Any] = {"pid": 77, "pid_namespace": 4242, "start_time_ticks": 5}
    assert node.report(ada, **unseen, session="ada", workload="ada").status == 200
    (name,) = {name for name, workload in shown(node).items() if workload == "ada"}
    for attacker in (eve, inside):
        claim = {**unseen, "session": f"{attacker.pid}", "session_started_seconds": 1e12, "workload": "squatter"}
        assert node.report(attacker, **claim).status == 200
        assert shown(node)[name] == "ada"
        assert node.report(attacker, **claim, sequence=2, final=True).status == 200
        assert shown(node)[name] == "ada"
        assert node.report(attacker, **claim).status == 200
    assert [*shown(node).values()].count("squatter") == 2
    assert {result["pid"] for result in act(ada, node.url, target={"pid": name}).document["results"]} == {name}


def test_a_claimed_rank_neither_joins_nor_blocks_a_group(node: SharedNode) -> None:
    ada, root, inside = node.user(ADA), node.user(0), node.user(ADA, **node.container())
    shared: dict[str, Any] = {"workload": "llm", "step": 50, "step_seconds": 0.1, "sequence": 2, "modes": MODES}
    assert node.report(ada, rank="0", **shared).status == 200
    assert node.report(inside, rank="1", **shared).status == 200
    group: dict[str, Any] = {"mode": "step", "deadline_seconds": 60}
    of_workload = {"workload": "llm"}
    # A rank brings the other ranks of its job, and a container has jobs of its own.
    for caller, target, acting in (
        (root, {"pid": ada.pid}, {ada.pid}),
        (inside, of_workload, {inside.pid}),
        (ada, of_workload, {ada.pid, inside.pid}),
        (root, of_workload, {ada.pid, inside.pid}),
    ):
        reply = act(caller, node.url, target=target, **group)
        assert reply.status == 200, reply
        assert {result["pid"] for result in reply.document["results"]} == acting


# Over loopback


@pytest.mark.parametrize("exporter", ["root without capabilities", "another user"])
def test_an_exporter_that_cannot_see_who_holds_a_connection_gives_it_no_rights(exporter: str) -> None:
    with contextlib.closing(node_of(exporter)) as node:
        ada, inside = node.user(ADA), node.user(ADA, **node.container())
        for user in (ada, inside):
            caller = user.request(node.tcp, "GET", "/api/v1/caller").document
            assert (caller["uid"], caller["rights"]) == (ADA, "none")
            assert "--action.token-file" in caller["reason"]
            assert act(user, node.tcp, target={"all": True}).status == 403
        reply = node.report(ada, url=node.tcp, sequence=2)
        assert reply.status == 403
        assert "unix socket" in reply.detail


def test_the_container_runtime_that_forwards_a_port_into_the_exporters_container_has_no_rights() -> None:
    """`kubectl port-forward`: a process of the host connects over the pod's loopback, as root, for another person."""
    with contextlib.closing(Cgroup(uuid4().hex * 2)) as cgroup:
        into_container = ("sh", "-c", 'echo 0 > "$0" && exec "$@"', str(cgroup.path / "cgroup.procs"))
        with contextlib.closing(SharedNode(launcher=into_container)) as node:
            job, runtime, beside = node.user(0), LocalUser(0), LocalUser(0, cgroup=cgroup)
            node.users += [runtime, beside]
            caller = runtime.request(node.tcp, "GET", "/api/v1/caller").document
            assert (caller["uid"], caller["rights"]) == (0, "none")
            assert act(runtime, node.tcp, target={"all": True}).status == 403
            assert node.report(runtime, job, url=node.tcp, workload="stolen").status == 403
            assert reached(runtime, node.url) == {job.pid}, "the host's root, on the socket"
            assert reached(beside, node.tcp) == {job.pid}, "kubectl exec"


@pytest.mark.parametrize("uid", [0, ADA])
def test_a_connection_that_a_container_passes_to_the_host_has_no_rights(node: SharedNode, uid: int) -> None:
    """The holder is a process of the same user on the host; the socket was created in the container."""
    place = node.container()
    receiving, sending = socket.socketpair(socket.AF_UNIX)
    host, _, port = node.tcp.removeprefix("http://").rpartition(":")
    creator = os.fork()
    if not creator:
        with contextlib.suppress(BaseException):
            place["cgroup"].enter()
            os.setgroups([])
            os.setuid(uid)
            made = socket.socket()
            made.connect((host, int(port)))
            sending.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made.fileno()]))])
        os._exit(0)
    os.waitpid(creator, 0)
    _, ancillary, *_ = receiving.recvmsg(1, socket.CMSG_SPACE(4))
    (descriptor,) = array.array("i", ancillary[0][2])
    receiving.close()
    sending.close()
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        with contextlib.suppress(BaseException):
            os.setuid(uid)
            passed = socket.socket(fileno=descriptor)
            passed.settimeout(patient(30))
            passed.sendall(b"GET /api/v1/caller HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while data := passed.recv(65536):
                os.write(writer, data)
        os._exit(0)
    os.close(descriptor)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        caller = json.loads(answers.read().partition(b"\r\n\r\n")[2])
    os.waitpid(holder, 0)
    assert (caller["uid"], caller["rights"]) == (uid, "none")


def test_namespaces_that_a_user_makes_take_one_share() -> None:
    """Every user may make user namespaces without end."""
    with contextlib.closing(SharedNode("--action.caller-limit", "2")) as node:
        made = [node.user(0, namespaces=NEW_USER_NAMESPACE | NEW_PID_NAMESPACE) for _ in range(3)]
        assert [act(each, node.url, target={"pid": each.pid}).status for each in made] == [200, 200, 429]
        other = node.user(ADA, **node.container())
        assert act(other, node.url, target={"pid": other.pid}).status == 200
