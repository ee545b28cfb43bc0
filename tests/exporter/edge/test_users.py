from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import bcrypt
import pytest

from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.web_access import UNKNOWN_USER, Users

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
        return [await users.admit(each, "a") for each in credentials]

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


@pytest.mark.parametrize("credentials", [b"ada:wrong", b"eve:secret", b"eve:", b""])
def test_an_unknown_name_costs_one_hash_as_a_known_one(checks: list[tuple[bytes, bytes]], credentials: bytes) -> None:
    assert admitted(Users({"ada": ADA}), credentials) == [False]
    ((_, hashed),) = checks
    assert hashed == (ADA.encode() if credentials.startswith(b"ada:") else UNKNOWN_USER)


async def test_simultaneous_connections_are_verified_once(checks: list[tuple[bytes, bytes]]) -> None:
    users = Users({"ada": ADA})
    assert await asyncio.gather(*(users.admit(b"ada:secret", "a") for _ in range(50))) == [True] * 50
    assert len(checks) == 1


async def test_who_guesses_passwords_delays_and_refuses_no_login_of_another(
    checks: list[tuple[bytes, bytes]],
) -> None:
    users = Users({"ada": ADA})
    guesses = [asyncio.ensure_future(users.admit(b"ada:%d" % number, "guesser")) for number in range(100)]
    await asyncio.sleep(0)
    assert await users.admit(b"ada:secret", "ada")
    assert len(checks) <= 3
    outcomes = await asyncio.gather(*guesses, return_exceptions=True)
    refused = [each for each in outcomes if isinstance(each, ProblemError)]
    assert [each for each in outcomes if each not in refused] == [False] * (100 - len(refused))
    assert {each.status for each in refused} == {503}
