from __future__ import annotations

import dataclasses

import pytest

from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.container import Place

USER = Caller(CallerKind.UNIX, Rights.OWN, uid=1000, pid=42)


@pytest.mark.parametrize(
    ("caller", "spelled", "key"),
    [
        (USER, "unix:uid=1000:pid=42", "uid:1000"),
        (Caller(CallerKind.LOOPBACK, Rights.OWN, uid=1000, host="::1"), "loopback:uid=1000", "uid:1000"),
        (Caller(CallerKind.UNIX, uid=7, pid=1, token="token"), "token:token@unix:uid=7:pid=1", "token:token"),
        (Caller(CallerKind.TCP, host="10.0.0.5", token="token"), "token:token@tcp:10.0.0.5", "token:token"),
        (Caller(CallerKind.TCP, host="10.0.0.5"), "tcp:10.0.0.5", "tcp:10.0.0.5"),
        (Caller(CallerKind.UNKNOWN), "unknown", "unknown:"),
        (
            dataclasses.replace(USER, uid=0, place=Place(known=True, container="c" * 64)),
            f"unix:uid=0:pid=42:container={'c' * 12}",
            f"uid:0:container:{'c' * 64}",
        ),
        (Caller.policy("hoarders"), "policy:hoarders", "policy:hoarders"),
        (Caller.alert("GpuMemLeak", USER), "alert:GpuMemLeak by unix:uid=1000:pid=42", "alert:GpuMemLeak"),
    ],
    ids=str,
)
def test_a_caller_has_one_text_and_shares_its_key_with_its_other_processes(
    caller: Caller, spelled: str, key: str
) -> None:
    assert (str(caller), caller.key) == (spelled, key)


@pytest.mark.parametrize("name", ["Leak by unix:uid=0:pid=1", "Leak\npolicy:hoarders", "x" * 200, "a:b/c d"])
def test_the_name_of_an_alert_cannot_look_like_another_caller(name: str) -> None:
    caller = Caller.alert(name, USER)
    assert str(caller).removesuffix(f" by {USER}").removeprefix("alert:") == caller.name
    assert not set(caller.name) & set(": \n/=")
    assert len(caller.name) <= 128
    assert caller.rights is USER.rights


def test_all_users_of_a_container_have_one_share_of_the_limits() -> None:
    inside = [dataclasses.replace(USER, uid=uid, place=Place(known=True, container="c" * 64)) for uid in (0, 1000)]
    assert len({caller.key for caller in inside}) == 2
    assert {caller.share for caller in inside}.isdisjoint({USER.share})
    assert len({caller.share for caller in inside}) == 1
