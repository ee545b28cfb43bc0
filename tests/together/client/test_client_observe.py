"""Phases, milestones and summaries in real PyTorch processes, on the emulated node and without CUDA."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.processes.observed_training import PARAMETERS_BYTES as PARAMETERS
from tests.support.processes.observed_training import TRAINING, process_of_the_module, shared_process
from tests.support.servers.exporter_process import QUICK
from tests.support.waiting import wait_until_equal

__all__ = ["process_of_the_module", "shared_process"]

MIB = 1 << 20


def test_peaks_of_phases_agree_with_torch_also_for_backward_in_other_threads(
    shared_process: TorchProcess,
) -> None:
    reply = shared_process.exec(
        """
model, optimizer = make()
for _ in range(2):
    step(model, optimizer)
truth = {}
class Alone:
    def __init__(self, name): self.name = name
    def __enter__(self): torch.cuda.reset_peak_memory_stats(0)
    def __exit__(self, *_): truth[self.name] = torch.cuda.max_memory_allocated(0)
step(model, optimizer, Alone)
overall = max(truth.values())
def collect(reset):
    uses = {}
    @contextlib.contextmanager
    def around(name):
        with gpumem.phase(name, reset_peaks=reset) as use:
            yield
        uses[name] = use
    step(model, optimizer, around)
    return {name: (use.peak_bytes, use.devices[0].peak_at_most_bytes, use.exact) for name, use in uses.items()}
torch.cuda.reset_peak_memory_stats(0)
result = {"truth": truth, "first": collect(False), "later": collect(False), "reset": collect(True),
          "overall": gpumem.memory_summary().devices[0].allocated_peak_bytes,
          "torch": torch.cuda.max_memory_allocated(0)}
"""
    )
    truth = reply["truth"]
    assert truth["backward"] > truth["forward"] > truth["optimizer"]
    # the peak rises in forward and again in backward, so both are exact
    assert reply["first"]["forward"] == [truth["forward"], truth["forward"], True]
    assert reply["first"]["backward"] == [truth["backward"], truth["backward"], True]
    for name, (at_least, at_most, exact) in reply["later"].items():
        assert at_least <= truth[name] <= at_most == truth["backward"]
        assert not exact or at_least == truth[name]
    assert reply["reset"] == {name: [peak, peak, True] for name, peak in truth.items()}
    assert reply["overall"] == truth["backward"] > reply["torch"]  # the resets by phases do not count


def test_metrics_show_phases_and_components_to_the_byte(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    reply = process.exec(
        TRAINING
        + """
gpumem.start()
model, optimizer = make()
watching = toolkit.watch(model, optimizer)
uses = {}
@contextlib.contextmanager
def around(name):
    with gpumem.phase(name, reset_peaks=True) as use:
        yield
    uses[name] = use
step(model, optimizer, around)
(counted, _) = watching.latest
result = {"peaks": {name: use.peak_bytes for name, use in uses.items()},
          "components": {name: getattr(counted, name) for name in counted.__slots__ if name != "index"}}
"""
    )

    def exported(name: str, label: str) -> dict[str, float]:
        samples = exporter.metrics().samples.get(name, {})
        return {dict(labels)[label]: value for labels, value in samples.items()}

    wait_until_equal(lambda: exported("gpumem_torch_phase_peak_bytes", "phase"), reply["peaks"], "the peaks")
    # wait for each value: on a slow machine the series expire before a late report
    wait_until_equal(lambda: exported("gpumem_torch_component_bytes", "component"), reply["components"], "components")
    peak = max(reply["peaks"].values())
    wait_until_equal(lambda: exporter.metrics().values("gpumem_torch_allocated_peak_bytes"), [peak], "the peak of all")
    process.exec("del model, optimizer; gc.collect()")
    wait_until_equal(lambda: exported("gpumem_torch_component_bytes", "component"), {}, "the end of the components")


def test_observing_keeps_no_tensor_alive(shared_process: TorchProcess) -> None:
    reply = shared_process.exec(
        """
from gpumem_client.phases.observed import process_observed
gc.disable()
torch._C._cuda_clearCublasWorkspaces()
before = torch.cuda.memory_allocated(0)
model, optimizer = make()
seen = toolkit.milestones(model, optimizer)
watching = toolkit.watch(model, optimizer)
phase = gpumem.phase("all")
with phase:
    step(model, optimizer, gpumem.phase)
    step(model, optimizer, gpumem.memory_context)
reply = gpumem.memory_summary()
counted = bool(watching.latest)
del model, optimizer
torch.cuda.synchronize()
torch._C._cuda_clearCublasWorkspaces()
result = counted, torch.cuda.memory_allocated(0) - before, process_observed().components(0)
gc.enable()
"""
    )
    assert reply == [True, 0, {}]


SAME = """
def course(observing):
    model, optimizer = make()
    losses, statistics = [], []
    with contextlib.ExitStack() as stack:
        around = lambda name: contextlib.nullcontext()
        if observing:
            watching = stack.enter_context(toolkit.watch(model, optimizer))
            stack.enter_context(toolkit.milestones(model, optimizer))
            stack.enter_context(gpumem.phase("all"))
            around = gpumem.phase
        for _ in range(4):
            losses.append(step(model, optimizer, around))
            if observing:
                with gpumem.memory_context("step"):
                    gpumem.log_summary("step")
                watching.look()
                gpumem.step()
            statistics.append(dict(torch.cuda.memory_stats(0)))
    return losses, statistics
"""


def test_observing_changes_neither_losses_nor_statistics_of_the_allocator(
    start_torch: StartTorch,
) -> None:
    processes = [start_torch(), start_torch()]
    runs = [
        process.exec(TRAINING + SAME + f"result = course({observing})")
        for process, observing in zip(processes, (False, True), strict=True)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0][1]) == 4
    assert runs[0][1][0]["allocated_bytes.all.peak"] > PARAMETERS


def test_a_torch_function_mode_of_the_user_sees_only_the_user_s_calls(shared_process: TorchProcess) -> None:
    seen = shared_process.exec(
        """
from torch.overrides import TorchFunctionMode
class Seeing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        calls.append(str(function))
        return function(*args, **(kwargs or {}))
result = []
for observed in (False, True):
    model, optimizer = make()
    step(model, optimizer)
    calls, ends = [], []
    with Seeing():
        if observed:
            watch, seen = toolkit.watch(model, optimizer), toolkit.milestones(model, optimizer)
            ends += [watch.close, seen.close]
        for _ in range(2):
            step(model, optimizer, around=gpumem.phase if observed else lambda name: contextlib.nullcontext())
        if observed:
            counted, found = bool(watch.look()), bool(toolkit.lingering_tensors().groups)
    for end in ends:
        end()
    result.append(len(calls))
result += [counted, found]
"""
    )
    assert seen[0] == seen[1] > 0
    assert seen[2:] == [True, True]


def test_a_summary_agrees_with_torch_and_the_driver(node: EmulatedNode, start_torch: StartTorch) -> None:
    process = start_torch()
    node.set_process(pid=1, device=1, nbytes=3 * MIB)
    process.exec(TRAINING)
    process.call("random_heap", device=1, seed=5)
    reply = process.exec(
        """
summary = gpumem.memory_summary()
fields = [name for name in dir(summary.devices[0]) if name[0] != "_" and name not in ("phases", "components")]
result = {"contexts": worker.contexts(),
          "devices": [{name: getattr(device, name) for name in fields} for device in summary.devices],
          "stats": worker.stats(1), "info": worker.mem_get_info(1), "uuids": worker.uuids()}
"""
    )
    book = node.books()[1]
    process.call("empty_cache")
    freed = reply["stats"]["reserved_bytes.all.current"] - process.call("stats", device=1)["reserved_bytes.all.current"]
    assert reply["contexts"] == [device["index"] for device in reply["devices"]]
    device, stats = reply["devices"][-1], reply["stats"]
    assert device["index"] == 1
    assert device["uuid"] == reply["uuids"][1]
    for name in ("allocated", "reserved", "active", "inactive_split", "requested"):
        assert device[f"{name}_bytes"] == stats[f"{name}_bytes.all.current"]
    assert device["allocated_peak_bytes"] == stats["allocated_bytes.all.peak"]
    assert device["reserved_peak_bytes"] == stats["reserved_bytes.all.peak"]
    assert (device["alloc_retries"], device["ooms"]) == (stats["num_alloc_retries"], stats["num_ooms"])
    assert device["slack_bytes"] == device["reserved_bytes"] - device["allocated_bytes"]
    assert device["reclaimable_bytes"] == freed > 0
    assert device["fragmented_bytes"] == device["slack_bytes"] - freed
    assert device["device_free_bytes"] == reply["info"]["free"]
    assert device["device_used_bytes"] == reply["info"]["total"] - reply["info"]["free"]
    # the lists of the driver match only outside a container with its own PID namespace
    if Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC:
        assert device["process_bytes"] == book.processes[process.pid]
        assert device["non_torch_bytes"] == book.processes[process.pid] - device["reserved_bytes"]
        assert device["other_processes_bytes"] == 3 * MIB
    else:
        assert device["process_bytes"] is device["other_processes_bytes"] is None
    assert device["utilization_ratio"] is not None


def test_milestones_are_recorded_and_the_model_and_loader_are_unchanged(
    shared_process: TorchProcess,
) -> None:
    reply = shared_process.exec(
        """
import copy, io, pickle
model, _ = make("cpu")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 256)), batch_size=4)
def attributes():  # without the attribute that copyreg adds to a class at the first pickle
    return {name: value for name, value in vars(torch.utils.data.DataLoader).items() if name != "__slotnames__"}
loaders = attributes()
model.cuda()
seen = toolkit.milestones(model)
optimizer = torch.optim.AdamW(model.parameters())
batches = 0
for epoch in seen.epochs(range(2)):
    for (batch,) in loader:
        batches += 1
        model(batch.cuda()).sum().backward()
        optimizer.step()
model.cpu()
copies = pickle.dumps((model, loader)), copy.deepcopy(model), copy.deepcopy(loader), pickle.dumps(optimizer)
buffer = io.BytesIO()
torch.save(model, buffer)
seen.close()
result = {"names": [each.name for each in seen.records], "batches": batches,
          "hooks": [len(torch.nn.modules.module._global_forward_pre_hooks), len(model._forward_pre_hooks)],
          "loaders": attributes() == loaders,
          "same": b"gpumem" in copies[0] + copies[3] + buffer.getvalue(),
          "grown": {each.name: each.devices[0].growth_bytes for each in seen.records if each.devices}}
"""
    )
    assert reply["names"] == ["model on cuda:0", "epoch 1", "first optimizer step", "epoch 2", "end"]
    assert reply["batches"] == 4
    assert reply["hooks"] == [0, 0]
    assert reply["same"] is False
    assert reply["loaders"] is True
    assert reply["grown"]["epoch 1"] == 0
    assert reply["grown"]["first optimizer step"] >= 3 * PARAMETERS  # gradients and states


def test_a_forked_child_measures_nothing_and_does_not_wait_for_a_lock(shared_process: TorchProcess) -> None:
    status = shared_process.exec(
        """
import os, threading, warnings
from gpumem_client.phases.observed import process_observed
from gpumem_client.torch_access import process_statistics
model, optimizer = make()
step(model, optimizer, gpumem.phase)
warnings.simplefilter("ignore")
observed, statistics = process_observed(), process_statistics()
reads, may_end = threading.Event(), threading.Event()
def read(index):  # under the lock, in a thread that the child does not have
    reads.set()
    may_end.wait()
holder = threading.Thread(target=observed.read, args=(0,))
with gpumem.phase("parent"):
    statistics.state = read
    holder.start()
    reads.wait()
    del statistics.state
    child = os.fork()
    if child == 0:
        ok = observed.current_phase() is None and not observed.phases(0)
        with gpumem.phase("child") as use:
            pass
        os._exit(0 if ok and use.devices == () and not gpumem.memory_summary().devices else 1)
    may_end.set()
    holder.join()
    inside = observed.current_phase()
result = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), inside, sorted(observed.phases(0))]
"""
    )
    code, inside, phases = status
    assert (code, inside) == (0, "parent")
    assert {"backward", "forward", "optimizer", "parent"} <= set(phases)
