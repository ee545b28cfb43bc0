"""What every surface of the exporter must show of a node, from the driver's books and from torch in each process.

The values of a surface are a flat mapping from what a value is about to the value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.claims.place import COMPARED
from tests.emulation.node import DeviceBook
from tests.support.builders.random_node import DEVICES, Now, Stats, World, reclaimable
from tests.support.truth.device_truth import truth

Values = Mapping[tuple[object, ...], object]
IdleCaches = Callable[[int, str, "int | None"], bool]
"""Whether a process can have an idle cache of this size on the device of a uuid."""

ALLOCATOR = {
    name.removeprefix("gpumem_torch_").removesuffix("_total"): key
    for name, key in COMPARED.items()
    if "segments" not in name and "flushes" not in name
}
"""The values of a process on a device in JSON, and their keys in `memory_stats`."""
SUMS = ("used_bytes", "non_torch_bytes", "allocated_bytes", "reserved_bytes", "reclaimable_bytes", "fragmented_bytes")
OF_PROCESS = (*SUMS, *(name for name in ALLOCATOR if name not in SUMS))
OF_JOB = ("workload", "process_count", "reporting_count", *SUMS)
MEMORY = ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes")


class TrueValues:
    """The values of a node that is quiet, in the form in which `shown_values` returns those of each surface."""

    def __init__(self, world: World) -> None:
        self.world = world

    def metrics(self, now: Now) -> Values:
        """Return the values of `/metrics`."""
        devices: dict[str, Any] = {}
        series: dict[tuple[object, ...], object] = {}
        for device in DEVICES:
            uuid, stats = self.world.node.uuid(device), now.stats[device]
            page = dict(truth(now.books[device], stats))
            if device in now.lost:
                page |= {"ledger": {}, "total": [], "used": [], "free": [], "reserved": [], "processes": {}}
            devices[uuid] = page
            for name, key in COMPARED.items():
                for pid, own in stats.items():
                    series[name, pid, uuid] = own[key]
        pids = now.workloads.keys() | {pid for device in set(DEVICES) - now.lost for pid in now.books[device].processes}
        return {**flat_values(devices), **series, **{("pid", str(pid)): True for pid in pids}}

    def document(self, now: Now) -> dict[str, Any]:
        """Return the values of live and info, not flat; `node` is not in info."""
        present = [device for device in DEVICES if device not in now.lost]
        parts = [
            (pid, device, _process_row(now.books[device], pid, now.stats[device].get(pid), lost=device in now.lost))
            for device in DEVICES
            for pid in {*now.stats[device], *(now.books[device].processes if device in present else ())}
        ]
        jobs: dict[object, list[tuple[int, int, Mapping[str, Any]]]] = {}
        for part in parts:
            jobs.setdefault(now.workloads.get(part[0], part[0]), []).append(part)
        reported = [row["used_bytes"] for pid, _, row in parts if pid in now.workloads]
        memory = {device: _memory(now.books[device]) for device in present}
        return {
            "processes": {(pid, self.world.node.uuid(device)): {**row, "idle": True} for pid, device, row in parts},
            "jobs": {name: self._job(name, of_job, now) for name, of_job in jobs.items()},
            "devices": {
                self.identified().get(device, ""): {
                    "up": device in present,
                    **memory.get(device, {}),
                    **(truth(now.books[device], now.stats[device])["ledger"] if device in present else {}),
                    "jobs": {
                        name: sum_of(row["used_bytes"] for _, on, row in of_job if on == device)
                        for name, of_job in jobs.items()
                        if any(on == device for _, on, _ in of_job) and device in self.identified()
                    },
                }
                for device in DEVICES
            },
            "node": {
                "devices": len(DEVICES),
                "jobs": len(jobs),
                "processes": len({pid for pid, _, _ in parts}),
                **{name: sum_of(each[name] for each in memory.values()) for name in MEMORY[:3]},
                "reported_bytes": sum_of(reported),
            },
        }

    def _job(self, name: object, parts: Sequence[tuple[int, int, Mapping[str, Any]]], now: Now) -> Mapping[str, Any]:
        pids = {pid for pid, _, _ in parts}
        return {
            "workload": name if name in now.workloads.values() else None,
            "process_count": len(pids),
            "reporting_count": len(pids & now.workloads.keys()),
            "uuids": sorted({self.world.node.uuid(device) for _, device, _ in parts}),
            **{key: sum_of(row[key] for _, _, row in parts) for key in SUMS},
            "idle": True,
        }

    def idle_caches(self, now: Now, *, rested: bool) -> IdleCaches:
        """Return the least and the highest value that the idle cache of a process on a device may have.

        At rest, it is what is reclaimable. Before, it is the smallest reading, at random moments, of one to five
        minutes, and unknown in the first minute of a process.
        """

        def bounds(pid: int, device: int, stats: Stats) -> tuple[int | None, int]:
            highest = reclaimable(stats)
            return highest if rested else min(value for _, value in self.world.reclaimable[pid, device]), highest

        known = {
            (pid, self.world.node.uuid(device)): bounds(pid, device, stats)
            for device in DEVICES
            for pid, stats in now.stats[device].items()
        }

        def possible(pid: int, uuid: str, shown_bytes: int | None) -> bool:
            low, high = known.get((pid, uuid), (None, 0))
            if shown_bytes is None or low is None:
                return shown_bytes is None and (low is None or not rested)
            return low <= shown_bytes <= high

        return possible

    def history(self, now: Now) -> Values:
        """Return the values of the last row in whole KiB; a value that is not known has none."""
        wanted: dict[tuple[object, ...], int | None] = {}
        document = self.document(now)
        for uuid, device in document["devices"].items():
            wanted |= {(uuid, "used"): device.get("used_bytes"), (uuid, "allocated"): device.get("torch_allocated")}
        for name, job in document["jobs"].items():
            known = not any(self.world.node.uuid(device) in job["uuids"] for device in now.lost)
            wanted |= {
                (name, "used"): job["used_bytes"] if known else None,
                (name, "allocated"): job["allocated_bytes"],
            }
        return {key: value >> 10 << 10 for key, value in wanted.items() if value is not None}

    def rules(self, now: Now, *, means: bool) -> Values:
        """Return the recorded series; with `means` also the means of a minute."""
        document = self.document(now)
        known = {uuid: device for uuid, device in document["devices"].items() if device["up"]}
        wanted: dict[tuple[object, ...], float] = {}
        for uuid, device in known.items():
            usable = device["total_bytes"] - device["driver_reserved"]
            wanted["device:gpumem_device_memory_used_bytes:ratio", uuid] = device["used_bytes"] / device["total_bytes"]
            available = device["free"] + device["torch_reclaimable"]
            wanted["device:gpumem_ledger_bytes:pressure", uuid] = 1 - available / usable
        for name, job in document["jobs"].items():
            if job["workload"]:
                for value in ("allocated", "reserved", "reclaimable", "fragmented"):
                    wanted[f"workload:gpumem_torch_{value}_bytes:sum", name] = job[f"{value}_bytes"]
                peaks = [
                    stats["reserved_bytes.all.peak"]
                    for of_device in now.stats.values()
                    for pid, stats in of_device.items()
                    if now.workloads[pid] == name
                ]
                wanted["workload:gpumem_torch_reserved_peak_bytes:max", name] = max(peaks)
                if job["used_bytes"] is not None:
                    wanted["workload:gpumem_process_memory_used_bytes:sum", name] = job["used_bytes"]
        if len(known) == len(DEVICES):
            used = sum(job["used_bytes"] for job in document["jobs"].values())
            wanted["node:gpumem_process_memory_used_bytes:coverage",] = document["node"]["reported_bytes"] / used
        if means:
            owners: Counter[str] = Counter()
            for job in document["jobs"].values():
                owners[job["workload"] or ""] += job["used_bytes"]
                if job["workload"]:
                    wanted["owner:gpumem_torch_idle_cache_bytes:mean1m", job["workload"]] = job["reclaimable_bytes"]
            for owner, size in owners.items():
                wanted["owner:gpumem_process_memory_used_bytes:mean1m", owner] = size
                if owner:
                    wanted["owner:gpumem_process_memory_used_bytes:reported_mean1m", owner] = size
        return {key: round(value, 9) for key, value in wanted.items()}

    def events(self) -> Values:
        """Return how often each start, end, error and action must be an event, and which devices are down."""
        world = self.world
        return {
            **{("process_started", pid): count for pid, count in world.starts.items()},
            **{("process_ended", pid): count for pid, count in world.ends.items()},
            **{("oom", pid, world.node.uuid(device)): count for (pid, device), count in world.errors.items()},
            **{("action", id_): 1 for id_ in world.actions},
            **{("down", uuid): device in world.lost for device, uuid in self.identified().items()},
        }

    def identified(self) -> dict[int, str]:
        """Return the devices whose uuid the exporter knows, and their uuids."""
        return {device: self.world.node.uuid(device) for device in DEVICES if device not in self.world.unidentified}


def _process_row(book: DeviceBook, pid: int, stats: Stats | None, *, lost: bool) -> dict[str, int | None]:
    """Return the values of a process on a device; without `stats`, of a process that does not report."""
    used = None if lost else book.processes[pid]
    if stats is None:
        return {**dict.fromkeys(OF_PROCESS), "used_bytes": used}
    row: dict[str, int | None] = {name: stats[key] for name, key in ALLOCATOR.items()}
    reserved, free = stats["reserved_bytes.all.current"], reclaimable(stats)
    return {
        **row,
        "used_bytes": used,
        "non_torch_bytes": None if used is None else used - reserved,
        "reclaimable_bytes": free,
        "fragmented_bytes": reserved - stats["allocated_bytes.all.current"] - free,
    }


def _memory(book: DeviceBook) -> dict[str, int]:
    return {name: getattr(book, name) for name in MEMORY}


def sum_of(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def flat_values(nested: Mapping[Any, Any]) -> Values:
    """Return nested mappings as one whose keys have the keys of all levels."""
    return dict(_flat(nested))


def _flat(nested: Mapping[Any, Any], *above: object) -> Iterator[tuple[tuple[object, ...], object]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _flat(value, *above, key)
        else:
            yield (*above, key), value
