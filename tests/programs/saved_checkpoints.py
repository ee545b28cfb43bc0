"""Checkpoints of a training script, on the CPU and on the emulated node, also with a full disk.

The functions run in a process with torch; their results are JSON.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import GpumemError
from gpumem_toolkit.training import saving

MIB = 1 << 20

save = toolkit.save_checkpoint


def load(path: Path | str) -> Any:
    return torch.load(path, weights_only=True)


def trained(steps: int = 2) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        step(model, optimizer, schedule)
    return model, optimizer, schedule


def step(model: nn.Module, optimizer: Any, schedule: Any) -> str:
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    loss = model(torch.randn(4, 8, generator=generator).to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return float(loss).hex()


def saved_by_a_signal_handler(folder: str) -> dict[str, Any]:
    """Return the devices of the tensors of a checkpoint, and of one that a signal handler saves at the same time."""
    tensors = [torch.full((MIB,), float(number), device="cuda") for number in range(4)]
    handled: list[int] = []

    def handler(number: int, frame: object) -> None:
        if not handled:
            handled.append(number)
            save(f"{folder}/inner.pt", tensors=tensors[:1])

    def come(storage: Any) -> None:
        if not handled and storage.data_ptr() == tensors[1].data_ptr():
            signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, handler)
    torch.serialization.register_package(-(10**6), come, lambda _storage, _location: None)
    saved = save(f"{folder}/outer.pt", tensors=tensors)
    devices = {
        name: [tensor.device.type for tensor in load(f"{folder}/{name}.pt")["tensors"]] for name in ("inner", "outer")
    }
    return {**devices, "handled": handled, "staged": saved.staged_bytes}


def resumed(path: str) -> list[list[str]]:
    """Return the losses of a training that continues, and of one that continues from its checkpoint."""
    parts = trained()
    saved = save(path, model=parts[0], optimizer=parts[1], schedule=parts[2], step=2, rates=[0.1, None])
    on = [step(*parts) for _ in range(3)]
    fresh = trained(steps=0)
    kept = load(path)
    for part, name in zip(fresh, ("model", "optimizer", "schedule"), strict=True):
        part.load_state_dict(kept[name])
    assert (kept["step"], kept["rates"]) == (2, [0.1, None])
    assert (str(saved.path), saved.file_bytes) == (os.path.realpath(path), Path(path).stat().st_size)
    return [on, [step(*fresh) for _ in range(3)]]


def kept_as_torch_keeps(folder: str) -> dict[str, bool]:
    """Compare tied weights, views and strides with the result of torch.save."""
    layer = nn.Linear(64, 64)
    large = torch.randn(256, 256)
    tree = {
        "model": nn.Sequential(layer, nn.ReLU(), layer),
        "rows": [large[3:5], large.t(), large[:, ::2]],
        "empty": torch.empty(0),
        "numbers": torch.arange(5, dtype=torch.int8),
        "low": torch.randn(3).bfloat16(),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    file, reference = Path(folder) / "file.pt", Path(folder) / "reference.pt"
    save(file, **tree)
    torch.save({**tree, "model": tree["model"].state_dict()}, reference)
    one, other = load(file), load(reference)
    weights = [one["model"][name].untyped_storage().data_ptr() for name in ("0.weight", "2.weight")]
    return {
        "the same size": abs(file.stat().st_size - reference.stat().st_size) < 1024,
        "tied": weights[0] == weights[1],
        "views share": len({view.untyped_storage().data_ptr() for view in one["rows"]}) == 1,
        "strides": [view.stride() for view in one["rows"]] == [view.stride() for view in tree["rows"]],
        "views": all(torch.equal(a, b) for a, b in zip(one["rows"], tree["rows"], strict=True)),
        "others": all(torch.equal(one[name], other[name]) for name in ("empty", "numbers", "low", "parameter")),
        "dtype": one["low"].dtype is torch.bfloat16,
        "sparse": torch.equal(one["sparse"].to_dense(), torch.eye(3)),
        "gradients": one["parameter"].requires_grad,
    }


class Unknown:
    """An object that torch does not load."""


def failing(folder: str) -> dict[str, list[Any]]:
    """Return for each failure the error, and whether only the previous file exists, unchanged."""
    path = Path(folder) / "last.pt"
    save(path, step=1)
    before = path.read_bytes()
    result: dict[str, list[Any]] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        error: BaseException | None = None
        try:
            call()
        except BaseException as raised:  # noqa: BLE001 - the test checks its type
            error = raised
        intact = [each.name for each in Path(folder).iterdir()] == ["last.pt"] and path.read_bytes() == before
        result[name] = [type(error).__name__, str(error), intact]

    attempt("full", lambda: with_little_room(lambda: save(path, weights=torch.zeros(4 * MIB))))
    attempt("full at the end", lambda: with_little_room(lambda: save(path, weights=torch.zeros(MIB // 4 - 64))))
    attempt("unknown class", lambda: save(path, thing=Unknown()))
    attempt("unpicklable", lambda: save(path, thing=threading.Lock()))
    attempt("interrupted", lambda: save(path, thing=Interrupting()))
    attempt("interrupted in writing", lambda: while_writing(lambda: save(path, weights=torch.zeros(MIB))))
    attempt("no folder", lambda: save(Path(folder) / "none" / "last.pt", step=2))
    return result


class Interrupting:
    """Interrupt a save."""

    def __reduce__(self) -> str:
        raise KeyboardInterrupt


def while_writing(call: Callable[[], object]) -> None:
    """Interrupt a save after a few writes, when torch's writer raises its own error."""
    write, writes = saving._File.write, iter(range(3))

    def interrupted(file: Any, data: bytes) -> int:
        if next(writes, None) is None:
            raise KeyboardInterrupt
        return write(file, data)

    saving._File.write = interrupted  # type: ignore[method-assign]
    try:
        call()
    finally:
        saving._File.write = write  # type: ignore[method-assign]


def with_little_room(call: Callable[[], object]) -> None:
    """Limit files to 1 MiB, so that writes fail as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def replaced(folder: str) -> dict[str, Any]:
    """Return the link and the permissions after saving over a link, and the permissions of a new file."""
    umask = os.umask(0o027)
    try:
        target, link = Path(folder) / "epoch-1.pt", Path(folder) / "last.pt"
        save(target, step=1)
        fresh = oct(target.stat().st_mode & 0o777)
        target.chmod(0o664)
        link.symlink_to(target)
        save(link, step=2)
    finally:
        os.umask(umask)
    kept = oct(target.stat().st_mode & 0o777)
    return {"fresh": fresh, "kept": kept, "link": link.is_symlink(), "step": load(target)["step"]}


def saves_at_once(folder: str) -> dict[str, Any]:
    """Return the number of taggers while two threads save, and of new registry entries afterwards."""
    before = list(torch.serialization._package_registry)
    present: list[int] = []
    at_once = threading.Barrier(2)

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            at_once.wait(60)
            return {}

    def come(storage: Any) -> None:
        present.append(len(torch.serialization._package_registry) - len(before) - 1)
        time.sleep(0.01)  # lets the other thread save

    torch.serialization.register_package(-(10**6), come, lambda _storage, _location: None)
    tensors = [torch.full((MIB,), float(number), device="cuda") for number in range(10)]
    threads = [
        threading.Thread(target=save, args=(f"{folder}/{number}.pt",), kwargs={"slow": Slow(), "tensors": tensors})
        for number in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    registry = [entry for entry in torch.serialization._package_registry if entry[1] is not come]
    torch.serialization._package_registry = registry
    devices = {tensor.device.type for number in range(2) for tensor in load(f"{folder}/{number}.pt")["tensors"]}
    return {"present": sorted(set(present)), "left": len(registry) - len(before), "devices": sorted(devices)}


def sharded(path: str) -> str:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        weight = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        save(path, model={"layers": [{"weight": weight}]})
    except GpumemError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def fully_sharded(path: str) -> str:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one rank and of the class
            part = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        gathered: list[object] = []
        part.register_state_dict_pre_hook(lambda *given: gathered.append(given))
        save(path, step=1, model=nn.Sequential(part))
    except GpumemError as error:
        return "gathered" if gathered else str(error)
    finally:
        dist.destroy_process_group()
    return ""


def from_device(folder: str) -> dict[str, Any]:
    """Return the device memory and the host memory that a save from a device uses."""
    model = nn.Sequential(nn.Linear(2048, 2048), *(nn.Linear(1024, 1024) for _ in range(15))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    odd = torch.ones(64, 32, device="cuda").t()[::2]
    path = Path(folder) / "device.pt"
    save(path, odd=odd)  # allocates what Python and torch keep
    statistics = torch.cuda.memory_stats()
    with _staged_at_once() as staged:
        saved = save(path, model=model, optimizer=optimizer, odd=odd)
    after = torch.cuda.memory_stats()
    plain = Path(folder) / "plain.pt"
    torch.save({"odd": odd}, plain)
    return {
        "allocations": after["allocation.all.allocated"] - statistics["allocation.all.allocated"],
        "peak": after["allocated_bytes.all.peak"] - statistics["allocated_bytes.all.peak"],
        "changed": [name for name in after if after[name] != statistics.get(name)],
        "staged": saved.staged_bytes,
        "file": saved.file_bytes,
        "host": max(staged),
        "device": str(load(path)["odd"].device),
        "device of plain": str(load(plain)["odd"].device),
    }


def read(folder: str) -> dict[str, Any]:
    """Load the file of `from_device` without a device."""
    kept = load(Path(folder) / "device.pt")
    tensors = [*kept["model"].values(), *kept["optimizer"]["state"][0].values(), kept["odd"]]
    try:
        plain = str(load(Path(folder) / "plain.pt"))
    except RuntimeError as error:
        plain = str(error)
    return {"devices": sorted({str(t.device) for t in tensors}), "stride": kept["odd"].stride(), "plain": plain}


@contextlib.contextmanager
def _staged_at_once() -> Iterator[list[int]]:
    """Record the bytes of all living host copies of storages whenever one is created."""
    copies: list[weakref.ref[Any]] = []
    sizes: list[int] = []
    copy_to_host = torch.UntypedStorage.cpu

    def watched(storage: Any) -> Any:
        copy = copy_to_host(storage)
        copies.append(weakref.ref(copy))
        sizes.append(sum(one.nbytes() for known in copies if (one := known()) is not None))
        return copy

    torch.UntypedStorage.cpu = watched
    try:
        yield sizes
    finally:
        torch.UntypedStorage.cpu = copy_to_host
