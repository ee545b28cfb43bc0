"""Which processes a target selects. With `orphans`, it selects the orphans among those that it would select without."""

from __future__ import annotations

import dataclasses
from difflib import SequenceMatcher
from typing import Any

import pytest

from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.selection import select, unknown_names
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.container import Place
from gpumem_exporter.core.readings import LostLauncher, ProcessFacts
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.errors import TargetNotFoundError
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample

ORPHANS = {1: LostLauncher("launcher_ended"), 3: LostLauncher("launcher_ended")}


def snapshot(orphans: dict[int, LostLauncher]) -> Snapshot:
    """Return a node with two processes that report (1 and 2), and two that only the driver lists (3 and 4)."""
    first = device(UUIDS[0], processes={1: MIB, 2: MIB, 3: MIB})
    known = node(first, device(UUIDS[1], gpu="1", processes={4: MIB}))
    facts = {pid: ProcessFacts(pid, 1000, user="ada") for pid in (1, 2, 3, 4)}
    reporters = tuple(reporting(pid, devices=(sample(),), workload="chat") for pid in (1, 2))
    return Snapshot(1.0, dataclasses.replace(known, facts=facts), reporters, orphans=orphans)


def selected(target: Target, action: str = "terminate", orphans: dict[int, LostLauncher] = ORPHANS) -> list[Any]:
    found = select(ActionRequest(action, target), Caller.policy("rule"), snapshot(orphans))
    return [one.pid for one in found]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({}, [1, 3]),
        ({"pid": [1, 2]}, [1]),
        ({"workload": "chat"}, [1]),
        ({"user": "ada", "gpu": 0}, [1, 3]),
    ],
)
def test_it_narrows_every_target(target: dict[str, Any], expected: list[int]) -> None:
    assert selected(Target(orphans=True, **target)) == expected
    assert selected(Target(orphans=True, **target), "empty_cache") == [1]


def test_a_user_has_the_same_processes_by_name_and_by_uid_also_those_that_only_the_driver_lists() -> None:
    shown = snapshot({})
    assert shown.node is not None
    facts = {pid: ProcessFacts(pid, 1000, user="bob", uid=1002) for pid in (3, 4)}
    shown = dataclasses.replace(shown, node=dataclasses.replace(shown.node, facts={**shown.node.facts, **facts}))
    own = Caller(CallerKind.UNIX, Rights.OWN, uid=1002)
    for caller in (Caller.policy("rule"), own):
        for user in ("bob", 1002):
            found = select(ActionRequest("terminate", Target(user=user)), caller, shown)
            assert [one.pid for one in found] == [3, 4]
    with pytest.raises(TargetNotFoundError, match="no such user '1002'"):
        select(ActionRequest("terminate", Target(user=1002)), dataclasses.replace(own, uid=1003), shown)


def test_a_process_that_is_not_an_orphan_is_not_found() -> None:
    with pytest.raises(TargetNotFoundError, match="orphan"):
        selected(Target(orphans=True, pid=2))


def test_a_target_without_names_may_match_nothing_and_a_name_may_not() -> None:
    idle = dataclasses.replace(snapshot({}), processes=())
    for target in (Target(all=True), Target(gpu=1)):
        assert select(ActionRequest("empty_cache", target), Caller.policy("rule"), idle) == ()
    for target in (Target(gpu=9), Target(workload="chat"), Target(pid=1), Target(orphans=True, user="bob")):
        with pytest.raises(TargetNotFoundError):
            select(ActionRequest("empty_cache", target), Caller.policy("rule"), idle)


def test_a_program_that_does_not_report_is_named_as_such_to_a_caller_that_may_act_on_it() -> None:
    """The page calls its job by the program."""
    shown = snapshot({})
    assert shown.node is not None
    facts = {**shown.node.facts, 4: ProcessFacts(4, 1000, "server", uid=1001)}
    shown = dataclasses.replace(shown, node=dataclasses.replace(shown.node, facts=facts))
    request = ActionRequest("empty_cache", Target(workload="server"))
    own, other = (Caller(CallerKind.UNIX, Rights.OWN, uid=uid) for uid in (1001, 1002))
    for caller in (Caller.policy("rule"), own):
        with pytest.raises(TargetNotFoundError, match="workload server: no report arrives"):
            select(request, caller, shown)
    inside = dataclasses.replace(own, place=Place(known=True, container="a" * 64))
    for caller in (other, inside):  # the driver's list does not say in which container a process runs
        with pytest.raises(TargetNotFoundError, match="no such workload 'server'"):
            select(request, caller, shown)


def test_a_later_process_with_the_pid_of_an_orphan_is_none() -> None:
    shown = snapshot(ORPHANS)
    assert shown.node is not None
    later = dataclasses.replace(shown.node, facts={1: ProcessFacts(1, 2000)})
    found = select(
        ActionRequest("empty_cache", Target(orphans=True)),
        Caller.policy("rule"),
        dataclasses.replace(shown, node=later),
    )
    assert found == ()


def test_a_thousand_unknown_names_lead_to_one_suggestion_and_a_bounded_number_of_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    for name in ("ratio", "quick_ratio"):
        method = getattr(SequenceMatcher, name)

        def counting(self: Any, method: Any = method) -> Any:
            compared.append(max(len(self.a), len(self.b)))
            return method(self)

        monkeypatch.setattr(SequenceMatcher, name, counting)
    known = {"workload": [f"{'train' * 20}-{number}" for number in range(500)], "user": ["ada"], "uuid": ["GPU-1"]}
    target = Target(workload=[f"{'tra1n' * 20}-{number}" for number in range(1000)], user=["adda"], uuid=["GPU-2"])
    text = unknown_names(target, known, known)
    assert text.count("did you mean") == 1
    assert len(compared) <= 110
    assert max(compared) <= 64
    assert len(text) < 8192
