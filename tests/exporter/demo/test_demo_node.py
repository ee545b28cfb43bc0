from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_client.profile.profile_types import Profile
from gpumem_client.reporter.delivery import Outcome
from gpumem_client.wire.protocol import Command, CommandResult, Reply, Report
from gpumem_exporter.core.ledger import fragmented_bytes, node_ledgers
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import PartKey, ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.demo import DemoNode, workloads_of
from gpumem_exporter.demo.heap import take_profiles
from gpumem_exporter.demo.node import TICK_SECONDS
from gpumem_exporter.demo.process import MIB, SimulatedProcess, Workload
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.profiles.profile_document import read_profile
from gpumem_exporter.features.profiles.profile_lines import by_owner, lines_of
from gpumem_exporter.node.reader import NodeReader
from gpumem_exporter.page.growth import growth

START = 1000.0
COMMANDS = itertools.count(1)


@pytest.fixture
def node() -> DemoNode:
    return DemoNode(seed=1, clock=lambda: START)


def only(chosen: Callable[[Workload], bool]) -> DemoNode:
    """Create a node with only some of the workloads."""
    workloads = [workload for workload in DEMO_WORKLOADS if chosen(workload)]
    return DemoNode(seed=1, clock=lambda: START, workloads=workloads)


def the(node: DemoNode, workload: str) -> SimulatedProcess:
    (process,) = (each for each in node.processes.values() if each.identity.workload == workload)
    return process


def report(process: SimulatedProcess) -> Report:
    return process.loop.next_report()


def run(process: SimulatedProcess, *commands: Command, cancelled: tuple[str, ...] = ()) -> tuple[CommandResult, ...]:
    """Deliver two reports, of which the first brings commands, and return the results in both."""
    first = report(process)
    process.loop.answered(first, Outcome.ACCEPTED, Reply(commands=commands, cancelled=cancelled))
    second = report(process)
    process.loop.answered(second, Outcome.ACCEPTED, Reply())
    return (*first.results, *second.results)


def command(action: str, **changes: object) -> Command:
    return Command(id=f"a{next(COMMANDS)}", action=action, deadline_seconds=30.0, **changes)  # type: ignore[arg-type]


def advance(node: DemoNode, seconds: float, since: float = START) -> Iterator[float]:
    """Advance the node tick by tick; yield the time after each tick."""
    for tick in range(1, int(seconds / TICK_SECONDS) + 1):
        now = since + tick * TICK_SECONDS
        node.advance()
        yield now


def reading(node: DemoNode) -> NodeReading:
    return NodeReader(node.provider, node.host, clock=lambda: START, wall_clock=lambda: START).read()


def reports(node: DemoNode) -> dict[SimulatedProcess, Report]:
    return {process: report(process) for process in node.processes.values() if process.reports}


def assert_exact_ledgers(node: DemoNode, sent: dict[SimulatedProcess, Report]) -> None:
    """Assert that the memory of every device adds up to the byte."""
    reporting = tuple(
        ReportingProcess(
            ProcessKey(process.identity.pid_namespace, process.pid),
            node.host.host_pid(process.identity, None),
            each,
            START,
            START,
        )
        for process, each in sent.items()
    )
    for ledger in node_ledgers(Snapshot(START, reading(node), reporting)).values():
        assert sum(ledger.categories.values()) == ledger.total_bytes
        assert ledger.categories["unattributed"] == 0
        assert min(ledger.categories.values()) >= 0


@pytest.mark.parametrize("deadline_seconds", [0.3, 1.3])
def test_a_command_whose_time_ends_is_reported_then(monkeypatch: pytest.MonkeyPatch, deadline_seconds: float) -> None:
    """The exporter waits less than a second for its result, and would then say that it may still be running."""
    node = only(lambda workload: workload.name == "demo-notebook")
    commands = [Command("late", "empty_cache", deadline_seconds, mode="idle")]
    fetched, ended, ticks = list[int](), list[int](), list[int]()

    class Exporter:
        def __init__(self, *_: object) -> None: ...

        def deliver(self, sent: Report) -> tuple[Outcome, Reply]:
            ended.extend([len(ticks) for each in sent.results if each.outcome == "expired"])
            fetched.extend([len(ticks) for _ in commands])
            reply = Reply(commands=tuple(commands))
            commands.clear()
            return Outcome.ACCEPTED, reply

    monkeypatch.setattr("gpumem_exporter.demo.node.Delivery", Exporter)
    node.connect("http://127.0.0.1:9")
    for tick in range(12):
        ticks.append(tick)
        node.advance()
    late_seconds = (ended[0] - fetched[0]) * TICK_SECONDS - deadline_seconds
    assert 0 <= late_seconds <= TICK_SECONDS


def test_the_demo_starts_with_a_busy_node(node: DemoNode) -> None:
    shown = [sample for sent in reports(node).values() for sample in sent.devices]
    assert sum(sample.alloc_retries or 0 for sample in shown) > 0
    assert sum(sample.ooms or 0 for sample in shown) > 0
    assert max(fragmented_bytes(sample) or 0 for sample in shown) > 1 << 30
    assert any(sample.private_pools_bytes for sample in shown)
    assert {"forward", "backward", "optimizer"} <= {phase for sample in shown for phase in sample.phase_peak_bytes}
    assert {"parameters", "gradients", "optimizer_state", "other"} <= {
        component for sample in shown for component in sample.component_bytes
    }
    assert all(0 < node.provider.read_utilization_ratio(device.uuid) <= 1 for device in node.provider.devices())


@pytest.mark.parametrize("count", [3, 40])
def test_a_demo_of_another_size_has_exact_ledgers(count: int) -> None:
    node = DemoNode(seed=1, clock=lambda: START, workloads=workloads_of(count))
    processes = node.processes.values()
    assert len(processes) == len({process.pid for process in processes}) == count
    jobs = [process.identity.workload for process in processes if not process.identity.rank and process.reports]
    assert len(jobs) == len(set(jobs))
    assert_exact_ledgers(node, reports(node))


def test_the_same_seed_creates_the_same_node_and_another_seed_another() -> None:
    def history(seed: int) -> list[object]:
        node = DemoNode(seed=seed, clock=lambda: START)
        seen: list[object] = [node.provider.devices()]
        seen.extend(reading(node) for _ in advance(node, 2.0))
        seen.append([report(process) for process in node.processes.values()])
        return seen

    assert history(4) == history(4)
    assert history(4) != history(5)


def test_for_ten_minutes_memory_adds_up_programs_run_and_their_idle_cache_stays_free_after_a_clear(
    node: DemoNode,
) -> None:
    """What stays free differs in jobs whose sizes or loads vary, by about a segment."""
    predicted: dict[tuple[str, str], tuple[str, int]] = {}
    still_free: dict[tuple[str, str], int] = {}
    workloads = {process.identity.workload for process in node.processes.values()}
    seen_at_the_end = set()
    for now in advance(node, 600.0):
        if now % 1.0:
            continue
        sent_now = reports(node)
        if now % 5.0 == 0.0:
            assert_exact_ledgers(node, sent_now)
        if now > START + 480.0:
            seen_at_the_end |= {process.identity.workload for process in node.processes.values()}
        clear = now - START in (80.0, 217.0, 354.0, 475.0)
        for process, sent in sent_now.items():
            still_free |= {(result.id, result.uuid): result.still_free_bytes for result in sent.still_free}
            mode = "step" if sent.step_seconds else "now"
            asked = (command("empty_cache", mode=mode, settle_seconds=10.0),) if clear else ()
            process.loop.answered(sent, Outcome.ACCEPTED, Reply(commands=asked))
            predicted |= {
                (one.id, device.uuid): (process.identity.workload, device.idle_cache_bytes)
                for one in asked
                for device in sent.devices
                if device.idle_cache_bytes is not None
            }
    assert seen_at_the_end == workloads
    missing = {predicted[key][0] for key in predicted if key not in still_free}
    assert missing <= {"demo-nightly-eval"}, "only this job ends"
    most_mib = {
        "demo-asr-varlen": 2200,  # a segment for the longest batch
        "demo-pipeline-finetune": 192,  # the copy between the devices and the gradients take turns
    }
    for key in predicted.keys() & still_free.keys():
        workload, idle_bytes = predicted[key]
        assert idle_bytes - still_free[key] <= most_mib.get(workload, 0) * MIB, workload
    notebook = {predicted[key][1]: still_free[key] for key in predicted if predicted[key][0] == "demo-notebook"}
    assert max(notebook) > 20 * 1024 * MIB
    assert all(idle_bytes == free_bytes for idle_bytes, free_bytes in notebook.items())


def test_the_hour_before_the_start_adds_up_and_leads_to_the_first_reports(node: DemoNode) -> None:
    end = 1_700_006_400
    series = {subject: list(rows) for subject, rows in node.past(end)}
    seconds = {subject: {row[1]: row[2:5] for row in rows if row[0] == 1} for subject, rows in series.items()}
    devices, jobs = ([of for subject, of in seconds.items() if getattr(subject, name)] for name in ("uuid", "job"))
    for second in range(end - 600, end):
        for value in range(3):
            on_devices, of_jobs = ([of[second][value] or 0 for of in each if second in of] for each in (devices, jobs))
            assert sum(on_devices) == pytest.approx(sum(of_jobs), abs=len(jobs)), "each is rounded to KiB"
    for subject in series:
        if not subject.uuid:
            continue
        assert sorted(seconds[subject]) == list(range(end - 3660, end))
        now = node.provider.read_memory(subject.uuid).used_bytes >> 10
        assert seconds[subject][end - 1][0] == pytest.approx(now, rel=0.2), "a phase of a step is half a second"
    for process, sent in reports(node).items():
        if process.identity.workload != "demo-nightly-eval":
            assert process.facts.started_seconds is not None
            assert process.facts.started_seconds < START - 3600
            assert None not in [sample.idle_cache_bytes for sample in sent.devices]


def test_growth_in_the_hour_before_the_start_is_the_leak_alone(node: DemoNode) -> None:
    end = 1_700_006_400.0
    history = History(retention_seconds=86400, clock=lambda: 0.0, wall_clock=lambda: end)
    history.restore(node.past(end))
    grows = {
        process.identity.workload: found
        for process, sent in reports(node).items()
        for sample in sent.devices
        if (found := growth(history.minima(PartKey(f"uid:{os.geteuid()}", process.identity.session, sample.uuid))))
    }
    assert list(grows) == ["demo-rag-indexer-leak"]
    leak = the(node, "demo-rag-indexer-leak")
    before = leak.slots[0].allocator.statistics.allocated_bytes
    for _ in advance(node, 600.0):
        pass
    grown = leak.slots[0].allocator.statistics.allocated_bytes - before
    assert grows["demo-rag-indexer-leak"].bytes_per_hour == pytest.approx(6 * grown, rel=0.1)


def test_a_garbage_collection_frees_reference_cycles(node: DemoNode) -> None:
    notebook = the(node, "demo-notebook")
    garbage_bytes = sum(tensor.block.size_bytes for tensor in notebook.garbage)
    assert garbage_bytes > 0
    (collected,) = run(notebook, command("collect_garbage"))
    (result,) = collected.devices
    assert (result.allocated_before_bytes or 0) - (result.allocated_after_bytes or 0) == garbage_bytes
    assert report(notebook).devices[0].allocated_bytes == result.allocated_after_bytes


def test_the_components_of_engines_add_up_to_the_byte_through_sleep_and_wake() -> None:
    node = only(lambda workload: workload.command == "vllm serve")
    seen: dict[str, set[str]] = {}
    for _ in advance(node, 600.0):
        for process, sent in reports(node).items():
            engine, (sample,) = sent.engine, sent.devices
            assert engine is not None
            seen.setdefault(process.identity.workload, set()).add(engine.state)
            assert sum(sample.component_bytes.values()) == sample.allocated_bytes
            assert sum(sample.component_unmapped_bytes.values()) == (sample.unmapped_bytes or 0)
            assert sum(sample.kv_cache_bytes.values()) == sample.component_bytes["kv_cache"]
    assert seen["demo-sleeping-engine"] >= {"asleep", "serving"}
    assert "serving" in seen["demo-llm-server"]
    assert "asleep" not in seen["demo-llm-server"]


@pytest.mark.parametrize("workload", ["demo-llm-server", "demo-sleeping-engine"])
def test_an_engine_sleeps_and_wakes_on_command(workload: str) -> None:
    node = only(lambda each: each.name == workload)
    engine = the(node, workload)
    for _ in advance(node, 600.0):
        if not engine.asleep:
            break
    (sample,) = report(engine).devices
    free_bytes = node.provider.read_memory(sample.uuid).free_bytes
    assert [each.outcome for each in run(engine, command("resume_memory"))] == ["refused"]
    (released,) = run(engine, command("release_memory", force=True))
    assert (released.outcome, report(engine).devices[0].unmapped_bytes) == ("done", sample.reserved_bytes)
    assert node.provider.read_memory(sample.uuid).free_bytes == free_bytes + (sample.reserved_bytes or 0)
    for _ in advance(node, 20.0, START + 600.0):
        pass
    state = report(engine).engine
    assert state is not None
    assert state.state == "asleep"
    (resumed,) = run(engine, command("resume_memory"))
    assert (resumed.outcome, report(engine).devices[0].unmapped_bytes) == ("done", None)
    assert node.provider.read_memory(sample.uuid).free_bytes == free_bytes


def profiles_of(process: SimulatedProcess) -> list[Profile]:
    """Return the list of profiles that the process sends from now on, as the exporter reads them."""
    sent: list[Profile] = []

    def send(document: bytes) -> str:
        sent.append(read_profile(document)[1])  # checks that the bytes add up
        return str(len(sent))

    take_profiles(process, send)
    return sent


def holders(profile: Profile) -> dict[str, int]:
    """Return the live bytes by the kind and the name of their owner."""
    owners = ((group.owner, group.bytes) for group in by_owner(lines_of(profile)))
    return {f"{owner.kind} {owner.name}": size for owner, size in owners if owner is not None}


def test_profiles_of_every_process_have_all_allocated_bytes(node: DemoNode) -> None:
    processes = [each for each in node.processes.values() if each.reports]
    sent = {process: profiles_of(process) for process in processes}

    def statistics(process: SimulatedProcess, name: str) -> list[int]:
        return [getattr(slot.allocator.statistics, name) for slot in process.slots]

    for process in processes:
        components = [sample.component_bytes for sample in report(process).devices]
        run(process, command("profile"), command("reset_peak"))
        (live,) = sent[process]
        assert [each.allocated_bytes for each in live.devices] == statistics(process, "allocated_bytes")
        if "parameters" in components[0]:
            held = sum(size for name, size in holders(live).items() if name.startswith("parameters "))
            assert held == sum(each["parameters"] for each in components)
        run(process, command("profile", duration_seconds=4.0))
    for _ in advance(node, 5.0):
        pass
    recorded = [process for process in processes if process.pid in node.processes]
    assert len(recorded) >= len(processes) - 1
    for process in recorded:
        report(process)
        devices = sent[process][1].devices
        assert [each.allocated_bytes for each in devices] == statistics(process, "allocated_bytes")
        assert [each.peak_bytes for each in devices] == statistics(process, "allocated_peak_bytes")


def test_two_profiles_of_the_leak_show_what_grows() -> None:
    node = only(lambda workload: workload.name.endswith("leak"))
    process = the(node, "demo-rag-indexer-leak")
    sent = profiles_of(process)
    for seconds in (START, START + 10):
        for _ in advance(node, 10.0, seconds):
            pass
        run(process, command("profile"))
    before, after = map(holders, sent)
    grew = {name: after[name] - size for name, size in before.items() if after[name] != size}
    assert sum(grew.values()) == sent[1].devices[0].allocated_bytes - sent[0].devices[0].allocated_bytes > 0
    assert list(grew) == ["tensors attribute outputs of a Result"]


def test_an_out_of_memory_error_sends_a_profile_of_its_moment() -> None:
    node = only(lambda workload: workload.name == "demo-pipeline-finetune")
    process = the(node, "demo-pipeline-finetune")
    sent = profiles_of(process)
    for _ in advance(node, 5.0):
        pass
    with pytest.raises(SimulatedOutOfMemoryError):
        process.tensor(1 << 40, device=1)
    for _ in advance(node, 5.0, START + 5.0):  # the program frees and allocates before the next report
        pass
    (oom,) = report(process).ooms
    assert oom.sample is not None
    (profile,) = sent
    assert (profile.cause, profile.oom_number) == ("out_of_memory", oom.number)
    assert [(each.uuid, each.allocated_bytes) for each in profile.devices] == [(oom.uuid, oom.sample.allocated_bytes)]
