"""The series of the last out-of-memory errors: which errors they show, their values, and their lifetime."""

from __future__ import annotations

from typing import Any

from gpumem_exporter.core.samples import LastOom
from gpumem_exporter.features.oom.last_ooms import MAX_SHOWN, SHOWN_SECONDS, LastOoms
from tests.support.builders import recorder_bench
from tests.support.builders.builders import MIB, UUIDS, sample
from tests.support.builders.exposition_builders import exposition, text_of
from tests.support.builders.recorder_bench import RecorderBench

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
        bench.forget(process, "exited")
    for step in (1e6, -2e6):
        bench.unix += step
        assert bench.shown() == {"7@1": "1001"}
    bench.wait(SHOWN_SECONDS - 100)
    assert bench.shown() == {"7@1": "1001"}
    bench.wait(0.001)
    assert bench.lines() == []


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


def test_an_owner_with_many_errors_hides_none_of_another() -> None:
    last = LastOoms()
    of_ada = [last_oom(pid=str(pid), owner="1001", happened_seconds=float(-pid)) for pid in range(1, 11)]
    last.put(of_ada)
    for pid in range(1000, 1000 + 2 * MAX_SHOWN):
        last.put([last_oom(pid=str(pid), owner="c" * 64, happened_seconds=0.0)])
    shown = last.at(0.0)
    assert len(shown) == MAX_SHOWN
    assert {oom.pid for oom in of_ada} <= {oom.pid for oom in shown}


def test_a_stored_error_replaces_no_later_one_of_its_process() -> None:
    last = LastOoms()
    last.put([last_oom(pid="1", number=2), last_oom(pid="2", session="later")])
    restored = {"happened_unix_seconds": 2e9}
    last.restore([last_oom(pid="1", number=2, **restored), last_oom(pid="2", number=9), last_oom(pid="3")])
    last.restore([last_oom(pid="1", number=1)])
    last.put([last_oom(pid="3", number=1, **restored)])
    shown = {each.pid: (each.session, each.number, each.happened_unix_seconds) for each in last.at(0.0)}
    assert shown == {"1": ("s", 2, 2e9), "2": ("later", 1, 1e9), "3": ("s", 1, 1e9)}


def last_oom(**changes: Any) -> LastOom:
    known = {"gpu": "0", "uuid": UUIDS[0], "workload": "w", "rank": "", "session": "s", "number": 1}
    return LastOom(**{**known, "happened_seconds": 0.0, "happened_unix_seconds": 1e9, **changes})


def test_an_error_that_a_process_does_not_survive_is_known() -> None:
    bench = Bench()
    for pid, age_seconds in ((7, 100.0), (8, 1.0), (9, 1.0)):
        bench.report(pid, oom(age_seconds=age_seconds), session=f"session-{pid}")
    for process in bench.snapshot().processes:
        if process.key.pid != 9:
            bench.forget(process, "exited")
    assert {error.pid: error.ended_process for error in bench.snapshot().ooms} == {
        "7@1": False,
        "8@1": True,
        "9@1": False,
    }
