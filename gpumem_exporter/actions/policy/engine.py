"""Evaluates the rules of a policy on what is known, once a second, and decides who is to be asked for what.

Nothing is done here: whoever calls asks for the actions that are decided and says what became of them. The time is that
of the snapshots. A condition is as good as its sample: a process whose last one is old meets none, and once it is heard
of again, a rule's `for` begins anew; so it does for another process, or another program, in the same pid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.policy.brakes import Brakes, Try
from gpumem_exporter.actions.policy.figures import FIELDS, Sighting, StillClock, sightings
from gpumem_exporter.actions.policy.model import Rule
from gpumem_exporter.actions.policy.values import shown_value
from gpumem_exporter.actions.request import ActionRequest, Target
from gpumem_exporter.core.naming import Names, json_pid
from gpumem_exporter.core.samples import ProcessKey, Snapshot

__all__ = ["Decision", "Engine", "Round", "Stop"]

MAX_DECISIONS = 16
"""Of one round, for all rules: further ones wait for the next."""
_FORGET_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A rule acts: somebody is to be asked."""

    rule: Rule
    whom: str
    """The process, or for a group its workload: `Sighting.who`, or a name that no process has."""
    sighting: Sighting
    """The one that met the conditions."""
    request: ActionRequest


@dataclass(frozen=True, slots=True)
class Stop:
    """A rule leaves somebody alone from now on, since what it did there has not helped."""

    rule: Rule
    action: Action
    """The last one."""
    tries: tuple[Try, ...]

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        times = f"{len(self.tries)} times in a row" if len(self.tries) > 1 else "once"
        return f"{self.action.action} did not help {times}: {self.tries[-1].why}"


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one evaluation."""

    decisions: tuple[Decision, ...]
    stops: tuple[Stop, ...]
    counts: dict[tuple[str, str], int]
    """By rule and result, without what is decided."""


@dataclass(slots=True)
class _Ruling:
    """A rule and what is remembered for it."""

    rule: Rule
    brakes: Brakes
    met: dict[str, float] = field(default_factory=dict)
    """Since when all conditions hold, by process and device, in time of the samples."""
    presumed: set[str] = field(default_factory=set)
    """Of a dry run: where the action would have made an end of what met the conditions, until they are met anew."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """What was given back, and is looked at again later."""

    decision: Decision
    action: Action
    freed_bytes: int
    reserved_before_bytes: int
    due_seconds: float


class Engine:
    """The rules, with what each has to remember. Not thread-safe.

    Args:
        rules: in the order in which they act where several would.
        stale_seconds: a sample that is older is not what its process is like.
    """

    def __init__(self, rules: Sequence[Rule], *, stale_seconds: float) -> None:
        self._stale_seconds = stale_seconds
        self._rulings = {rule.name: _Ruling(rule, Brakes(rule)) for rule in rules}
        self._trials: list[_Trial] = []
        self._still = StillClock(stale_seconds)
        self._asks_for_stillness = any(c.field == "idle_seconds" for rule in rules for c in rule.when)
        self._forgot_seconds = 0.0

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that are evaluated."""
        return tuple(ruling.rule for ruling in self._rulings.values())

    def stopped(self, rule: str) -> int:
        """In how many processes, or workloads, a rule has stopped."""
        return self._rulings[rule].brakes.stopped()

    def take_over(self, earlier: Engine) -> None:
        """Go on where another engine was: for the rules that are the same. A changed one keeps its rests alone."""
        self._still = earlier._still
        for name, ruling in self._rulings.items():
            before = earlier._rulings.get(name)
            if before is not None:
                ruling.brakes.take_over(before.brakes)
                if ruling.rule == before.rule:
                    ruling.met, ruling.presumed = before.met, before.presumed
        self._trials = [trial for trial in earlier._trials if self._ruling(trial.decision) is not None]

    def evaluate(self, snapshot: Snapshot, under_way: Callable[[], AbstractSet[ProcessKey]]) -> Round:
        """Evaluate every rule on every process that it is for.

        Args:
            snapshot: what is known now.
            under_way: in which processes an action is; asked where there is something to decide.
        """
        now = snapshot.taken_seconds
        seen = tuple(sightings(snapshot, self._stale_seconds, self._still if self._asks_for_stillness else None))
        stops = self._look_again(seen) if self._trials else ()
        places = [f"{each.who}:{each.sample.uuid}" for each in seen]
        by_workload: dict[str, list[int]] = {}
        for index, each in enumerate(seen):
            by_workload.setdefault(each.process.report.process.workload, []).append(index)
        columns: dict[str, list[float]] = {}
        desk = _Desk(snapshot, under_way)
        for ruling in self._rulings.values():
            rule = ruling.rule
            named = [indices for name, indices in by_workload.items() if rule.concerns(name)]
            concerned = named[0] if len(named) == 1 else [i for indices in named for i in indices]
            met = concerned
            for condition in rule.when:
                column = columns.get(condition.field)
                if column is None:
                    of = FIELDS[condition.field].of
                    column = columns[condition.field] = [of(each) for each in seen]
                over, under = condition.over, condition.under
                met = [i for i in met if over < column[i] < under]  # never for NaN
                if not met:
                    break
            desk.count(rule, "unmet", len(concerned) - len(met))
            since = ruling.met
            ruling.met = since = {places[i]: since.get(places[i], seen[i].sampled_seconds) for i in met}
            if ruling.presumed:
                ruling.presumed &= {_whom(rule, seen[i]) for i in met}
            ready = [i for i in met if seen[i].sampled_seconds - since[places[i]] >= rule.for_seconds]
            desk.count(rule, "pending", len(met) - len(ready))
            for i in ready:
                if self._decide(ruling, seen[i], desk, now):
                    since[places[i]] = seen[i].sampled_seconds
        if now - self._forgot_seconds >= _FORGET_SECONDS:
            self._forgot_seconds = now
            present: set[str] = {each.who for each in seen}
            present.update(_group(name) for name in by_workload)
            for ruling in self._rulings.values():
                ruling.brakes.forget(present, now)
        return Round(tuple(desk.decisions), stops, desk.counts)

    def finished(self, decision: Decision, action: Action, now: float) -> Stop | None:
        """What was decided has been done, or has failed; gives the end of the rule there, if this is it."""
        ruling = self._ruling(decision)
        stop_after = decision.rule.stop_after
        if ruling is None:
            return None
        if action.dry_run:
            ruling.presumed.add(decision.whom)
        if stop_after is None:
            return None
        outcomes = {result.outcome for result in action.results}
        if outcomes <= {"gone"}:
            return None
        if "done" not in outcomes:
            reasons = dict.fromkeys(f"{result.outcome}: {result.reason}" for result in action.results)
            return self._in_vain(ruling, decision, action, None, "; ".join(reasons))
        freed = action.freed_bytes
        if freed is None:
            return None  # not measured: neither good nor bad
        if freed < stop_after.freed_under_bytes:
            ruling.presumed.discard(decision.whom)
            return self._in_vain(ruling, decision, action, freed, f"{shown_value(freed, 'bytes')} came back")
        reserved = [result.reserved_before_bytes for result in action.results]
        if stop_after.still_free_seconds is None or action.dry_run or None in reserved:
            ruling.brakes.helped(decision.whom)
        else:
            before = sum(each for each in reserved if each is not None)
            self._trials.append(_Trial(decision, action, freed, before, now + stop_after.still_free_seconds))
        return None

    def _decide(self, ruling: _Ruling, seen: Sighting, desk: _Desk, now: float) -> bool:
        """Whether a rule whose conditions have held for long enough acts."""
        rule = ruling.rule
        if desk.full:
            desk.count(rule, "pending")
            return False
        workload = seen.process.report.process.workload
        whom = _whom(rule, seen)
        objection = ruling.brakes.objection(whom, now) or desk.objection(rule, seen, workload)
        if whom in ruling.presumed:
            objection = objection or "cooling"
        if objection:
            desk.count(rule, objection)
            return False
        name = desk.name(seen.process.key)
        if name is None:
            desk.count(rule, "unmet")  # the host says that it has gone
            return False
        ruling.brakes.asked(whom, now)
        target = Target(workload=workload) if rule.asks.group else Target(pid=json_pid(name))
        request = replace(rule.asks, target=target, dry_run=rule.dry_run, reason=_reason(rule, seen))
        desk.decide(Decision(rule, whom, seen, request), workload)
        return True

    def _look_again(self, seen: Iterable[Sighting]) -> tuple[Stop, ...]:
        """Of what was given back some time ago, what has been taken again."""
        reserved: dict[str, int | None] = {}
        sampled: dict[str, float] = {}
        for each in seen:
            for whom in (each.who, _group(each.process.report.process.workload)):
                known, more = reserved.get(whom, 0), each.sample.reserved_bytes
                reserved[whom] = None if known is None or more is None else known + more
                sampled[whom] = min(sampled.get(whom, each.sampled_seconds), each.sampled_seconds)
        waiting: list[_Trial] = []
        stops: list[Stop | None] = []
        for trial in self._trials:
            whom, ruling = trial.decision.whom, self._ruling(trial.decision)
            now_reserved = reserved.get(whom)
            if ruling is None or now_reserved is None:
                continue  # it has gone, or cannot be known any more
            if sampled[whom] < trial.due_seconds:
                waiting.append(trial)
                continue
            stop_after = ruling.rule.stop_after
            still_free = trial.reserved_before_bytes - now_reserved
            if stop_after is None or still_free >= stop_after.freed_under_bytes:
                ruling.brakes.helped(whom)
                continue
            came_back, still = (shown_value(size, "bytes") for size in (trial.freed_bytes, max(0, still_free)))
            after = shown_value(stop_after.still_free_seconds or 0.0, "seconds")
            why = f"{came_back} came back, and {still} of it were still free after {after}"
            stops.append(self._in_vain(ruling, trial.decision, trial.action, trial.freed_bytes, why))
        self._trials = waiting
        return tuple(stop for stop in stops if stop is not None)

    def _in_vain(
        self, ruling: _Ruling, decision: Decision, action: Action, freed_bytes: int | None, why: str
    ) -> Stop | None:
        tries = ruling.brakes.in_vain(decision.whom, Try(action.id, freed_bytes, why))
        return Stop(ruling.rule, action, tries) if tries else None

    def _ruling(self, decision: Decision) -> _Ruling | None:
        """Where a decision belongs; None once its rule was changed or taken away."""
        ruling = self._rulings.get(decision.rule.name)
        return ruling if ruling is not None and ruling.rule == decision.rule else None


class _Desk:
    """What is decided and counted in one round."""

    def __init__(self, snapshot: Snapshot, under_way: Callable[[], AbstractSet[ProcessKey]]) -> None:
        self.decisions: list[Decision] = []
        self.counts: dict[tuple[str, str], int] = {}
        self._snapshot = snapshot
        self._ask_under_way = under_way
        self._under_way: set[ProcessKey] | None = None
        self._names: dict[ProcessKey, str] | None = None

    @property
    def full(self) -> bool:
        return len(self.decisions) >= MAX_DECISIONS

    def count(self, rule: Rule, result: str, count: int = 1) -> None:
        if count:
            self.counts[rule.name, result] = self.counts.get((rule.name, result), 0) + count

    def objection(self, rule: Rule, seen: Sighting, workload: str) -> str:
        """Whether something is under way where the rule would act."""
        if self._under_way is None:
            self._under_way = set(self._ask_under_way())
        keys = self._keys(workload) if rule.asks.group else (seen.process.key,)
        return "busy" if not self._under_way.isdisjoint(keys) else ""

    def name(self, key: ProcessKey) -> str | None:
        if self._names is None:
            self._names = {process.key: name for name, process in Names.of(self._snapshot).reporting}
        return self._names.get(key)

    def decide(self, decision: Decision, workload: str) -> None:
        self.decisions.append(decision)
        if not decision.rule.dry_run and self._under_way is not None:
            group = decision.rule.asks.group
            self._under_way.update(self._keys(workload) if group else (decision.sighting.process.key,))

    def _keys(self, workload: str) -> Iterable[ProcessKey]:
        return [each.key for each in self._snapshot.processes if each.report.process.workload == workload]


def _whom(rule: Rule, seen: Sighting) -> str:
    """Who is asked, and left alone afterwards: a process on all its devices, or all ranks."""
    return _group(seen.process.report.process.workload) if rule.asks.group else seen.who


def _group(workload: str) -> str:
    """Of a workload, what no process is called."""
    return f"workload {workload}"


def _reason(rule: Rule, seen: Sighting) -> str:
    """What held, for the audit log."""
    parts = []
    for condition in rule.when:
        kind = FIELDS[condition.field]
        bounds = [
            f"{word} {shown_value(bound, kind.unit)}"
            for word, bound in (("over", condition.over), ("under", condition.under))
            if abs(bound) != float("inf")
        ]
        parts.append(f"{condition.field} {shown_value(kind.of(seen), kind.unit)} ({' and '.join(bounds)})")
    return ", ".join(parts)
