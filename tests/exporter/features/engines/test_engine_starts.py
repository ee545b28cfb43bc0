"""Actions that release memory wait while an inference engine starts on a device of the process."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest

from gpumem_client.wire.protocol import Command, CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ACTIONS, Target
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.errors import ActionForbiddenError
from tests.support.builders.builders import MIB, UUIDS, device, node, sample
from tests.support.builders.dispatching import Bench, Ranks

ENGINE, OWNER = 50, 1001
TITLE = "VLLM::EngineCore"
STARTED = 90.0
ADA = Caller(CallerKind.UNIX, Rights.OWN, uid=1000)
OWNER_OF_THE_ENGINE = Caller(CallerKind.UNIX, Rights.OWN, uid=OWNER)
STARTING = ReasonCode.ENGINE_STARTING


class EngineMixin:
    """An engine that starts at 90 s on a device."""

    def engine(self: Any, uuid: str = UUIDS[1], gpu: str = "1", running: bool = True, **facts: Any) -> None:
        known = {"uid": OWNER, "started_seconds": STARTED, **facts}
        others = [device(other, gpu=str(i)) for i, other in enumerate(UUIDS[:2]) if other != uuid]
        reading = node(*others, device(uuid, gpu=gpu, processes={ENGINE: 512 * MIB} if running else {}), taken=self.now)
        engine = ProcessFacts(ENGINE, 1000, TITLE, **known)
        self.store.put_reading(dataclasses.replace(reading, facts={ENGINE: engine} if running else {}))

    def commands(self: Any, process: ReportingProcess) -> tuple[Command, ...]:
        return self.dispatcher.commands(process)

    def later(self: Any, seconds: float) -> None:
        self.now += seconds
        self.dispatcher.expire()


class EngineBench(EngineMixin, Bench):
    """Process 1 is on devices 0 and 1, process 2 on device 1, and an engine starts on device 1."""

    def __init__(self) -> None:
        super().__init__()
        self.engine()

    def result(self, action: Action, pid: int = 1) -> tuple[str, str | None]:
        result = next((each for each in self.current(action).results if each.pid == pid), None)
        return (result.outcome, result.reason_code) if result is not None else ("", None)


class EngineRanks(EngineMixin, Ranks):
    """Two ranks on device 0, with one step per 0.1 s, while an engine starts there."""

    def __init__(self) -> None:
        super().__init__()
        self.engine(UUIDS[0], gpu="0")


@pytest.mark.parametrize("action", ACTIONS)
def test_only_actions_that_release_or_take_memory_wait(action: str) -> None:
    bench = EngineBench()
    fraction = {"fraction": 0.5, "force": True} if action == "set_memory_fraction" else {}
    bench.dispatcher = bench.build(allowed=frozenset(ACTIONS), engines=Mock())  # takes every process for an engine
    caller = Caller(CallerKind.UNIX, Rights.ALL, uid=0)
    asked = bench.ask(action, target=Target(pid=2), dry_run=True, caller=caller, **fraction)
    codes = {result.reason_code for result in asked.results}
    if action == "terminate":  # the host of this bench knows no process, so it refuses before
        assert codes == {ReasonCode.NOT_LISTED}
    else:
        assert (STARTING in codes) == (action in ("empty_cache", "release_memory", "resume_memory"))


def test_a_device_that_only_the_driver_shows_for_the_process_counts() -> None:
    bench = EngineBench()
    bench.first = bench.put(1, devices=(sample(UUIDS[0], 0, MIB),))
    reading = node(device(UUIDS[0]), device(UUIDS[1], gpu="1", processes={ENGINE: MIB, 1: MIB}), taken=bench.now)
    facts = {ENGINE: ProcessFacts(ENGINE, 1000, TITLE, started_seconds=STARTED)}
    bench.store.put_reading(dataclasses.replace(reading, facts=facts))
    bench.ask(target=Target(pid=1))
    assert not bench.commands(bench.first)


def test_a_process_that_has_come_onto_the_device_since_the_request_waits() -> None:
    bench = EngineBench()
    bench.engine(running=False)
    first = bench.put(1, devices=(sample(UUIDS[0], 0, MIB),))
    asked = bench.ask(target=Target(pid=1))
    reading = node(device(UUIDS[0]), device(UUIDS[1], gpu="1", processes={ENGINE: MIB, 1: MIB}), taken=bench.now)
    facts = {ENGINE: ProcessFacts(ENGINE, 1000, TITLE, started_seconds=STARTED)}
    bench.store.put_reading(dataclasses.replace(reading, facts=facts))
    bench.later(1.0)
    assert bench.result(asked) == ("refused", STARTING)
    assert not bench.commands(first)


def test_force_does_not_wait_and_a_user_forces_beside_its_own_engine_only() -> None:
    bench = EngineBench()
    of_ada = bench.put(3, owner_uid=ADA.uid, devices=(sample(UUIDS[1], 0, MIB),))
    with pytest.raises(ActionForbiddenError) as caught:
        bench.ask(target=Target(pid=3), force=True, caller=ADA)
    assert str(ENGINE) in str(caught.value)
    assert TITLE in str(caught.value)
    with pytest.raises(ActionForbiddenError):
        bench.ask(target=Target(pid=3), force=True, dry_run=True, caller=ADA)
    assert not bench.commands(of_ada)
    bench.engine(uid=ADA.uid)
    assert not bench.ask(target=Target(pid=3), force=True, caller=ADA).waits_for
    (command,) = bench.commands(of_ada)
    assert not command.force, "only a fraction has a force that the process itself needs"


@pytest.mark.parametrize("force", [False, True], ids=["", "forced by a user, whose engine it is not"])
def test_a_command_that_waits_in_its_process_is_withdrawn_when_an_engine_starts(force: bool) -> None:
    bench = EngineBench()
    bench.engine(running=False)
    first = bench.put(1, owner_uid=ADA.uid, modes=("now", "idle"), devices=bench.first.report.devices)
    asked = bench.ask(target=Target(pid=1), mode="idle", deadline_seconds=600.0, force=force, caller=ADA)
    assert bench.commands(first)
    held = dataclasses.replace(first, report=dataclasses.replace(first.report, waiting=(asked.id,)))
    if not force:
        bench.dispatcher.take_results(held)
    bench.engine()
    bench.later(1.0)
    bench.dispatcher.take_results(held)
    assert bench.dispatcher.cancelled(held) == (asked.id,)
    forgot = CommandResult(asked.id, "refused", "withdrawn", ReasonCode.CANCELLED)
    answer = dataclasses.replace(first, report=dataclasses.replace(first.report, results=(forgot,)))
    bench.dispatcher.take_results(answer)
    assert bench.result(asked) == ("refused", STARTING)


def test_titles_of_others_are_hidden_where_identities_are() -> None:
    bench = EngineBench()
    bench.dispatcher = bench.build(hide_identities=True)
    bench.put(3, owner_uid=ADA.uid, devices=(sample(UUIDS[1], 0, MIB),))
    assert [wait.title for wait in bench.ask(target=Target(pid=3), caller=ADA).waits_for] == [""]
    assert [wait.title for wait in bench.ask(target=Target(pid=3)).waits_for] == [TITLE]


def test_a_group_waits_as_a_whole_and_then_takes_a_new_step() -> None:
    bench = EngineRanks()
    bench.second = bench.rank(2, "1", 48, devices=(sample(UUIDS[1], 0, MIB),))
    late = bench.ask_group(deadline_seconds=30.0)
    asked = bench.ask_group(deadline_seconds=120.0)
    assert not bench.commands(bench.first)
    assert not bench.commands(bench.second), "the other device has no engine, but the rank waits for its group"
    bench.later(60.0)
    assert not bench.current(asked).finished
    found = bench.current(late).results
    assert [(result.outcome, result.reason_code) for result in found] == [("refused", STARTING)] * 2
    first, second = bench.rank(1, "0", 650), bench.rank(2, "1", 648)
    bench.engine(UUIDS[0], gpu="0", running=False)
    bench.later(1.0)
    (one,), (other,) = bench.commands(first), bench.commands(second)
    assert one.at_step == other.at_step == bench.current(asked).at_step
    assert one.at_step is not None
    assert one.at_step > 650


def test_a_group_whose_step_has_passed_meanwhile_does_not_act() -> None:
    bench = EngineRanks()
    asked = bench.ask_group(deadline_seconds=120.0, at_step=150)
    bench.later(60.0)
    bench.rank(1, "0", 650)
    bench.rank(2, "1", 648)
    bench.engine(UUIDS[0], gpu="0", running=False)
    bench.later(1.0)
    codes = {result.reason_code for result in bench.current(asked).results}
    assert codes == {ReasonCode.GROUP_INCOMPLETE}


def test_a_reporting_engine_belongs_to_the_user_that_the_kernel_names() -> None:
    bench = EngineBench()
    bench.engine(running=False)
    of_ada = bench.put(3, owner_uid=ADA.uid, devices=(sample(UUIDS[0], 0, MIB),))
    bench.put(ENGINE, owner_uid=OWNER, devices=(sample(UUIDS[0], 0, MIB),), engine_starting=True)
    with pytest.raises(ActionForbiddenError):
        bench.ask(target=Target(pid=3), force=True, caller=ADA)
    bench.put(4, owner_uid=OWNER, devices=(sample(UUIDS[0], 0, MIB),))
    assert not bench.ask(target=Target(pid=4), force=True, caller=OWNER_OF_THE_ENGINE).waits_for
    assert not bench.commands(of_ada)


def test_a_clear_of_the_starting_engine_itself_waits() -> None:
    bench = EngineBench()
    engine = bench.put(ENGINE, devices=(sample(UUIDS[1], 0, MIB),), engine_starting=True)
    bench.ask(target=Target(pid=ENGINE))
    assert not bench.commands(engine)
    bench.put(ENGINE, devices=(sample(UUIDS[1], 0, MIB),), engine_starting=False)
    bench.later(1.0)
    assert bench.commands(engine)
