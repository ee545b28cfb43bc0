"""Every use of a private name of torch; the other modules of the client use torch's public names only.

`hooks/cuda_start.py` is the exception, because `gpumem-run` loads it as a single file. Nothing here imports torch,
initializes CUDA or creates a context. If an older release or another allocator does not have a name, the value is None.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Mapping

from gpumem_client.guest_safety import guest_safety
from gpumem_client.uninterrupted import CALL, Uninterrupted

DeviceState = Mapping[str, Any]
"""The statistics of one device: `state[name][metric]`, summed over its pools, and `state[counter]`."""

# Torch never drops a dead private pool: after 1000 pools the statistics that list them take 2 ms instead of 14 µs. With
# more pools than this they are not read.
_MANY_POOLS = 32
SUMMED = (
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
)
"""The statistics that torch keeps for small blocks, for large ones, and for all of them."""
# The statistics of the backend cudaMallocAsync; all others are always 0, which would be taken for values.
_ASYNC_STATISTICS = ("allocated_bytes", "reserved_bytes", "active_bytes")
_THREAD_KEY = "gpumem_thread"
# The id of no pool: its snapshot has no segments. The other one is torch's default.
_NO_POOL, _ALL_POOLS = (1 << 62, 1), (0, 0)


def initialized_torch() -> Any | None:
    """Return torch if the user's code has imported it and initialized CUDA in this process, otherwise None.

    Also returns None in a forked child of a process with CUDA.
    """
    # Torch's own function, which is false in a forked child: there the private functions would return the parent's
    # values, or wait forever for a mutex that another thread had at the fork. `torch.accelerator` has no such check.
    torch = sys.modules.get("torch")
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


class TorchGate:
    """Shows whether one thread of the client is in torch, and keeps it out once the gate is closed.

    The thread enters by `in_torch`, after `use_gate`. Any other thread may read or set `stopping`, and call `close`.
    """

    def __init__(self) -> None:
        self.stopping = False
        """Whether long work of the thread in torch should end early."""
        self._inside = threading.Lock()
        self._closed = False
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            self._inside.acquire()
            if self._closed:
                self._inside.release()
                threading.Event().wait()  # forever: the interpreter ends
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._inside.release()

    def close(self, timeout_seconds: float) -> bool:
        """Let the thread never enter torch again, and wait until it has left. Returns False after the timeout."""
        self.stopping = self._closed = True
        return self._inside.acquire(timeout=timeout_seconds)


_of_thread = threading.local()


def use_gate(gate: TorchGate | None) -> None:
    """Set the gate through which the calling thread enters torch from now on; None for a thread of the user."""
    _of_thread.gate = gate


def in_torch() -> AbstractContextManager[None]:
    """Return the context in which the reporter's thread calls torch. It may be entered again within itself.

    The end of the interpreter waits for it, and no call starts after that: up to Python 3.13, a thread that returns
    from C++ code into an interpreter that has ended aborts the process ("terminate called without an active
    exception"). Long work within it ends early once `stopping()` is true. Waits for the network are outside of it.
    """
    return getattr(_of_thread, "gate", None) or nullcontext()


def stopping() -> bool:
    """Whether the work of the calling thread in torch should end early, because its reporter stops."""
    gate = getattr(_of_thread, "gate", None)
    return gate is not None and gate.stopping


class Statistics:
    """Reads the allocator's statistics, in about 10 µs per device. Any thread may call any method.

    Locks the allocator's mutex with the GIL: if another thread empties the cache, the whole interpreter waits for it.
    """

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._c = torch._C
        self._many_pools: set[int] = set()
        backend = getattr(torch.cuda, "get_allocator_backend", None)
        self._asynchronous = backend is not None and backend() == "cudaMallocAsync"

    def devices(self) -> list[int]:
        """Return the indices of the devices on which this process has a context; it has memory on no other."""
        has_context = self._c._cuda_hasPrimaryContext
        return [index for index in range(self._cuda.device_count()) if has_context(index)]

    def state(self, index: int) -> DeviceState | None:
        """Return the statistics of one device, or None if the allocator keeps none.

        `private_pools_bytes` is added from torch 2.13 on: the bytes that all private pools reserve.
        """
        # The nested form: `torch.cuda.memory_allocated` takes 89 µs, since it builds and sorts a flat dictionary.
        try:
            if index in self._many_pools:
                state = dict(self._c._accelerator_getDeviceStats(index))
            else:
                state = self._c._cuda_memoryStats(index)
        except (AttributeError, RuntimeError):
            return None
        if self._asynchronous:
            return {
                name: {metric: state[name]["all"][metric] for metric in ("current", "peak")}
                for name in _ASYNC_STATISTICS
            }
        # What nothing here reads is dropped at once: the next device's statistics take its place in the CPU's cache.
        for name in SUMMED:
            if name in state:
                state[name] = state[name]["all"]
        pools = state.get("reserved_bytes_by_private_pools")
        if pools is not None:
            state["private_pools_bytes"] = sum(pool["all"]["current"] for pool in pools.values())
            if len(pools) > _MANY_POOLS and hasattr(self._c, "_accelerator_getDeviceStats"):
                self._many_pools.add(index)
        return state

    def reset_peaks(self, index: int) -> None:
        """Reset every peak of one device to the current value."""
        self._c._cuda_resetPeakMemoryStats(index)


def process_statistics() -> Statistics | None:
    """Return the statistics of this process; None before CUDA is initialized, and in a forked child of such a process.

    Any thread may call this.
    """
    torch = initialized_torch()
    return None if torch is None else statistics_of(torch)


@functools.lru_cache(maxsize=1)
def statistics_of(torch: Any) -> Statistics:
    """Return the statistics of a torch that has initialized CUDA. Any thread may call this."""
    return Statistics(torch)


def driver_uuid(index: int) -> str:
    """Return the UUID of a device from CUDA's driver, without a prefix, for torch before 2.5; empty if it is unknown.

    CUDA must be initialized. Creates no context.
    """
    import ctypes

    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        # Since CUDA 11.4, and the only one that knows MIG devices.
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid_v2(uuid, device):
            return ""
    except (OSError, AttributeError):
        return ""
    digits = bytes(uuid).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def rank_and_size() -> tuple[int, int] | None:
    """Return the rank of this process in torch's default process group, and the number of ranks; None without a group.

    Any thread may call this.
    """
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
    except (AttributeError, RuntimeError, ValueError):  # another thread is creating or destroying the group
        pass
    return None


def allocator_settings(torch: Any) -> str | None:
    """Return the allocator's settings in force; None before torch 2.10."""
    try:
        return str(torch._C._accelerator_getAllocatorSettings())
    except (AttributeError, RuntimeError):
        return None


def pinned_host_bytes(torch: Any) -> int | None:
    """Return the bytes of pinned host memory that torch's host allocator keeps; None before torch 2.7."""
    try:
        statistics = torch._C._cuda_hostMemoryStats()
        # Older releases (2.9, but not 2.15) name the kept bytes `reserved_bytes`, those in tensors `allocated_bytes`.
        kept: int = statistics["reserved_bytes" if "reserved_bytes" in statistics else "allocated_bytes"]["current"]
    except (AttributeError, RuntimeError, KeyError):
        return None
    return kept


def nccl_bytes(contexts: list[int]) -> dict[int, int]:
    """Return the device memory of NCCL's communicators by device index. A device is absent if that is not known.

    It is known from torch 2.15 on with NCCL 2.29.7 and later. `contexts` are the devices on which this process has a
    context.
    """
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    found: dict[int, int] = {}
    unknown: set[int] = set()
    for group in list(getattr(world, "pg_map", ())):
        try:
            backend = group._get_backend(sys.modules["torch"].device("cuda"))
            if not backend.name().startswith("nccl"):
                continue
        except RuntimeError:  # a group for CPU tensors only, or a backend without a name
            continue
        device = contexts[0] if len(contexts) == 1 else getattr(group.bound_device_id, "index", None)
        if device is None:
            return {}
        try:
            statistics = backend.memory_stats()
        except (AttributeError, RuntimeError):
            unknown.add(device)
        else:
            # A suspended communicator has released all but its persistent memory.
            found[device] = found.get(device, 0) + statistics["persist" if statistics["suspended"] else "total"]
    return {device: size for device, size in found.items() if device not in unknown}


def has_gil() -> bool:
    """Whether the interpreter has the GIL, on which the reading of other threads' objects and tensors relies."""
    enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return enabled()


def take_snapshot(
    torch: Any,
    pool: tuple[int, int] | None = None,
    *,
    traces: bool = True,
    paused: Callable[[float], None] = lambda _: None,
) -> dict[str, Any]:
    """Return segments, blocks and traces, as memory_viz reads them. Imports nothing, and runs no garbage collection.

    The objects of the result would start collections, which take four times as long as the snapshot. Torch takes a pool
    from 2.8 on, and leaves out traces from 2.11 on. `paused` receives the seconds for which this keeps the GIL.

    Raises:
        AttributeError, RuntimeError: the allocator has no snapshot.
    """
    arguments: tuple[Any, ...] = ()
    parameters = inspect.signature(torch.cuda.memory_snapshot).parameters
    if "include_traces" in parameters:
        arguments = ((*(pool or _ALL_POOLS), traces),)
    elif parameters:
        arguments = (pool,)
    names, call = vars(torch), Uninterrupted()
    lacks_inductor = "_inductor" not in names
    if lacks_inductor:
        # For the names of frames, torch asks for its attribute `_inductor`, which is a lazy import: 7 to 16 s and 150
        # MiB. A placeholder avoids it; only compiled code, which imports the real one, needs more. No other thread runs
        # in between, so none sees the placeholder, or forks.
        call.call(names.__setitem__, "_inductor", ModuleType("torch._inductor"))
    taken: list[dict[str, Any]] = call.kept(map(CALL, (functools.partial(torch._C._cuda_memorySnapshot, *arguments),)))
    if lacks_inductor:
        call.call(names.pop, "_inductor")
    try:
        paused(call.run())
    except BaseException:
        if lacks_inductor:
            names.pop("_inductor", None)
        raise
    return taken[0]


def snapshot_segments(torch: Any, paused: Callable[[float], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return the segments of all devices, as `torch.cuda.memory_snapshot()` does: see `take_snapshot`.

    Keeps the GIL for 0.5 µs per block, and for 2 µs per block with a recorded stack.
    """
    # Traces may have hundreds of thousands of entries: 727 ms instead of 0.2 ms (pytorch/pytorch#172672).
    segments: list[dict[str, Any]] = take_snapshot(torch, traces=False, paused=paused)["segments"]
    return segments


def snapshot_traces(torch: Any, paused: Callable[[float], None] = lambda _: None) -> list[list[dict[str, Any]]]:
    """Return the recorded history of each device, oldest entry first: see `take_snapshot`.

    Keeps the GIL for 5 µs per entry.
    """
    traces: list[list[dict[str, Any]]] = take_snapshot(torch, _NO_POOL, paused=paused)["device_traces"]
    return traces


def start_history(torch: Any, entries_max: int) -> None:
    """Record the last `entries_max` changes of each device's heap, and the stack of each allocation.

    The same thread must stop the recording: torch prints a warning otherwise. Drops an older history.

    Raises:
        AttributeError, RuntimeError, TypeError: this allocator, or this release, has no such recording.
    """
    if history_is_recorded(torch):
        stop_history(torch)
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=entries_max)


def stop_history(torch: Any) -> None:
    """Stop the recording and drop the history. Blocks that are still allocated keep their stacks."""
    torch.cuda.memory._record_memory_history(enabled=None)


def history_functions(torch: Any) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Return the functions in C that start and end every recording, by name, and the module that has them."""
    names = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
    return torch._C, {name: getattr(torch._C, name) for name in names if hasattr(torch._C, name)}


def history_is_recorded(torch: Any) -> bool:
    """Whether the allocator records where blocks are allocated."""
    try:
        return bool(torch._C._cuda_isHistoryEnabled())
    except (AttributeError, RuntimeError):
        return False


def current_stream_is_capturing(torch: Any) -> bool:
    """Whether the calling thread's current stream is being captured. Changes no stream."""
    try:
        return bool(torch._C._cuda_isCurrentStreamCapturing())
    except AttributeError:
        return False
    except RuntimeError:
        # During some captures the driver rejects a query of the legacy stream (cudaErrorStreamCaptureImplicit).
        return True


def attach_oom_observer(torch: Any, observer: Callable[[int, int, int, int], None]) -> bool:
    """Register an observer of out-of-memory errors, for the life of the process. False if the allocator has none."""
    try:
        torch._C._cuda_attach_out_of_memory_observer(observer)
    except (AttributeError, RuntimeError):
        return False
    return True


def find_clears(torch: Any) -> tuple[Callable[[], None] | None, Callable[[], None] | None]:
    """Return what frees torch's workspaces for cuBLAS, and its cache of pinned host memory; None if it is missing."""
    return getattr(torch._C, "_cuda_clearCublasWorkspaces", None), getattr(torch._C, "_host_emptyCache", None)


@guest_safety()
def mark_thread() -> None:
    """Put this thread's number into torch's thread-local state, unless this thread works for another. Takes 0.1 µs.

    Does nothing before the user's code has imported torch, and before torch 2.0.
    """
    # Autograd runs a backward pass in its own threads, without the caller's thread-locals and context variables. But it
    # copies torch's state into them. In older releases, and without torch, the boundary swallows the error.
    c, thread = sys.modules["torch"]._C, threading.get_ident()
    if c._is_key_in_tls(_THREAD_KEY):
        return
    import ctypes

    references = sys.getrefcount(thread)
    c._stash_obj_in_tls(_THREAD_KEY, thread)
    if sys.getrefcount(thread) == references:
        # Older releases (such as 2.9) add no reference, but drop one when the thread ends. Add the missing one.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thread))


@guest_safety()
def calling_thread() -> int | None:
    """Return the number of the thread for which autograd runs this one, perhaps itself; None if none is marked."""
    c = sys.modules["torch"]._C
    return int(c._get_obj_in_tls(_THREAD_KEY)) if c._is_key_in_tls(_THREAD_KEY) else None


def without_torch_function(torch: Any) -> AbstractContextManager[None]:
    """Return a context in which torch calls no `__torch_function__` of tensor subclasses and active modes."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def tensor_base_class(torch: Any) -> Any:
    """Return the base class of all tensors, which reads a tensor without running code of its subclass."""
    return torch._C.TensorBase


def node_types(torch: Any) -> list[type]:
    """Return the types of the nodes of autograd graphs, except for those that only lead to a parameter."""
    functions = vars(torch._C._functions).items()
    return [each for name, each in functions if isinstance(each, type) and name != "AccumulateGrad"]


def has_storage(torch: Any) -> Callable[[Any], bool]:
    """Return the function, written in C, that returns whether a tensor has a storage: a sparse one has none."""
    function: Callable[[Any], bool] = torch._C._has_storage
    return function


def storage_address(torch: Any) -> Callable[[Any], int]:
    """Return the function, written in C, that returns the address at which the storage of a tensor starts."""
    # `data_ptr` copies a tensor of `_lazy_clone`, which shares its memory until one of them is written.
    function: Callable[[Any], int] = torch._C._data_address
    return function


def storage_bytes(torch: Any, tensors: Any) -> dict[int, int]:
    """Return the bytes of the storages of CUDA tensors by device index. Counts a shared storage once.

    `tensors` is a list, tuple or dictionary of tensors, or of such collections. Other objects in it are ignored.
    """
    found: dict[tuple[int, int], int] = {}
    pending = [tensors]
    with without_torch_function(torch):
        while pending:
            each = pending.pop()
            if isinstance(each, dict):
                pending += each.values()
            elif isinstance(each, (list, tuple)):
                pending += each
            elif isinstance(each, tensor_base_class(torch)) and each.is_cuda:
                storage = each.untyped_storage()
                found[each.get_device(), storage.data_ptr()] = storage.nbytes()
    sizes: dict[int, int] = {}
    for (index, _), size in found.items():
        sizes[index] = sizes.get(index, 0) + size
    return sizes


def module_bytes(torch: Any, module: Any) -> dict[int, int]:
    """Return the bytes of a module's parameters and buffers on CUDA devices by device index. Calls none of its code."""
    pending: list[Any] = [module]
    tensors: list[dict[str, Any]] = []
    while pending:
        each = pending.pop()
        if each is not None:
            tensors += tensors_of_module(each)
            pending += each._modules.values()
    return storage_bytes(torch, tensors)


def tensors_of_module(module: Any) -> Iterable[dict[str, Any]]:
    """Return the two dictionaries in which a module keeps its own parameters and buffers."""
    return module._parameters, module._buffers


def uncompiled(optimizers: Any, hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook on steps in a form that `torch.compile` does not trace when a compiled function makes a step."""
    # The first call of that form imports what it needs. So the form is used only if torch's optimizers use it, too.
    uses_it = hasattr(getattr(getattr(optimizers, "Optimizer", None), "add_param_group", None), "__wrapped__")
    disable = getattr(sys.modules.get("torch"), "_disable_dynamo", None) if uses_it else None
    return hook if disable is None else disable(hook)


def remove_from_serialization_registry(entry: tuple[Any, ...] | None) -> None:
    """Replace the list in which torch keeps the taggers of storages by one without this entry."""
    # A new list, because another thread may be saving or loading a file, and walks over the old one.
    serialization = sys.modules["torch.serialization"]
    serialization._package_registry = [  # type: ignore[attr-defined]
        each for each in serialization._package_registry if each != entry
    ]
