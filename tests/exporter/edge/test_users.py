from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import bcrypt
import pytest

from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.users import MAX_WAITING, Users

ADA = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
BOB = bcrypt.hashpw("pässword".encode(), bcrypt.gensalt(5)).decode().replace("$2b$", "$2y$")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """The calls of bcrypt."""
    calls: list[tuple[bytes, bytes]] = []
    real: Callable[[bytes, bytes], bool] = bcrypt.checkpw

    def check(password: bytes, hashed: bytes) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        calls.append((password, hashed))
        return real(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", check)
    return calls


def admitted(users: Users, *credentials: bytes) -> list[bool]:
    async def ask() -> list[bool]:
        return [await users.admit(each) for each in credentials]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("credentials", "right"),
    [
        (b"ada:secret", True),
        ("bob:pässword".encode(), True),
        (b"ada:secret ", False),
        (b"ada:", False),
        (b"ada", False),
        (b"", False),
        (b":secret", False),
        (b"eve:secret", False),
        ("ada:pässword".encode(), False),
        (b"ada:sec\0ret", False),
        (b"ada:" + b"x" * 100, False),
        (b"\xff\xfe:secret", False),
    ],
)
def test_only_a_name_with_its_own_password_is_admitted(credentials: bytes, right: bool) -> None:
    assert admitted(Users({"ada": ADA, "bob": BOB}), credentials) == [right]


def test_right_credentials_are_verified_once_and_wrong_ones_each_time(
    checks: list[tuple[bytes, bytes]],
) -> None:
    users = Users({"ada": ADA})
    assert admitted(users, b"ada:secret", b"ada:secret", b"ada:wrong", b"ada:wrong") == [True, True, False, False]
    assert [password for password, _ in checks] == [b"secret", b"wrong", b"wrong"]


@pytest.mark.parametrize("credentials", [b"ada:secret", b"ada:wrong", b"bob:wrong", b"eve:secret"])
def test_every_name_takes_as_long_as_the_slowest_one(checks: list[tuple[bytes, bytes]], credentials: bytes) -> None:
    slow = bcrypt.hashpw(b"other", bcrypt.gensalt(7)).decode()
    admitted(Users({"ada": ADA, "bob": BOB, "carl": slow}), credentials)
    assert sum(2 ** int(hashed[4:6]) for _, hashed in checks) == 2**7


def test_a_change_of_the_users_forgets_the_changed_ones_alone(checks: list[tuple[bytes, bytes]]) -> None:
    users = Users({"ada": ADA, "bob": ADA, "carl": ADA})
    logins = (b"ada:secret", b"bob:secret", b"carl:secret")
    assert admitted(users, *logins) == [True] * 3
    checks.clear()
    users = users.changed_to({"ada": ADA, "bob": bcrypt.hashpw(b"new", bcrypt.gensalt(4)).decode()})
    assert admitted(users, *logins) == [True, False, False]
    assert len(checks) == 2


async def test_simultaneous_connections_are_verified_once(checks: list[tuple[bytes, bytes]]) -> None:
    users = Users({"ada": ADA})
    assert await asyncio.gather(*(users.admit(b"ada:secret") for _ in range(MAX_WAITING))) == [True] * MAX_WAITING
    assert len(checks) == 1


async def test_logins_beyond_the_limit_are_refused_and_known_ones_are_not() -> None:
    users = Users({"ada": ADA})
    assert await users.admit(b"ada:secret")
    logins = [users.admit(b"ada:%d" % number) for number in range(MAX_WAITING + 1)] + [users.admit(b"ada:secret")]
    *guesses, refused, known = await asyncio.gather(*logins, return_exceptions=True)
    assert guesses == [False] * MAX_WAITING
    assert isinstance(refused, ProblemError)
    assert (refused.status, refused.headers) == (503, {"Retry-After": "1"})
    assert known is True
