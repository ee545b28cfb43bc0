from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import isinf
from typing import Any, NamedTuple

import pytest

from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.action_options import ACTIONS, ActionRequest, Target
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import NodeReading, ProcessKey, ReportingProcess, Snapshot, StartingEngine
from gpumem_exporter.features.engines.engine_starts import engines_to_wait_for
from gpumem_exporter.features.policy.evaluation import MAX_DECISIONS, Decision, PolicyEvaluator, Stop
from gpumem_exporter.features.policy.policy_rules import Condition, Rule
from gpumem_exporter.features.policy.policy_values import FIELDS
from tests.support.builders import MIB, UUIDS, device, node, reporting, sample

SLACK = Condition("slack_bytes", over=100 * MIB)


def stop_after(clears: int = 3, freed_under: float = 64 << 20, **changes: Any) -> dict[str, Any]:
    return {"clears": clears, "freed_under": freed_under, "still_free_after": 0.0, **changes}


STEPS: dict[str, Any] = {"step": 5, "step_seconds": 1.0}


def rule(name: str = "r", *when: Condition, group: bool = False, **changes: Any) -> Rule:
    """Return a rule as a YAML file has it; by default, it clears where there is slack; `stop_after` None is never."""
    do = {"action": "empty_cache", "mode": "auto" if group else "now"}
    do |= {key: changes.pop(key) for key in ("action", "force") if key in changes}
    bounds = {each.field: {"over": each.over, "under": each.under} for each in when or (SLACK,)}
    known = {name: {key: bound for key, bound in both.items() if not isinf(bound)} for name, both in bounds.items()}
    default = stop_after() if do["action"] == "empty_cache" else {}
    stop = changes.pop("stop_after", default) or "never"
    document = {"name": name, "workloads": ["*"], "when": known, "do": do, "cooldown": 10.0, "dry_run": False}
    if do["action"] in ("empty_cache", "collect_garbage"):
        document["stop_after"] = stop
    return Rule.model_validate(as_texts({**document, **changes}), context=ACTIONS)


def as_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_texts(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_texts(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def process(pid: int = 1, *samples: DeviceSample, at: float, **changes: Any) -> ReportingProcess:
    """A process that reported at this time; by default with 200 MiB of slack on device 0."""
    known = reporting(pid, devices=samples or (sample(reclaimable=200 * MIB),), **changes)
    return replace(known, received_seconds=at)


def lasting(seconds: float) -> Rule:
    changes: dict[str, Any] = {"for": seconds}
    return rule(**changes)


class Evaluation(NamedTuple):
    """The decisions of an evaluation, and its other results by rule."""

    decisions: list[Decision]
    counts: Mapping[tuple[str, str], int]


def held_back(request: ActionRequest, caller: Caller, process: ReportingProcess, snapshot: Snapshot) -> bool:
    """As the dispatcher, which asks the feature `engines`."""
    one = SelectedProcess(process.name, process, ())
    return bool(engines_to_wait_for(request, caller, one, frozenset(), snapshot))


class Bench:
    """An evaluator, a clock, and the processes with a running action."""

    def __init__(self, *rules: Rule) -> None:
        self.now = 1000.0
        self.evaluator = PolicyEvaluator(rules, stale_seconds=5.0, held_back=held_back)
        self.under_way: set[ProcessKey] = set()
        self.reading: NodeReading | None = node(device(UUIDS[0], total=1000 * MIB, used=990 * MIB))

    def evaluate(self, *processes: ReportingProcess, alerted: Any = None, **changes: Any) -> Evaluation:
        decisions: list[Decision] = []

        def act(decision: Decision) -> bool:
            decisions.append(decision)
            return True

        snapshot = Snapshot(self.now, self.reading, processes, **changes)
        return Evaluation(decisions, self.evaluator.evaluate(snapshot, self.under_way, act, alerted))

    def hoarding(self, seconds: float = 1.0, **changes: Any) -> Evaluation:
        """Evaluate some seconds later, when process 1 has 200 MiB of slack."""
        self.now += seconds
        return self.evaluate(process(at=self.now, **changes))

    def act(self, seconds: float = 10.0, **results: Any) -> Stop | None:
        """Let the rule act on process 1 some seconds later, with this result."""
        (decision,) = self.hoarding(seconds).decisions
        return self.finish(decision, **results)

    def finish(
        self,
        decision: Decision,
        freed: int | None = 200 * MIB,
        outcome: str = "done",
        still_free: int | None = None,
        code: ReasonCode | None = None,
        **sizes: int,
    ) -> Stop | None:
        known: dict[str, Any] = {"freed_bytes": freed, "still_free_bytes": still_free, **sizes}
        row = ActionResult(1, "train", "", "0", UUIDS[0], outcome, "why", reason_code=code, **known)
        name, dry = decision.request.action, decision.request.dry_run
        action = Action(f"a{self.now}", name, "done", "policy:r", 0.0, Target(pid=1), dry_run=dry)
        return self.evaluator.finished(decision, replace(action, results=(row,)))


def only(found: Evaluation, result: str) -> bool:
    return not found.decisions and [key[1] for key in found.counts] == [result]


def test_a_rule_requests_its_action_on_the_process_that_meets_its_conditions() -> None:
    bench = Bench(rule("r", SLACK, Condition("device_free_ratio", under=0.05), workloads=("train",)))
    assert bench.hoarding(workload="eval").counts == {}
    (decision,) = bench.hoarding().decisions
    reason = decision.request.reason
    assert decision.request == ActionRequest("empty_cache", Target(pid=1), mode="now", reason=reason)
    assert re.search(
        r"slack_bytes\b.*\b200 MiB\b.*\b100 MiB\b.*device_free_ratio\b.*\b1 %.*\b5 %", decision.request.reason
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slack_bytes", 300 * MIB),
        ("slack_ratio", 0.75),
        ("reclaimable_bytes", 200 * MIB),
        ("idle_cache_bytes", 150 * MIB),
        ("fragmented_bytes", 100 * MIB),
        ("fragmentation_ratio", 0.25),
        ("allocated_bytes", 100 * MIB),
        ("reserved_bytes", 400 * MIB),
        ("idle_seconds", 60.0),
        ("inactive_seconds", 60.0),
        ("device_free_bytes", 10 * MIB),
        ("device_free_ratio", 0.01),
        ("device_utilization_ratio", 0.5),
    ],
)
def test_each_field_has_its_value_and_strict_bounds(field: str, value: float) -> None:
    def acts(over: float, under: float) -> bool:
        bench = Bench(rule("r", Condition(field, over, under), cooldown=1.0))
        bench.reading = node(replace(device(UUIDS[0], total=1000 * MIB, used=990 * MIB), utilization_ratio=0.5))
        hoard = sample(allocated=100 * MIB, reclaimable=200 * MIB, fragmented=100 * MIB)
        hoard = replace(hoard, idle_cache_bytes=150 * MIB)
        idle = replace(process(1, hoard, at=bench.now), last_active_seconds=bench.now - 60)
        return bool(bench.evaluate(idle).decisions)

    assert acts(value * 0.99, value * 1.01)
    assert not acts(value, value * 1.01)
    assert not acts(value * 0.99, value)


@pytest.mark.parametrize(
    "reading", [None, node(up=False), node(replace(device(), error="lost"))], ids=["", "down", "lost"]
)
@pytest.mark.parametrize("field", sorted(FIELDS))
def test_an_unknown_value_meets_no_condition(field: str, reading: NodeReading | None) -> None:
    bench = Bench(rule("over", Condition(field, over=0.0)), rule("under", Condition(field, under=1.0)))
    bench.reading = reading
    unknown = DeviceSample(UUIDS[0])
    bench.evaluate(process(1, unknown, at=bench.now))
    bench.now += 1
    found = bench.evaluate(process(1, unknown, at=bench.now))
    assert found.counts == {("over", "unmet"): 1, ("under", "unmet"): 1}
    assert not found.decisions


def another_process(bench: Bench) -> dict[str, Any]:
    return {"start_time_ticks": 2000}


def another_reporter(bench: Bench) -> dict[str, Any]:
    return {"session": "second"}


def other_values(bench: Bench) -> dict[str, Any]:
    bench.now += 0.1
    assert only(bench.evaluate(process(1, sample(), at=bench.now)), "unmet")
    return {}


def silence(bench: Bench) -> dict[str, Any]:
    last = process(at=bench.now)
    bench.now += 5.5
    assert bench.evaluate(last).counts == {}, "a stale sample meets nothing"
    return {}


@pytest.mark.parametrize("interrupt", [another_process, another_reporter, other_values, silence])
def test_a_rule_acts_when_its_conditions_were_true_without_interruption(interrupt: Any) -> None:
    bench = Bench(lasting(3.0))
    for _ in range(3):
        assert only(bench.hoarding(), "pending")
    changes = interrupt(bench)
    for _ in range(3):
        assert only(bench.hoarding(**changes), "pending")
    assert bench.hoarding(**changes).decisions


def test_time_passes_with_samples_not_with_evaluations() -> None:
    bench = Bench(lasting(3.0))
    bench.hoarding()
    last = process(at=bench.now)
    bench.now += 4.0
    assert only(bench.evaluate(last), "pending")


def test_the_cooldown_follows_every_action_whatever_its_outcome() -> None:
    bench = Bench(rule(cooldown=10.0))
    bench.act(outcome="expired", freed=None)
    assert only(bench.hoarding(9.9), "cooling")
    assert bench.hoarding(0.1).decisions


def test_a_rule_has_a_maximum_number_of_actions_per_hour() -> None:
    bench = Bench(rule(max_per_hour=2))
    bench.act()
    bench.act()
    assert only(bench.hoarding(10.0), "limited")
    assert bench.hoarding(3600.0 - 10.0).decisions


def test_no_user_uses_up_the_actions_of_another() -> None:
    bench = Bench(rule(max_per_hour=2))
    found = bench.evaluate(*(process(pid, at=bench.now, owner_uid=1001) for pid in range(1, 6)))
    assert len(found.decisions) == 2
    assert found.counts == {("r", "limited"): 3}
    found = bench.evaluate(*(process(pid, at=bench.now, owner_uid=1002) for pid in range(11, 16)))
    assert len(found.decisions) == 2


def test_a_process_on_two_devices_gets_one_action_of_the_first_rule_that_is_no_dry_run() -> None:
    bench = Bench(rule("would", dry_run=True), rule("first"), rule("second"))
    bench.now += 1
    found = bench.evaluate(
        process(1, sample(UUIDS[0], reclaimable=200 * MIB), sample(UUIDS[1], reclaimable=200 * MIB), at=bench.now)
    )
    assert [decision.rule.name for decision in found.decisions] == ["would", "first"]
    assert found.counts == {("would", "cooling"): 1, ("first", "cooling"): 1, ("second", "busy"): 2}


def test_a_made_up_rank_of_another_user_neither_acts_on_a_group_nor_delays_its_rule() -> None:
    bench = Bench(rule(group=True, cooldown=600.0))
    bench.now += 1
    mine, rank = (
        process(pid, at=bench.now, workload="train", rank=str(pid), owner_uid=1001, **STEPS) for pid in (1, 2)
    )
    other = process(3, at=bench.now, workload="train", rank="1", owner_uid=1002, **STEPS)
    quiet = process(1, sample(), at=bench.now, workload="train", rank="1", owner_uid=1001)
    (decision,) = bench.evaluate(quiet, other).decisions
    assert decision.request.target == Target(pid=3)
    bench.under_way = {other.key}
    (decision,) = bench.evaluate(mine, rank, other).decisions
    assert decision.request.target == Target(pid=1)


def test_processes_with_one_name_that_wait_for_no_other_are_several_subjects_of_a_rule() -> None:
    bench = Bench(rule(group=True, cooldown=600.0))
    bench.now += 1
    several = [process(pid, at=bench.now, workload="train") for pid in (1, 2)]
    assert [decision.request.target.pid for decision in bench.evaluate(*several).decisions] == [("1",), ("2",)]


def test_a_group_gets_one_action_and_none_while_a_rank_is_busy() -> None:
    bench = Bench(rule(group=True))
    bench.now += 1
    ranks = [process(pid, at=bench.now, workload="train", rank=str(pid), **STEPS) for pid in (1, 2)]
    bench.under_way = {ranks[1].key}
    assert only(bench.evaluate(*ranks), "busy")
    bench.under_way = set()
    (decision,) = bench.evaluate(*ranks).decisions
    assert (decision.request.target, decision.request.mode) == (Target(pid=1), "auto")
    assert only(bench.evaluate(*ranks), "cooling")


def test_many_decisions_are_spread_over_evaluations() -> None:
    bench = Bench(rule(max_per_hour=600))
    bench.now += 1
    processes = [process(pid, at=bench.now) for pid in range(1, MAX_DECISIONS + 4)]
    found = bench.evaluate(*processes)
    assert len(found.decisions) == MAX_DECISIONS
    assert found.counts == {("r", "pending"): 3}
    assert len(bench.evaluate(*processes).decisions) == 3


def test_a_rule_stops_after_consecutive_clears_that_release_little() -> None:
    bench = Bench(rule(stop_after=stop_after(3, 64 * MIB)))
    assert bench.act(freed=MIB) is None
    assert bench.act(freed=0) is None
    stop = bench.act(freed=2 * MIB)
    assert stop is not None
    assert re.search(r"\bempty_cache\b.*\b3\b.*\b2\.0 MiB", stop.reason)
    assert [tried.freed_bytes for tried in stop.tries] == [MIB, 0, 2 * MIB]
    assert bench.evaluator.stopped("r") == [stop.resume_seconds]
    assert only(bench.hoarding(1000.0), "stopped")
    found = bench.evaluate(process(1, at=bench.now), process(2, at=bench.now))
    assert [decision.observation.process.key for decision in found.decisions] == [ProcessKey(1, 2)]


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_helpful_clear_resets_the_count(dry_run: bool) -> None:
    bench = Bench(rule(dry_run=dry_run, stop_after=stop_after(2, 64 * MIB)))
    for freed in (0, 64 * MIB, 0):
        assert bench.act(freed=freed) is None
        bench.evaluate(process(1, sample(), at=bench.now))  # a dry run acts again after its conditions were false
    assert bench.act(freed=0) is not None


def test_a_stopped_rule_starts_again_after_a_day_or_the_time_in_the_file() -> None:
    for resume_after, changes in ((86400.0, {}), (7200.0, {"resume_after": "2h"})):
        bench = Bench(rule(stop_after=stop_after(2, 64 * MIB, **changes)))
        for _ in range(2):
            bench.act(freed=0)
            bench.act(freed=0)
            acted = bench.now
            assert bench.evaluator.stopped("r") == [acted + resume_after]
            assert only(bench.hoarding(resume_after - 1.0), "stopped")
            bench.now += 1.0
            bench.evaluate()
            assert not bench.evaluator.stopped("r")
            assert bench.act(0.0, freed=200 * MIB) is None


@pytest.mark.parametrize(("after", "helps"), [(1 * MIB, True), (800 * MIB, False), (900 * MIB, False)])
def test_a_garbage_collection_is_judged_by_the_bytes_that_were_allocated(after: int, helps: bool) -> None:
    bench = Bench(rule(action="collect_garbage", stop_after={"clears": "1", "freed_under": "64MiB"}))
    stop = bench.act(freed=0, allocated_before_bytes=801 * MIB, allocated_after_bytes=after)
    assert (stop is None) == helps
    bench = Bench(rule(action="collect_garbage", stop_after={"clears": "1"}))
    assert bench.act(freed=0) is None, "not measured"


def test_a_rule_for_alerts_acts_only_for_an_alert_and_on_what_the_alert_admits() -> None:
    bench = Bench(rule("r", trigger="alert"), rule("other", workloads=("eval",)))
    assert only(bench.hoarding(), "pending")
    pair = [process(pid, at=bench.now) for pid in (1, 2)]

    def of(*pids: int) -> Evaluation:
        return bench.evaluate(*pair, alerted=("r", lambda seen: seen.process.key.pid in pids))

    assert of(3) == ([], {})
    assert [decision.request.target for decision in of(2).decisions] == [Target(pid=2)]
    found = of(1, 2)
    assert [decision.request.target for decision in found.decisions] == [Target(pid=1)]
    assert found.counts == {("r", "cooling"): 1}
    assert only(bench.hoarding(100.0), "pending")


def test_a_dry_run_acts_again_only_after_its_conditions_were_false() -> None:
    bench = Bench(rule(dry_run=True))
    (decision,) = bench.hoarding().decisions
    assert decision.request.dry_run
    bench.finish(decision)
    assert only(bench.hoarding(100.0), "cooling")
    bench.now += 1
    bench.evaluate(process(1, sample(), at=bench.now))  # something else has cleared the cache
    assert bench.hoarding().decisions


def test_an_unchanged_rule_keeps_its_state_after_a_reload() -> None:
    bench = Bench(lasting(3.0), rule("tired", stop_after=stop_after(1, 64 * MIB)))
    for _ in range(3):
        found = bench.hoarding()
        if found.decisions:
            bench.finish(found.decisions[0], freed=0)
    bench.evaluator.put_in_force((*bench.evaluator.rules, rule("new")))
    found = bench.hoarding(10.0)
    assert [decision.rule.name for decision in found.decisions] == ["r"]
    assert found.counts == {("tired", "stopped"): 1, ("new", "busy"): 1}


def test_a_changed_rule_keeps_only_its_cooldown_and_limit_after_a_reload() -> None:
    bench = Bench(rule(stop_after=stop_after(1, 64 * MIB), max_per_hour=2))
    (decision,) = bench.hoarding().decisions
    bench.evaluator.put_in_force([rule(max_per_hour=2)])
    assert bench.finish(decision, freed=0) is None, "the changed rule has not acted"
    assert only(bench.hoarding(9.0), "cooling")
    bench.act(1.0)
    assert only(bench.hoarding(10.0), "limited")


def test_a_silent_process_is_remembered_for_an_hour() -> None:
    bench = Bench(rule(stop_after=stop_after(1, 64 * MIB)))
    bench.act(freed=0)
    bench.now += 1800
    bench.evaluate()
    assert only(bench.hoarding(), "stopped")
    bench.now += 1800
    bench.evaluate()
    assert not bench.evaluator.stopped("r")


def starting(uuid: str = UUIDS[0], host_pid: int = 50) -> StartingEngine:
    return StartingEngine(uuid, "0", host_pid, "VLLM::EngineCore", until_seconds=2000.0)


def beside_an_engine(bench: Bench, *engines: StartingEngine, at: float, **changes: Any) -> Evaluation:
    bench.now = at
    return bench.evaluate(process(at=at, **changes), starting=engines)


def test_a_rule_holds_back_while_an_engine_starts_and_keeps_its_budget() -> None:
    bench = Bench(rule(max_per_hour=1, cooldown=3600.0))
    bench.hoarding(0.0)
    for second in range(1, 4):
        assert only(beside_an_engine(bench, starting(), at=5000.0 + second), "held_back")
    assert beside_an_engine(bench, at=5004.0).decisions, "neither the budget nor the cooldown was used"


@pytest.mark.parametrize(
    ("results", "named"),
    [
        ({"outcome": "expired", "freed": None}, "expired: why"),
        ({"outcome": "refused", "freed": None}, "refused: why"),
        ({"outcome": "refused", "freed": None, "code": ReasonCode.ENGINE_STARTING}, ""),  # a start overtook it
        ({"outcome": "gone", "freed": None}, ""),
        ({"freed": None, "still_free": 0}, ""),  # not measured
        ({"still_free": None}, ""),  # not known yet
        ({"still_free": 0}, r"200 MiB.*\b0 B\b.*\b5\.0 s"),
        ({"still_free": 64 * MIB - 1}, r"200 MiB.*\b64\.0 MiB\b.*\b5\.0 s"),
        ({"still_free": 64 * MIB}, ""),
    ],
)
def test_a_rule_stops_if_its_action_was_not_done_or_too_little_is_still_free(results: Any, named: str) -> None:
    bench = Bench(rule(stop_after=stop_after(1, 64 * MIB, still_free_after=5.0)))
    stop = bench.act(**results)
    assert (stop is not None) == bool(named) == bool(bench.evaluator.stopped("r"))
    assert stop is None or re.search(named, stop.reason)


@pytest.mark.parametrize(
    ("changes", "engine", "acts"),
    [
        ({"action": "empty_cache"}, starting(), False),
        ({"action": "terminate"}, starting(), False),
        ({"action": "collect_garbage"}, starting(), True),
        ({"force": True}, starting(), True),
        ({}, starting(UUIDS[1]), True),
        ({"action": "terminate"}, starting(host_pid=1), True),  # it ends the engine itself
    ],
)
def test_a_rule_holds_back_where_its_action_would_spoil_a_start(
    changes: dict[str, Any], engine: StartingEngine, acts: bool
) -> None:
    assert bool(beside_an_engine(Bench(rule(**changes)), engine, at=2000.0).decisions) == acts
