from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.peer import SocketOwner
from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.container import HERE, UNKNOWN, Place
from gpumem_exporter.edge.peer import Peer, PeerPlaces
from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.request_guard import Callers, Rule
from gpumem_exporter.edge.watched_files import TokenFile, WatchedFiles, refreshing
from gpumem_exporter.node.sockets import SocketHolders
from tests.support.builders.builders import state_from
from tests.support.waiting import patient

OWNER = 1000
CONTAINER = Place(known=True, container="c" * 64)


@dataclass(frozen=True)
class Holders(SocketHolders):
    """Sockets that are held in these places."""

    held: set[Place]

    def created_in(self, owner: SocketOwner) -> int | None:
        return owner.cgroup_id

    def places(self, wanted: Collection[SocketOwner]) -> dict[SocketOwner, set[Place]]:
        return {owner: set(self.held) for owner in wanted}


@dataclass(frozen=True)
class Caught:
    """A connection, and where the processes are that hold it."""

    peer: Peer
    held: frozenset[Place] = frozenset()

    def __str__(self) -> str:
        """Return the id of a test, which must be the same in each of its processes: a set has no order."""
        return f"{self.peer} held {sorted(self.held)}"


def unix(uid: int, place: Place = HERE) -> Caught:
    return Caught(Peer(uid=uid, pid=42, place=place))


def tcp(uid: int | None, *held: Place, host: str = "127.0.0.1", cgroup_id: int | None = 1) -> Caught:
    owner = None if uid is None else SocketOwner(uid, 4711, cgroup_id)
    return Caught(Peer(host, uid=uid, tcp=owner), frozenset(held or (HERE,)))


LOCAL = tcp(OWNER)
REMOTE = Caught(Peer("10.0.0.5"))


def rule(token: TokenFile | None = None) -> Rule:
    return Rule("actions", "--action.token-file", token)


def caller(caught: Caught, headers: dict[bytes, bytes] | None = None, token: TokenFile | None = None) -> Caller:
    scope = {"state": state_from(caught.peer), "headers": list((headers or {}).items())}
    return asyncio.run(Callers(rule(token), OWNER, PeerPlaces(Holders(set(caught.held)))).of(scope))


def token_file(path: Path, text: str) -> TokenFile:
    path.touch(0o600)
    path.write_text(text)
    return TokenFile("--action.token-file", path)


def refusal(of: Rule, caught: Caught, headers: dict[bytes, bytes] | None = None) -> ProblemError:
    problem = of.refusal(caught.peer, headers or {})
    assert problem is not None
    return problem


@pytest.mark.parametrize(
    ("peer", "rights", "place"),
    [
        (unix(0), Rights.ALL, HERE),
        (unix(OWNER), Rights.ALL, HERE),
        (tcp(0), Rights.ALL, HERE),
        (tcp(OWNER, host="::1"), Rights.ALL, HERE),
        (tcp(0, cgroup_id=None), Rights.OWN, HERE),  # the descriptor may have been passed on
        (unix(1001), Rights.OWN, HERE),
        (tcp(1001), Rights.OWN, HERE),
        (unix(1001, CONTAINER), Rights.OWN, CONTAINER),
        (unix(0, CONTAINER), Rights.OWN, CONTAINER),
        (unix(OWNER, CONTAINER), Rights.OWN, CONTAINER),
        (tcp(OWNER, CONTAINER), Rights.OWN, CONTAINER),
        (unix(0, UNKNOWN), Rights.NONE, UNKNOWN),
        (tcp(0, UNKNOWN), Rights.NONE, UNKNOWN),
        (tcp(0, HERE, CONTAINER), Rights.NONE, UNKNOWN),
        (tcp(None), Rights.NONE, HERE),
        *((Caught(Peer(host)), Rights.NONE, HERE) for host in ("10.0.0.5", "::ffff:10.0.0.5", "0.0.0.0", "::", "")),
    ],
    ids=str,
)
def test_without_a_token_file_the_kernel_decides_the_rights(peer: Caught, rights: Rights, place: Place) -> None:
    found = caller(peer)
    assert (found.rights, found.place, found.uid) == (rights, place, peer.peer.uid)


@pytest.mark.parametrize(
    "value", [b"", b"right", b"Basic right", b"Bearer", b"Bearer ", b"Bearer wrong", b"Bearer right2", b"Bearer \xff"]
)
def test_a_wrong_token_is_refused(tmp_path: Path, value: bytes) -> None:
    token = token_file(tmp_path / "token", "right")
    problem = refusal(rule(token), REMOTE, {b"authorization": value})
    assert (problem.status, "WWW-Authenticate" in problem.headers) == (401, True)
    assert caller(LOCAL, {b"authorization": value}, token).rights is Rights.NONE


@pytest.mark.parametrize("change", ["none", "removed", "emptied", "readable by every user"])
def test_only_the_token_that_a_valid_file_has_matches(tmp_path: Path, change: str) -> None:
    path = tmp_path / "token"
    token = token_file(path, "old")
    assert token.matches(b"old")
    if change == "removed":
        path.unlink()
    elif change == "emptied":
        path.write_text("")
    elif change == "readable by every user":
        path.chmod(0o604)
    token.refresh()
    assert token.matches(b"old") == (change == "none")
    assert not token.matches(b"")
    replacement = tmp_path / "next"
    replacement.touch(0o640)
    replacement.write_text("new")
    replacement.replace(path)
    token.refresh()
    assert token.matches(b"new")
    assert not token.matches(b"old")


@pytest.mark.parametrize(
    ("content", "named"), [(None, os.strerror(errno.ENOENT)), (" \n", "one line"), ("s3cret\nb", "one line")]
)
def test_a_file_without_a_token_ends_the_start(tmp_path: Path, content: str | None, named: str) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigurationError) as caught:
        TokenFile("--action.token-file", path) if content is None else token_file(path, content)
    text = str(caught.value)
    assert text.startswith(f"--action.token-file {str(path)!r}: ")
    assert named in text
    assert "s3cret" not in text


def test_an_error_is_logged_once_and_a_file_is_read_again_until_it_is_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [""]

    def read() -> str:
        if errors[0]:
            raise ConfigurationError(errors[0])
        return "valid"

    watched = WatchedFiles("it", [tmp_path], read)
    errors[0] = "the disk failed"
    watched.refresh()
    assert (watched.value, watched.error) == ("valid", "")
    (tmp_path / "change").touch()
    for _ in range(2):
        watched.refresh()
    assert (watched.value, watched.error) == ("valid", "the disk failed")
    errors[0] = ""
    for _ in range(2):
        watched.refresh()
    assert watched.error == ""
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_removed_token_is_invalid_before_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = token_file(tmp_path / "token", "right")
    matched: list[bool] = []

    def note(_: logging.LogRecord) -> bool:
        matched.append(token.matches(b"right"))
        return True

    caplog.handler.addFilter(note)
    token.path.unlink()
    token.refresh()
    caplog.handler.removeFilter(note)
    assert matched == [False]


def test_a_hung_disk_delays_neither_a_request_nor_the_exit(tmp_path: Path) -> None:
    token = token_file(tmp_path / "token", "right")
    reached, hung = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        hung.wait()

    try:
        with refreshing([hang, token.refresh]):
            assert reached.wait(patient(10))
            assert token.matches(b"right")
    finally:
        hung.set()
