"""The series of the last out-of-memory errors: which errors they show, their values, and their lifetime."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpumem_exporter.core.last_ooms import MAX_SHOWN, SHOWN_SECONDS, LastOom, LastOoms
from gpumem_exporter.core.samples import DeviceReading
from tests.support import recorder_bench
from tests.support.builders import MIB, UUIDS, device, sample
from tests.support.exposition_builders import exposition, text_of
from tests.support.recorder_bench import RecorderBench

NAMES = ("timestamp_seconds", *(f"{name}_bytes" for name in ("requested", "device_free", "limit", "allocated")))
NAMES += tuple(f"{name}_bytes" for name in ("reserved", "reclaimable", "fragmented"))


def oom(number: int = 1, uuid: str = UUIDS[0], **changes: Any) -> Any:
    return recorder_bench.oom(number, uuid, **{"requested_bytes": 1000 + number, **changes})


class Bench(RecorderBench):
    """A recorder with a metrics page."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = exposition()

    def page(self) -> str:
        return text_of(self.writer, self.snapshot())

    def lines(self) -> list[str]:
        return [line for line in self.page().splitlines() if line.startswith("gpumem_last_oom_")]

    def shown(self, name: str = "requested_bytes") -> dict[str, str]:
        """Return the text of each series' value by pid; each pid has at most one."""
        lines = [line for line in self.lines() if line.startswith(f"gpumem_last_oom_{name}{{")]
        found = {line.split('pid="')[1].split('"')[0]: line.rsplit(" ", 1)[1] for line in lines}
        assert len(found) == len(lines)
        return found


def test_an_unknown_value_is_absent() -> None:
    bench = Bench()
    bench.report(7, oom(requested_bytes=None), oom(2, UUIDS[1], sample=sample(UUIDS[1], MIB)))
    (first,) = [line for line in bench.lines() if UUIDS[0] in line]
    assert first.startswith('gpumem_last_oom_timestamp_seconds{gpu="",')
    second = [line.split("{")[0].removeprefix("gpumem_last_oom_") for line in bench.lines() if UUIDS[1] in line]
    assert second == [name for name in NAMES if name not in ("device_free_bytes", "limit_bytes")]


def test_an_error_is_shown_for_an_hour_by_the_monotonic_clock_even_after_its_process_exits() -> None:
    bench = Bench()
    bench.report(7, oom(age_seconds=100.0))
    bench.report(8, oom(age_seconds=4000.0))
    assert bench.shown().keys() == {"7@1"}
    for process in bench.snapshot().processes:
        bench.store.forget(process.key)
    for step in (1e6, -2e6):
        bench.unix += step
        assert bench.shown() == {"7@1": "1001"}
    bench.wait(SHOWN_SECONDS - 100)
    assert bench.shown() == {"7@1": "1001"}
    bench.wait(0.001)
    assert bench.lines() == []


def test_an_error_that_a_process_does_not_survive_is_known() -> None:
    bench = Bench()
    for pid, age_seconds in ((7, 100.0), (8, 1.0), (9, 1.0)):
        bench.report(pid, oom(age_seconds=age_seconds), session=f"session-{pid}")
    for process in bench.snapshot().processes:
        if process.key.pid != 9:
            bench.store.forget(process.key)
    assert {error.pid: error.ended_process for error in bench.snapshot().ooms} == {
        "7@1": False,
        "8@1": True,
        "9@1": False,
    }


def test_the_error_of_a_lost_device_keeps_its_index() -> None:
    bench = Bench()
    bench.reading(device(gpu="3"))
    bench.report(7, oom())
    for later in ((DeviceReading("5", UUIDS[0], error="lost"),), ()):
        bench.wait(1)
        bench.reading(*later)
        assert bench.lines()
        assert all('{gpu="3",' in line for line in bench.lines())


def test_at_most_256_errors_are_shown_and_the_oldest_are_dropped() -> None:
    bench = Bench()
    for pid in range(1, MAX_SHOWN + 11):
        bench.report(pid, oom(), session=str(pid))
        bench.wait(1)
    assert bench.shown().keys() == {f"{pid}@1" for pid in range(11, MAX_SHOWN + 11)}
    bench.report(999, oom(age_seconds=MAX_SHOWN + 5.0), session="late")
    assert bench.shown().keys() == {f"{pid}@1" for pid in range(11, MAX_SHOWN + 11)}
    bench.report(11, oom(2), session="11", sequence=2)  # the oldest process now has the newest error
    bench.report(1000, oom(), session="1000")
    assert bench.shown().keys() == {"11@1", *(f"{pid}@1" for pid in range(13, MAX_SHOWN + 11)), "1000@1"}


def test_the_work_grows_with_the_errors_and_not_with_their_square() -> None:
    class Owner(str):
        """Counts how often it is looked up."""

        __slots__ = ()
        lookups = 0

        def __hash__(self) -> int:
            Owner.lookups += 1
            return super().__hash__()

    owners, count = [Owner("uid=1000"), Owner("uid=1001")], 8 * MAX_SHOWN
    ooms = LastOoms()
    ooms.restore(last_oom(pid=str(pid), owner=owners[pid % 2], happened_seconds=float(pid)) for pid in range(count))
    assert len(ooms.shown) == MAX_SHOWN
    assert count <= Owner.lookups <= 2 * count


def test_an_owner_with_many_errors_hides_none_of_another() -> None:
    store = Bench().store
    of_ada = [last_oom(pid=str(pid), owner="1001", happened_seconds=float(-pid)) for pid in range(1, 11)]
    store.put_ooms(of_ada)
    for pid in range(1000, 1000 + 2 * MAX_SHOWN):
        store.put_ooms([last_oom(pid=str(pid), owner="c" * 64, happened_seconds=0.0)])
    shown = store.snapshot(0.0).ooms
    assert len(shown) == MAX_SHOWN
    assert {oom.pid for oom in of_ada} <= {oom.pid for oom in shown}


def last_oom(**changes: Any) -> LastOom:
    known = {"gpu": "0", "uuid": UUIDS[0], "workload": "w", "rank": "", "session": "s", "number": 1}
    return LastOom(**{**known, "happened_unix_seconds": 1e9, **changes})


_ooms = st.builds(
    LastOom,
    gpu=st.sampled_from(["0", "1", ""]),
    uuid=st.sampled_from(UUIDS[:2]),
    pid=st.sampled_from(["1", "2", "1@5"]),
    workload=st.sampled_from(["w", 'x"y']),
    rank=st.just(""),
    session=st.sampled_from(["a", "b"]),
    number=st.integers(1, 3),
    happened_seconds=st.floats(-2 * SHOWN_SECONDS, 0),
    happened_unix_seconds=st.floats(1e9, 2e9),
    requested_bytes=st.none() | st.integers(0, 2**63),
)


@given(
    st.lists(st.tuples(st.sampled_from(["put", "recall"]), st.lists(_ooms, max_size=4)), max_size=8),
    st.lists(st.floats(0, SHOWN_SECONDS), max_size=3).map(sorted),
)
def test_series_are_unique_and_of_the_last_hour(taken: list[tuple[str, list[LastOom]]], times: list[float]) -> None:
    bench = Bench()
    last: dict[tuple[str, str], LastOom] = {}
    for how, ooms in taken:
        (bench.store.put_ooms if how == "put" else bench.store.restore_ooms)(ooms)
        for each in ooms:
            known = last.get((each.uuid, each.pid))
            same = known is not None and known.session == each.session
            if how == "put":
                wins = known is None or not same or each.number > known.number
            else:
                wins = known is None or (same and each.number >= known.number)
            if wins:
                last[each.uuid, each.pid] = each
    for bench.now in times:
        families = {family.name: family.samples for family in text_string_to_metric_families(bench.page())}
        samples = families.get("gpumem_last_oom_timestamp_seconds", [])
        series = {(found.labels["uuid"], found.labels["pid"]): found.value for found in samples}
        assert len(series) == len(samples)
        assert series == {
            key: each.happened_unix_seconds
            for key, each in last.items()
            if bench.now - each.happened_seconds <= SHOWN_SECONDS
        }
