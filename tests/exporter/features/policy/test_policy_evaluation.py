from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest

from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.action_options import ACTIONS, ActionRequest, Target
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.event import Event
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.edge.replies import iso_time
from gpumem_exporter.errors import TargetNotFoundError
from gpumem_exporter.features.policy.policy_rules import FIELDS, Rule
from gpumem_exporter.features.policy.policy_runner import EVALUATIONS, MAX_DECISIONS, NamingAlert, PolicyRunner
from gpumem_exporter.metrics.instruments import Counter, Registry
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample

SLACK = {"slack_bytes": {"over": "100MiB"}}
STEPS: dict[str, Any] = {"step": 5, "step_seconds": 1.0}


def stop_after(clears: int = 3, **changes: Any) -> dict[str, Any]:
    return {"clears": clears, "freed_under": "64MiB", "still_free_after": "0", **changes}


def rule(name: str = "r", **changes: Any) -> Rule:
    """Return a rule as a YAML file has it; by default, it clears at once where there is slack."""
    do = {"action": "empty_cache", "mode": "now"} | {
        key: changes.pop(key) for key in ("action", "mode", "force") if key in changes
    }
    document = {"name": name, "workloads": ["*"], "when": SLACK, "do": do, "cooldown": 10.0, "dry_run": False}
    if do["action"] in ("empty_cache", "collect_garbage"):
        document["stop_after"] = stop_after()
    return Rule.model_validate(as_texts({**document, **changes}), context=ACTIONS)


def as_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_texts(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_texts(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


LASTING = rule(**{"for": "3s"})


def process(pid: int = 1, *samples: DeviceSample, at: float, **changes: Any) -> ReportingProcess:
    """A process that reported at this time; by default with 200 MiB of slack on device 0."""
    known = reporting(pid, devices=samples or (sample(reclaimable=200 * MIB),), **changes)
    return replace(known, received_seconds=at)


class ScriptedDispatcher:
    """Accepts every action, unless it refuses all of them."""

    allowed = frozenset(ACTIONS)

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}
        self.requests: list[tuple[ActionRequest, Caller]] = []
        self.busy: set[ProcessKey] = set()
        self.held: set[ProcessKey] = set()
        self.refuses = False

    def submit(self, request: ActionRequest, *, requested_by: Caller) -> Action:
        if self.refuses:
            raise TargetNotFoundError("refused")
        action_id = str(len(self.actions))
        action = Action(action_id, request, "queued", str(requested_by), 0.0)
        self.actions[action.id] = action
        self.requests.append((request, requested_by))
        return action

    def get(self, action_id: str) -> Action | None:
        return self.actions.get(action_id)

    def under_way(self) -> set[ProcessKey]:
        return self.busy

    def held_back(self, _request: ActionRequest, _caller: Caller, process: ReportingProcess, _: Snapshot) -> bool:
        return process.key in self.held


class Evaluation(NamedTuple):
    """The requests of an evaluation with their callers, and its other results by rule."""

    requests: list[tuple[ActionRequest, Caller]]
    counts: Mapping[tuple[str, str], int]

    @property
    def targets(self) -> list[Target]:
        return [request.target for request, _ in self.requests]


class Bench:
    """The rules in force, a clock, and a dispatcher whose actions the test ends."""

    def __init__(self, *rules: Rule) -> None:
        self.now = 1000.0
        self.dispatcher = ScriptedDispatcher()
        self.events: list[Event] = []
        self.reading: NodeReading | None = node(device(UUIDS[0], total=1000 * MIB, used=990 * MIB))
        self.snapshot = Snapshot(self.now, self.reading, ())
        self.runner = PolicyRunner(
            "",
            dispatcher=cast("Dispatcher", self.dispatcher),
            snapshot=lambda: self.snapshot,
            stale_seconds=5.0,
            evaluations=Counter.of(EVALUATIONS, Registry()),
            record=self.events.append,
            wall_clock=lambda: self.now,
        )
        self.runner.put_in_force(rules, "test")

    def stops(self) -> list[str]:
        """Return until when the rule `r` has stopped, for each process or job."""
        until = [each.stopped_until for each in self.runner.states["r"].subjects.values()]
        return [self.runner.iso_time(seconds) for seconds in until if seconds > self.now]

    def evaluate(self, *processes: ReportingProcess, alert: NamingAlert | None = None) -> Evaluation:
        """Evaluate all rules, or the rule of an alert."""
        before = len(self.dispatcher.requests)
        self.snapshot = Snapshot(self.now, self.reading, processes)
        found = self.runner.evaluate(alert)
        counts = {key: len(texts) for key, texts in found.items() if key[1] not in ("acted", "would_act")}
        return Evaluation(self.dispatcher.requests[before:], counts)

    def hoarding(self, seconds: float = 1.0, **changes: Any) -> Evaluation:
        """Evaluate some seconds later, when process 1 has 200 MiB of slack."""
        self.now += seconds
        return self.evaluate(process(at=self.now, **changes))

    def act(self, seconds: float = 10.0, **results: Any) -> dict[str, Any] | None:
        """Let the rule act on process 1 some seconds later, with this result; return the event if the rule stops."""
        assert len(self.hoarding(seconds).requests) == 1
        return self.finish(**results)

    def finish(
        self,
        freed: int | None = 200 * MIB,
        outcome: str = "done",
        still_free: int | None = None,
        code: ReasonCode | None = None,
        **sizes: int,
    ) -> dict[str, Any] | None:
        """End the last action with this result; return the event if the rule stops."""
        known: dict[str, Any] = {"freed_bytes": freed, "still_free_bytes": still_free, **sizes}
        row = ActionResult(1, "train", "", "0", UUIDS[0], outcome, "why", reason_code=code, **known)
        action_id, action = list(self.dispatcher.actions.items())[-1]
        self.dispatcher.actions[action_id] = replace(action, state="done", results=(row,))
        before = len(self.events)
        self.runner.judge()
        return dict(self.events[-1].detail) if len(self.events) > before else None


def only(found: Evaluation, result: str) -> bool:
    return not found.requests and [key[1] for key in found.counts] == [result]


def test_a_rule_requests_its_action_on_the_process_that_meets_its_conditions() -> None:
    bench = Bench(rule(when={**SLACK, "device_free_ratio": {"under": "5%"}}, workloads=("train",)))
    assert bench.hoarding(workload="eval").counts == {}
    ((request, caller),) = bench.hoarding().requests
    assert caller == Caller.policy("r")
    assert request == ActionRequest("empty_cache", Target(pid=1), mode="now", reason=request.reason)
    assert re.search(r"slack_bytes\b.*\b200 MiB\b.*\b100 MiB\b.*device_free_ratio\b.*\b1 %.*\b5 %", request.reason)


VALUES = {
    "slack_bytes": 300 * MIB,
    "slack_ratio": 0.75,
    "reclaimable_bytes": 200 * MIB,
    "idle_cache_bytes": 150 * MIB,
    "fragmented_bytes": 100 * MIB,
    "fragmentation_ratio": 0.25,
    "allocated_bytes": 100 * MIB,
    "reserved_bytes": 400 * MIB,
    "idle_seconds": 60.0,
    "inactive_seconds": 60.0,
    "device_free_bytes": 10 * MIB,
    "device_free_ratio": 0.01,
    "device_utilization_ratio": 0.5,
}


@pytest.mark.parametrize("field", VALUES)
def test_each_field_has_its_value_and_strict_bounds(field: str) -> None:
    def acts(over: float, under: float) -> bool:
        bench = Bench(rule(when={field: {"over": VALUES[field] * over, "under": VALUES[field] * under}}))
        bench.reading = node(replace(device(UUIDS[0], total=1000 * MIB, used=990 * MIB), utilization_ratio=0.5))
        hoard = sample(allocated=100 * MIB, reclaimable=200 * MIB, fragmented=100 * MIB)
        hoard = replace(hoard, idle_cache_bytes=150 * MIB)
        idle = replace(process(1, hoard, at=bench.now), last_active_seconds=bench.now - 60)
        return bool(bench.evaluate(idle).requests)

    assert (acts(0.99, 1.01), acts(1.0, 1.01), acts(0.99, 1.0)) == (True, False, False)


@pytest.mark.parametrize(
    "reading", [None, node(up=False), node(replace(device(), error="lost"))], ids=["", "down", "lost"]
)
def test_an_unknown_value_meets_no_condition(reading: NodeReading | None) -> None:
    bounds = {"over": "0"}, {"under": "1"}
    bench = Bench(*(rule(f"{name}-{i}", when={name: bounds[i]}) for name in FIELDS for i in (0, 1)))
    bench.reading = reading
    found = bench.evaluate(process(1, DeviceSample(UUIDS[0]), at=bench.now))
    assert not found.requests
    assert {result for _, result in found.counts} == {"unmet"}


@pytest.mark.parametrize(
    ("seconds", "samples", "changes"),
    [
        (0.0, (), {"start_time_ticks": 2000}),
        (0.0, (), {"session": "second"}),
        (0.1, (sample(),), {}),  # a sample that does not meet the condition
        (5.5, (), {}),  # silence
    ],
)
def test_a_rule_acts_when_its_conditions_were_true_without_interruption(
    seconds: float, samples: Any, changes: dict[str, Any]
) -> None:
    bench = Bench(LASTING)
    for _ in range(3):
        assert only(bench.hoarding(), "pending")
    last = process(1, *samples, at=bench.now)
    bench.now += seconds
    assert not bench.evaluate(last).requests
    for _ in range(3):
        assert only(bench.hoarding(**changes), "pending")
    assert bench.hoarding(**changes).requests


def test_the_cooldown_follows_every_action_whatever_its_outcome() -> None:
    bench = Bench(rule(cooldown=10.0))
    bench.act(outcome="expired", freed=None)
    assert only(bench.hoarding(9.9), "cooling")
    bench.dispatcher.refuses = True
    assert only(bench.hoarding(0.1), "refused")
    bench.dispatcher.refuses = False
    assert only(bench.hoarding(9.9), "cooling")
    assert bench.hoarding(0.1).requests


def test_a_rule_has_a_maximum_number_of_actions_per_hour() -> None:
    bench = Bench(rule(max_per_hour=2))
    bench.act()
    bench.act()
    assert only(bench.hoarding(10.0), "limited")
    assert bench.hoarding(3600.0 - 10.0).requests


def test_no_user_uses_up_the_actions_of_another() -> None:
    bench = Bench(rule(max_per_hour=2))
    found = bench.evaluate(*(process(pid, at=bench.now, owner_uid=1001) for pid in range(1, 6)))
    assert (len(found.requests), found.counts) == (2, {("r", "limited"): 3})
    found = bench.evaluate(*(process(pid, at=bench.now, owner_uid=1002) for pid in range(11, 16)))
    assert len(found.requests) == 2


def test_a_process_on_two_devices_gets_one_action_of_the_first_rule_that_is_no_dry_run() -> None:
    bench = Bench(rule("would", dry_run=True), rule("first"), rule("second"))
    both = [sample(uuid, reclaimable=200 * MIB) for uuid in UUIDS[:2]]
    found = bench.evaluate(process(1, *both, at=bench.now))
    assert [str(caller) for _, caller in found.requests] == ["policy:would", "policy:first"]
    assert found.counts == {("would", "cooling"): 1, ("first", "cooling"): 1, ("second", "busy"): 2}


def test_a_made_up_rank_of_another_user_neither_acts_on_a_group_nor_delays_its_rule() -> None:
    bench = Bench(rule(mode="auto", cooldown=600.0))
    mine, rank = (
        process(pid, at=bench.now, workload="train", rank=str(pid), owner_uid=1001, **STEPS) for pid in (1, 2)
    )
    other = process(3, at=bench.now, workload="train", rank="1", owner_uid=1002, **STEPS)
    quiet = process(1, sample(), at=bench.now, workload="train", rank="1", owner_uid=1001)
    assert bench.evaluate(quiet, other).targets == [Target(pid=3)]
    assert bench.evaluate(mine, rank, other).targets == [Target(pid=1)]


def test_a_group_gets_one_action_and_none_while_a_rank_is_busy() -> None:
    bench = Bench(rule(mode="auto"))
    ranks = [process(pid, at=bench.now, workload="train", rank=str(pid), **STEPS) for pid in (1, 2)]
    bench.dispatcher.busy = {ranks[1].key}
    assert only(bench.evaluate(*ranks), "busy")
    bench.dispatcher.busy = set()
    found = bench.evaluate(*ranks)
    assert (found.targets, found.counts) == ([Target(pid=1)], {("r", "cooling"): 1})
    assert only(bench.evaluate(*ranks), "cooling")


def test_a_process_whose_pid_is_another_process_by_now_is_not_acted_on() -> None:
    bench = Bench(rule())
    exited = process(1, at=bench.now)
    later = process(1, sample(), at=bench.now + 0.1, owner_uid=1002)
    found = bench.evaluate(exited, later)
    assert (found.requests, found.counts) == ([], {("r", "unmet"): 1})


def test_many_decisions_are_spread_over_evaluations() -> None:
    bench = Bench(rule(max_per_hour=600))
    processes = [process(pid, at=bench.now) for pid in range(1, MAX_DECISIONS + 4)]
    found = bench.evaluate(*processes)
    assert (len(found.requests), found.counts) == (MAX_DECISIONS, {("r", "pending"): 3})
    assert len(bench.evaluate(*processes).requests) == 3


def test_a_rule_stops_after_consecutive_clears_that_release_little() -> None:
    bench = Bench(rule(stop_after=stop_after(3)))
    assert bench.act(freed=MIB) is None
    assert bench.act(freed=0) is None
    stop = bench.act(freed=2 * MIB)
    assert stop is not None
    assert re.search(r"\bempty_cache\b.*\b3\b.*\b2\.0 MiB", stop["reason"])
    assert [tried["freed_bytes"] for tried in stop["tries"]] == [MIB, 0, 2 * MIB]
    assert bench.stops() == [stop["until"]] == [iso_time(bench.now + 86400.0)]
    bench.now += 1000.0
    found = bench.evaluate(process(1, at=bench.now), process(2, at=bench.now))
    assert (found.targets, found.counts) == ([Target(pid=2)], {("r", "stopped"): 1})


def test_a_helpful_clear_resets_the_count() -> None:
    bench = Bench(rule(stop_after=stop_after(2)))
    for freed in (0, 64 * MIB, 0):
        bench.act(freed=freed)
        assert not bench.stops()
    bench.act(freed=0)
    assert bench.stops()
    assert len(bench.events) == 1


def test_a_stopped_rule_starts_again_after_the_time_in_the_file() -> None:
    bench = Bench(rule(stop_after=stop_after(2, resume_after="2h")))
    for _ in range(2):
        bench.act(freed=0)
        bench.act(freed=0)
        assert only(bench.hoarding(7199.0), "stopped")
        bench.now += 1.0
        bench.evaluate()
        assert not bench.stops()
        assert bench.act(0.0) is None


@pytest.mark.parametrize(("after", "helps"), [(1 * MIB, True), (800 * MIB, False), (900 * MIB, False)])
def test_a_garbage_collection_is_judged_by_the_bytes_that_were_allocated(after: int, helps: bool) -> None:
    bench = Bench(rule(action="collect_garbage", stop_after={"clears": "1", "freed_under": "64MiB"}))
    stop = bench.act(freed=0, allocated_before_bytes=801 * MIB, allocated_after_bytes=after)
    assert (stop is None) == helps
    bench = Bench(rule(action="collect_garbage", stop_after={"clears": "1"}))
    assert bench.act(freed=0) is None, "not measured"


def test_a_rule_for_alerts_acts_only_for_an_alert_and_on_what_the_alert_admits() -> None:
    bench = Bench(rule(trigger="alert"), rule("other", workloads=("eval",)))
    assert only(bench.hoarding(), "pending")
    pair = [process(pid, at=bench.now) for pid in (1, 2)]

    def of(*pids: int) -> Evaluation:
        admitted = {(each.key, UUIDS[0]) for each in pair if each.key.pid in pids}
        return bench.evaluate(*pair, alert=NamingAlert("r", admitted, Caller.policy("alert"), "why"))

    assert of() == ([], {})
    ((request, caller),) = of(2).requests
    assert (request.target, caller) == (Target(pid=2), Caller.policy("alert"))
    assert request.reason.startswith("why: slack_bytes ")
    found = of(1, 2)
    assert (found.targets, found.counts) == ([Target(pid=1)], {("r", "cooling"): 1})
    assert only(bench.hoarding(100.0), "pending")


def test_a_dry_run_acts_again_only_after_its_conditions_were_false_and_never_stops() -> None:
    bench = Bench(rule(dry_run=True, stop_after=stop_after(1)))
    for freed in (200 * MIB, 0):
        ((request, _),) = bench.hoarding(10.0).requests
        assert request.dry_run
        assert bench.finish(freed=freed) is None
        assert only(bench.hoarding(100.0), "cooling")
        bench.now += 1
        bench.evaluate(process(1, sample(), at=bench.now))  # something else has cleared the cache
    assert not bench.stops()


def test_a_dry_run_on_a_rank_does_not_act_again_because_its_job_validates_for_a_while() -> None:
    bench = Bench(rule(mode="auto", dry_run=True))
    assert bench.hoarding(workload="train", rank="0", **STEPS).requests
    bench.finish()
    for steps in ({"step": 5}, STEPS):
        assert only(bench.hoarding(20.0, workload="train", rank="0", **steps), "cooling")


def test_a_refused_dry_run_acts_again_after_the_cooldown() -> None:
    bench = Bench(rule(dry_run=True))
    bench.dispatcher.refuses = True
    assert only(bench.hoarding(), "refused")
    bench.dispatcher.refuses = False
    assert only(bench.hoarding(9.9), "cooling")
    assert bench.hoarding(0.1).requests


def test_an_unchanged_rule_keeps_its_state_after_a_reload() -> None:
    rules = LASTING, rule("tired", stop_after=stop_after(1))
    bench = Bench(*rules)
    bench.hoarding()
    bench.finish(freed=0)
    bench.runner.put_in_force((*rules, rule("new")), "test")
    found = bench.hoarding(10.0)
    assert [str(caller) for _, caller in found.requests] == ["policy:r"]
    assert found.counts == {("tired", "stopped"): 1, ("new", "busy"): 1}


def test_a_changed_rule_keeps_only_its_cooldown_and_limit_after_a_reload() -> None:
    bench = Bench(rule(stop_after=stop_after(1), max_per_hour=2))
    bench.hoarding()
    bench.runner.put_in_force([rule(max_per_hour=2)], "test")
    assert bench.finish(freed=0) is None, "the changed rule has not acted"
    assert only(bench.hoarding(9.0), "cooling")
    bench.act(1.0)
    assert only(bench.hoarding(10.0), "limited")


def test_a_silent_process_is_remembered_for_an_hour() -> None:
    bench = Bench(rule(stop_after=stop_after(1)))
    bench.act(freed=0)
    bench.now += 1800
    bench.evaluate()
    assert only(bench.hoarding(), "stopped")
    bench.now += 1800
    bench.evaluate()
    assert not bench.stops()


def test_a_rule_holds_back_while_an_engine_starts_and_keeps_its_budget() -> None:
    bench = Bench(rule(max_per_hour=1, cooldown=3600.0))
    bench.dispatcher.held = {ProcessKey(1, 1)}
    for _ in range(3):
        assert only(bench.hoarding(), "held_back")
    bench.dispatcher.held = set()
    assert bench.hoarding().requests, "neither the budget nor the cooldown was used"


@pytest.mark.parametrize(
    ("results", "named"),
    [
        ({"outcome": "expired", "freed": None}, "expired: why"),
        ({"outcome": "refused", "freed": None}, "refused: why"),
        ({"outcome": "refused", "freed": None, "code": ReasonCode.ENGINE_STARTING}, ""),  # a start overtook it
        ({"outcome": "gone", "freed": None}, ""),
        ({"freed": None, "still_free": 0}, ""),  # not measured
        ({"still_free": None}, ""),  # not known yet
        ({"still_free": 64 * MIB - 1}, r"200 MiB.*\b64\.0 MiB\b.*\b5\.0 s"),
        ({"still_free": 64 * MIB}, ""),
    ],
)
def test_a_rule_stops_if_its_action_was_not_done_or_too_little_is_still_free(results: Any, named: str) -> None:
    bench = Bench(rule(stop_after=stop_after(1, still_free_after=5.0)))
    stop = bench.act(**results)
    assert (stop is not None) == bool(named) == bool(bench.stops())
    assert stop is None or re.search(named, stop["reason"])


@pytest.mark.parametrize(("pause", "result"), [(5.0, "cooling"), (7200.0, "stopped")])
def test_a_job_that_makes_no_steps_for_a_while_is_not_acted_on_again(pause: float, result: str) -> None:
    stop = stop_after(1) if result == "stopped" else stop_after()
    bench = Bench(rule(mode="auto", stop_after=stop))

    def ranks(**changes: Any) -> Evaluation:
        return bench.evaluate(
            *(process(pid, at=bench.now, workload="train", rank=str(pid), world_size=2, **changes) for pid in (0, 1))
        )

    assert len(ranks(**STEPS).requests) == 1
    bench.finish(freed=0 if result == "stopped" else 200 * MIB)
    for steps in ({"step": 5}, STEPS):  # a validation, and the steps after it
        bench.now += pause
        found = ranks(**steps)
        assert not found.requests
        assert found.counts == {("r", result): 2}
        pause = 1.0
