"""Checkpoints of a training script, on the CPU and on the emulated node, also with a full disk.

The functions run in a process with torch.
"""

from __future__ import annotations

import contextlib
import errno
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

import pytest
import torch
from torch import nn

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError, GpumemError
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
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return float(loss).hex()


def training_resumes_with_the_same_losses(folder: str) -> None:
    path = Path(folder) / "a.pt"
    parts = trained()
    saved = save(path, model=parts[0], optimizer=parts[1], schedule=parts[2], step=2, rates=[0.1, None])
    assert (str(saved.path), saved.file_bytes) == (os.path.realpath(path), path.stat().st_size)
    fresh, kept = trained(steps=0), load(path)
    for part, name in zip(fresh, ("model", "optimizer", "schedule"), strict=True):
        part.load_state_dict(kept[name])
    assert (kept["step"], kept["rates"]) == (2, [0.1, None])
    assert [step(*fresh) for _ in range(3)] == [step(*parts) for _ in range(3)]


def tied_weights_views_and_strides_are_saved_as_torch_saves_them(folder: str) -> None:
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
    assert abs(file.stat().st_size - reference.stat().st_size) < 1024
    one, other = load(file), load(reference)
    tied = {one["model"][name].untyped_storage().data_ptr() for name in ("0.weight", "2.weight")}
    shared = {view.untyped_storage().data_ptr() for view in one["rows"]}
    assert (len(tied), len(shared)) == (1, 1)
    assert [view.stride() for view in one["rows"]] == [view.stride() for view in tree["rows"]]
    assert all(torch.equal(a, b) for a, b in zip(one["rows"], tree["rows"], strict=True))
    assert all(torch.equal(one[name], other[name]) for name in ("empty", "numbers", "low", "parameter"))
    assert one["low"].dtype is torch.bfloat16
    assert torch.equal(one["sparse"].to_dense(), torch.eye(3))
    assert one["parameter"].requires_grad


class Unknown:
    """An object that torch does not load."""


class Interrupting:
    """Interrupt a save."""

    def __reduce__(self) -> str:
        raise KeyboardInterrupt


def after_any_error_only_the_previous_checkpoint_exists(folder: str) -> None:
    path = Path(folder) / "last.pt"
    save(path, step=1)
    before = path.read_bytes()

    def fails(kind: type[BaseException], text: str, call: Callable[[], object]) -> None:
        with pytest.raises(kind, match=text):
            call()
        assert [each.name for each in Path(folder).iterdir()] == ["last.pt"]
        assert path.read_bytes() == before

    full = rf"{path}\b.*{os.strerror(errno.EFBIG)}"
    storage_error = saving.StorageError
    fails(storage_error, full, lambda: with_little_room(lambda: save(path, weights=torch.zeros(4 * MIB))))
    fitting = torch.zeros(MIB // 4 - 64)  # the end of the file does not fit
    fails(storage_error, full, lambda: with_little_room(lambda: save(path, weights=fitting)))
    fails(storage_error, "none", lambda: save(Path(folder) / "none" / "last.pt", step=2))
    fails(ConfigurationError, r"\bUnknown\b.*weights_only=True", lambda: save(path, thing=Unknown()))
    fails(TypeError, "lock", lambda: save(path, thing=threading.Lock()))
    fails(KeyboardInterrupt, "", lambda: save(path, thing=Interrupting()))
    fails(KeyboardInterrupt, "", lambda: while_writing(lambda: save(path, weights=torch.zeros(MIB))))


def while_writing(call: Callable[[], object]) -> None:
    """Interrupt a save after a few writes, when torch's writer raises its own error."""
    write, writes = saving._File.write, iter(range(3))

    def interrupted(file: Any, data: bytes) -> int:
        if next(writes, None) is None:
            raise KeyboardInterrupt
        return write(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving._File, "write", interrupted)
        call()


def with_little_room(call: Callable[[], object]) -> None:
    """Limit files to 1 MiB, so that writes fail as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def a_link_and_the_permissions_of_a_replaced_file_stay(folder: str) -> None:
    target, link = Path(folder) / "epoch-1.pt", Path(folder) / "last.pt"
    umask = os.umask(0o027)
    try:
        save(target, step=1)
        assert target.stat().st_mode & 0o777 == 0o640
        target.chmod(0o664)
        link.symlink_to(target)
        save(link, step=2)
    finally:
        os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o664
    assert link.is_symlink()
    assert load(target)["step"] == 2


def a_signal_handler_can_save_while_another_checkpoint_is_written(folder: str) -> None:
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
    save(f"{folder}/outer.pt", tensors=tensors)
    assert len(handled) == 1
    for name in ("inner", "outer"):
        assert {tensor.device.type for tensor in load(f"{folder}/{name}.pt")["tensors"]} == {"cpu"}


def threads_that_save_at_once_share_one_tagger_which_is_removed_with_the_last_save(folder: str) -> None:
    before = list(torch.serialization._package_registry)
    present: set[int] = set()
    at_once = threading.Barrier(2)

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            at_once.wait(60)
            return {}

    def come(storage: Any) -> None:
        present.add(len(torch.serialization._package_registry) - len(before) - 1)
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
    assert present == {1}
    assert [entry for entry in torch.serialization._package_registry if entry[1] is not come] == before
    assert {t.device.type for number in range(2) for t in load(f"{folder}/{number}.pt")["tensors"]} == {"cpu"}


def a_part_of_a_sharded_tensor_is_refused(folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        weight = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(GpumemError, match=r"^model\.layers\[0\]\.weight\b.*\bDTensor\b.*full_state_dict=True"):
            save(f"{folder}/a.pt", model={"layers": [{"weight": weight}]})
    finally:
        dist.destroy_process_group()
    assert not any(Path(folder).iterdir())


def a_model_whose_state_all_ranks_gather_is_refused_without_waiting(folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one rank and of the class
            part = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        gathered: list[object] = []
        part.register_state_dict_pre_hook(lambda *given: gathered.append(given))
        with pytest.raises(GpumemError, match=r"^model\b.*\bFullyShardedDataParallel\b.*full_state_dict=True"):
            save(f"{folder}/a.pt", step=1, model=nn.Sequential(part))
        assert gathered == []
    finally:
        dist.destroy_process_group()
    assert not any(Path(folder).iterdir())


def saving_takes_no_device_memory_and_host_memory_for_the_largest_tensor(folder: str) -> None:
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
    assert [name for name in after if after[name] != statistics.get(name)] == []
    # The largest of 76 MiB of weights and twice as much state. Each copy is freed before the next one.
    assert max(staged) == 16 * MIB
    assert saved.file_bytes > 3 * 76 * MIB
    assert str(load(path)["odd"].device) == "cpu"


def read_without_a_device(folder: str) -> None:
    kept = load(Path(folder) / "device.pt")
    tensors = [*kept["model"].values(), *kept["optimizer"]["state"][0].values(), kept["odd"]]
    assert {str(tensor.device) for tensor in tensors} == {"cpu"}
    assert kept["odd"].stride() == (2, 32)


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "cpu", watched)
        yield sizes
