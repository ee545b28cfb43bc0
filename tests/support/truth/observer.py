"""Compares what every surface of the exporter shows with what is true on the node, and counts both.

The truth comes from the emulated driver's books and from `memory_stats` in each process, never from the exporter. A
surface is a flat mapping from what a value is about to the value; it must have exactly the values of the truth.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tests.emulation.torch_process import TorchProcess
from tests.support.builders.random_node import DEVICES, World
from tests.support.truth.device_truth import scrape, shown
from tests.support.truth.shown_values import (
    HISTORY,
    LIVE,
    labels_of,
    name_of,
    of_events,
    of_history,
    of_info,
    of_live,
    of_metrics,
    of_rules,
)
from tests.support.truth.true_values import TrueValues, Values, flat_values
from tests.support.waiting import patient

SETTLE_SECONDS, REST_SECONDS = 90.0, 150.0
"""Longer than the longest pause between two attempts to read a lost device, and than two minutes of recording rules."""
READING_SECONDS = 2.0
"""Longer than a reading of the driver: one that started before the end of a process may be shown after a page without
it."""
INFO = "info --json"
EACH_SCRAPE, METRICS, EVENTS = "/metrics, each scrape", "/metrics", "/api/v1/events"
RULES, CLEARS = "recording rules", "clears"


class Observer:
    """The comparisons of a run.

    `compared` and `mismatches` have an entry for each surface. A check waits until a surface shows the truth; what
    still differs after `SETTLE_SECONDS` is a mismatch. `prometheus` is the URL of a Prometheus that scrapes the
    exporter and evaluates the recording rules.
    """

    def __init__(self, world: World, prometheus: str = "") -> None:
        self.world = world
        self._true = TrueValues(world)
        self._prometheus = prometheus
        self.compared: Counter[str] = Counter()
        self.mismatches: dict[str, list[str]] = {}

    def wrong(self) -> list[str]:
        """Return all mismatches."""
        return [f"{surface}: {text}" for surface, texts in self.mismatches.items() for text in texts]

    # In every scrape

    def check(self) -> None:
        """Check what is true in every scrape, before reports and readings have followed the last step."""
        world = self.world
        world.now()
        metrics = scrape(world.exporter)
        on_page = {pid for pid in labels_of(metrics, "pid") if pid.isdecimal()}
        world_pids = {str(pid) for pid in world.alive() | world.ending.keys()}
        self._note(EACH_SCRAPE, len(on_page), [f"process {pid} is not on the node" for pid in on_page - world_pids])
        recently = time.monotonic() - READING_SECONDS
        world.ending = {pid: end for pid, end in world.ending.items() if str(pid) in on_page or end > recently}
        uuids = {uuid for uuid in labels_of(metrics, "uuid") if uuid}
        unknown = uuids - {world.node.uuid(device) for device in DEVICES}
        self._note(EACH_SCRAPE, len(uuids), [f"device {uuid} is not on the node" for uuid in unknown])
        for labels, up in metrics.samples.get("gpumem_device_up", {}).items():
            uuid = dict(labels)["uuid"]
            if up or not uuid:
                continue
            values = shown(metrics, uuid)
            known = [
                f"{name} of device {uuid}, which is down" for name in values if name != "allocated" and values[name]
            ]
            self._note(EACH_SCRAPE, len(values), known)
        # Non-torch memory has only values that it really had, whatever the allocator did meanwhile.
        non_torch = metrics.samples.get("gpumem_torch_non_torch_bytes", {})
        wrong = [
            f"non-torch memory of {dict(labels)}: {value}"
            for labels, value in non_torch.items()
            if value not in world.non_torch.get((dict(labels)["pid"], dict(labels)["uuid"]), ())
        ]
        self._note(EACH_SCRAPE, len(non_torch), wrong)

    # While the node is quiet

    def check_quiet(self, rng: random.Random, *, command: bool = True) -> None:
        """Check every value to the byte, once reports and readings have followed; `info` only with `command`."""
        world = self.world
        world.adopt_started()
        self.check_values(command=command)
        world.ending.clear()  # the page had no other processes than the node
        self.check()
        self._check_clear(rng.choice(list(world.torches)))
        self.check_events()

    def check_values(self, *, command: bool = True, rested: bool = False) -> None:
        """Check the values of all surfaces; `rested` is whether nothing has happened for longer than a minute."""
        world, exporter, true = self.world, self.world.exporter, self._true
        now = world.now()
        limit = REST_SECONDS if rested else SETTLE_SECONDS
        uuids = [world.node.uuid(device) for device in DEVICES]
        self.compare(METRICS, lambda: of_metrics(scrape(exporter), uuids), true.metrics(now), limit)
        idle, wanted = true.idle_caches(now, rested=rested), true.document(now)
        self.compare(LIVE, lambda: of_live(exporter, idle), flat_values(wanted), limit)
        # Only now does the exporter have each job.
        ids = {job["id"]: name_of(job) for job in exporter.get(LIVE)["jobs"]}
        self.compare(HISTORY, lambda: of_history(exporter, uuids, ids), true.history(now), limit)
        if command:
            del wanted["node"]
            self.compare(INFO, lambda: of_info(exporter, idle), flat_values(wanted), limit)
        if self._prometheus:
            rules = true.rules(now, means=rested)
            names = {str(name) for name, *_ in rules}
            self.compare(RULES, lambda: of_rules(self._prometheus, names), rules, limit)

    def check_events(self) -> None:
        """Check that each start, end, error, action and loss of a device is an event exactly once."""
        uuids = self._true.identified().values()
        self.compare(EVENTS, lambda: of_events(self.world.exporter, uuids), self._true.events())
        self.world.owing.clear()

    def _check_clear(self, process: TorchProcess) -> None:
        """Check that torch, the driver and the action agree on the bytes that a clear releases."""
        world, pid = self.world, str(process.pid)

        def reserved() -> int:
            return sum(process.call("stats", device=device)["reserved_bytes.all.current"] for device in DEVICES)

        def used() -> int:
            return sum(book.used_bytes for book in world.node.books().devices)

        before, books = reserved(), used()
        shown_bytes = sum(scrape(world.exporter).values("gpumem_torch_reclaimable_bytes", pid=pid))
        action = world.act("empty_cache", process)
        found = {"reclaimable": shown_bytes, "torch": before - reserved(), "driver": books - used()}
        freed = action["freed_bytes"]
        self._note(CLEARS, len(found), [f"{key} {size}, not {freed}" for key, size in found.items() if size != freed])

    # Counting

    def compare(
        self, surface: str, read: Callable[[], Values], wanted: Values, limit_seconds: float = SETTLE_SECONDS
    ) -> None:
        """Read a surface until it shows what is wanted, and count the values."""
        end, found = time.monotonic() + patient(limit_seconds), read()
        while found != wanted and time.monotonic() < end:
            time.sleep(0.05)  # a read costs the exporter
            found = read()
        apart = [key for key in {**wanted, **found} if wanted.get(key, "absent") != found.get(key, "absent")]
        texts = [f"{key}: {found.get(key, 'absent')}, not {wanted.get(key, 'absent')}" for key in apart]
        self._note(surface, len(wanted), texts)

    def _note(self, surface: str, compared: int, mismatches: Sequence[str]) -> None:
        self.compared[surface] += compared
        self.mismatches.setdefault(surface, []).extend(f"step {self.world.steps}: {text}" for text in mismatches)
