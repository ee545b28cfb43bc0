"""What callers may do: which actions, on which processes, and which entries of the audit log they see."""

from __future__ import annotations

import dataclasses

import pytest

from gpumem_client.wire.procfs import pid_namespace
from gpumem_exporter.actions.action_options import ACTIONS, Target
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.container import HERE, UNKNOWN, Place
from gpumem_exporter.errors import ActionForbiddenError, ActionRefusedError
from tests.support.builders.builders import MIB, UUIDS, device, node, sample
from tests.support.builders.dispatching import Bench

ROOT = Caller(CallerKind.UNIX, Rights.ALL, uid=0, pid=4)
ADA = Caller(CallerKind.UNIX, Rights.OWN, uid=1001, pid=5)
A, B = (Place(known=True, container=letter * 64) for letter in "ab")


class Shared(Bench):
    """A node with a process of root, one of Ada, one of Eve, and one that only a token vouches for."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = self.build(allowed=frozenset(ACTIONS))
        for pid, owner_uid in ((1, 0), (2, 1001), (3, 1002), (4, None)):
            self.put(pid, owner_uid=owner_uid, pid_namespace=pid_namespace(), devices=(sample(UUIDS[0], 0, MIB),))


@pytest.fixture
def bench() -> Shared:
    bench = Shared()
    for key in (bench.first.key, bench.second.key):  # those that `Bench` adds
        bench.store.forget(key)
    return bench


@pytest.mark.parametrize(
    ("action", "options"),
    [("terminate", {}), ("set_memory_fraction", {"fraction": 0.5, "force": True})],
)
def test_some_actions_need_the_rights_to_all_processes(bench: Shared, action: str, options: dict[str, object]) -> None:
    with pytest.raises(ActionForbiddenError, match=action):
        bench.ask(action, target=Target(pid=2), caller=ADA, **options)
    bench.ask(action, target=Target(pid=2), caller=ROOT, dry_run=True, **options)


def test_a_caller_reaches_the_processes_of_its_place() -> None:
    bench = Bench()
    for pid, (owner_uid, place) in enumerate(((0, HERE), (1001, HERE), (0, A), (1001, A), (1001, B), (0, B)), start=1):
        bench.put(pid, owner_uid=owner_uid, place=place, pid_namespace=7, session=str(pid))
    snapshot = bench.store.snapshot(bench.now)

    def reached(uid: int, place: Place) -> set[int | str]:
        caller = dataclasses.replace(ADA, uid=uid, place=place)
        if not any(map(caller.may_act_on, snapshot.processes)):
            return set()
        return {result.pid for result in bench.ask(caller=caller, dry_run=True).results}

    assert reached(1001, HERE) == {2, 4, 5}
    assert reached(1001, A) == {4}
    assert reached(0, A) == {3, 4}
    assert reached(0, B) == {5, 6}
    assert reached(1002, A) == reached(0, UNKNOWN) == set()


@pytest.mark.parametrize(
    ("owner_uid", "listed", "code"),
    [
        (1001, (), "not_listed"),
        (None, (20,), "not_attested"),
        (1001, (20,), "process_exited"),  # the next check
    ],
)
def test_terminate_needs_the_kernel_and_the_driver_to_name_the_process(
    bench: Shared, owner_uid: int | None, listed: tuple[int, ...], code: str
) -> None:
    bench.store.put_reading(node(device(processes=dict.fromkeys(listed, MIB)), taken=bench.now))
    bench.put(20, owner_uid=owner_uid)
    for dry_run in (True, False):
        (result,) = bench.ask("terminate", target=Target(pid=20), caller=ROOT, dry_run=dry_run).results
        assert (result.outcome, result.reason_code) == ("refused", code)


@pytest.mark.parametrize("target", [Target(workload="evaluatian"), Target(workload="evaluation", pid="3")])
def test_errors_name_only_the_callers_processes(target: Target) -> None:
    bench = Shared()
    bench.put(8, owner_uid=1002, workload="secret-evaluation")
    bench.put(9, owner_uid=1001, workload="evaluation")
    texts = []
    for caller in (ROOT, ADA):
        with pytest.raises(ActionRefusedError) as refused:
            bench.ask(target=target, caller=caller)
        texts.append(str(refused.value))
    assert ["secret-evaluation" in text for text in texts] == [True, False]
    assert "evaluation" in texts[1]
