from __future__ import annotations

import pytest

from gpumem_exporter.actions.caller import Caller, CallerKind

USER = Caller(CallerKind.UNIX, uid=1000, pid=42)


@pytest.mark.parametrize(
    ("caller", "spelled", "share", "anonymous"),
    [
        (USER, "unix:uid=1000:pid=42", "unix:uid=1000", False),
        (Caller(CallerKind.UNIX, uid=7, pid=1, token=True), "token@unix:uid=7:pid=1", "token@unix:uid=7", False),
        (Caller(CallerKind.TCP, host="127.0.0.1"), "tcp:127.0.0.1", "tcp:127.0.0.1", True),
        (Caller(CallerKind.TCP, host="10.0.0.5", token=True), "token@10.0.0.5", "token@10.0.0.5", False),
        (Caller(CallerKind.UNKNOWN), "unknown", "unknown", True),
        (Caller.policy("hoarders"), "policy:hoarders", "policy:hoarders", False),
        (
            Caller.alert("GpuMemLeak", USER),
            "alert:GpuMemLeak by unix:uid=1000:pid=42",
            "alert:GpuMemLeak by unix:uid=1000",
            False,
        ),
    ],
    ids=lambda value: str(value),
)
def test_a_caller_has_one_text_and_shares_its_limit_with_its_other_processes(
    caller: Caller, spelled: str, share: str, anonymous: bool
) -> None:
    assert (str(caller), caller.share, caller.anonymous) == (spelled, share, anonymous)
