"""The interface of the emulated node for tests, which create it, change it and read its accounts."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.support.waiting import wait_for

from . import build

GIB = 1 << 30
MIB = 1 << 20

ANY_DEVICE = -1
_ERROR, _DELAY, _HANG = 1, 2, 3

NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_GPU_IS_LOST = 15


RESERVED_BYTES, CONTEXT_BYTES, SHARED_BYTES = 479 * MIB, 518 * MIB, 20 * MIB
"""Of a GPU, of a process, and of no process on a GPU in use: as on an H100 with driver 590."""


class _ControlDevice(ctypes.Structure):
    """`struct control_device` of src/control.c."""

    _fields_ = (
        ("total", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("unattributed", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("parent", ctypes.c_int32),
        ("gpu_instance", ctypes.c_int32),
        ("compute_instance", ctypes.c_int32),
        ("gone", ctypes.c_int32),
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
    )


@dataclass(frozen=True, slots=True)
class MigSlice:
    """A MIG device to create: its NVML profile (`1g.10gb`) and its memory."""

    profile: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceBook:
    """The node's accounts of one device, in bytes.

    Attributes:
        index: NVML index; for a MIG device, that of its parent.
        uuid: `GPU-…` or `MIG-…`.
        parent_uuid: the uuid of a MIG device's parent; empty for a GPU.
        used_bytes: NVML's used: the bytes of the processes and the unattributed bytes.
        unattributed_bytes: used bytes that belong to no process; may be negative, as with a real driver.
        processes: the bytes of each process, including its context, by the pid in NVML.
    """

    index: int
    uuid: str
    name: str
    parent_uuid: str
    total_bytes: int
    reserved_bytes: int
    used_bytes: int
    unattributed_bytes: int
    processes: Mapping[int, int]

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.reserved_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class Books:
    """The accounts of all devices at one time: the GPUs in NVML's order, then the MIG devices."""

    devices: tuple[DeviceBook, ...]

    def __getitem__(self, index: int) -> DeviceBook:
        return self.devices[index]

    def used_by(self, pid: int) -> int:
        """Return the bytes of a process on all devices, including its contexts."""
        return sum(device.processes.get(pid, 0) for device in self.devices)


class Rule:
    """A change to matching calls until `remove()`; also a context manager."""

    def __init__(self, node: EmulatedNode, number: int) -> None:
        self._node = node
        self._number = number
        self._active = True
        self._hits = 0

    @property
    def hits(self) -> int:
        """The number of calls that matched the rule."""
        if self._active:
            self._hits = int(self._node._control.emu_control_rule_hits(self._node._handle, self._number))
        return self._hits

    @property
    def waiting(self) -> int:
        """The number of calls that hang in the rule now."""
        if not self._active:
            return 0
        return int(self._node._control.emu_control_rule_waiting(self._node._handle, self._number))

    def wait_for_waiting(self, timeout_seconds: float = 10) -> None:
        """Wait until a call hangs in the rule."""
        wait_for(lambda: self.waiting, "a call to hang", timeout_seconds)

    def remove(self) -> None:
        """Remove the rule; hung calls continue. May be called again."""
        if self._active:
            self._hits = self.hits
            self._active = False
            self._node._control.emu_control_remove_rule(self._node._handle, self._number)

    def __enter__(self) -> Rule:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class EmulatedNode:
    """One node: a state file in `path`, and methods to change it.

    Each node needs a new folder. Programs use the node through `environment()`. All methods are thread-safe, except for
    the rules (`fail`, `slow`, `hang`).

    Args:
        path: the folder of the state, created if missing.
        devices: the number of GPUs.
        total_bytes: NVML's total of all GPUs, or one value for each.
        reserved_bytes: the bytes that the driver reserves on each GPU, and not on MIG devices.
        context_bytes: the bytes of the context of a process on a device.
        mig: the MIG devices of a GPU, by the GPU's index.
        nvml: the version of the library: "v2" lacks the third version of the process lists; "v1" also lacks the second
            one and the second version of the memory call.
    """

    def __init__(
        self,
        path: Path,
        devices: int = 2,
        total_bytes: int | Sequence[int] = 8 * GIB,
        *,
        reserved_bytes: int = RESERVED_BYTES,
        context_bytes: int = CONTEXT_BYTES,
        name: str = "NVIDIA H100 80GB HBM3",
        driver_version: str = "580.159.04",
        cuda_version: int = 13020,
        mig: Mapping[int, Sequence[MigSlice]] | None = None,
        nvml: str = "",
    ) -> None:
        totals = [total_bytes] * devices if isinstance(total_bytes, int) else list(total_bytes)
        if len(totals) != devices:
            raise ValueError(f"{devices} devices and {len(totals)} totals")
        self.libraries = build.built()
        self._search = f"{self.libraries / nvml}:{self.libraries}" if nvml else str(self.libraries)
        self._name = name
        self.path = path
        self.state_file = path / "node"
        self.device_count = devices
        path.mkdir(parents=True, exist_ok=True)
        entries = [
            _ControlDevice(
                total=total,
                reserved=reserved_bytes,
                shared=SHARED_BYTES,
                parent=-1,
                uuid=f"GPU-{index + 16:08x}-1111-2222-3333-{index + 0x444400000000:012x}".encode(),
                name=name.encode(),
            )
            for index, total in enumerate(totals)
        ]
        for index, slices in sorted((mig or {}).items()):
            for instance, part in enumerate(slices):
                entries.append(self._mig_device(index, part, len(entries)))
                entries[-1].gpu_instance = instance + 7
        self._entries = len(entries)
        self._uuids: list[str] = [entry.uuid.decode() for entry in entries]
        self._control = _load_control(self.libraries / build.CONTROL)
        _check(
            self._control.emu_control_create(
                os.fsencode(self.state_file),
                devices,
                len(entries),
                (_ControlDevice * len(entries))(*entries),
                context_bytes,
                cuda_version,
                driver_version.encode(),
            ),
            self.state_file,
        )
        handle = ctypes.c_void_p()
        _check(self._control.emu_control_open(os.fsencode(self.state_file), ctypes.byref(handle)), self.state_file)
        self._handle: ctypes.c_void_p | None = handle
        self._rules: list[Rule] = []

    def _mig_device(self, parent: int, part: MigSlice, number: int) -> _ControlDevice:
        return _ControlDevice(
            total=part.total_bytes,
            unattributed=part.total_bytes // 1500 // MIB * MIB,
            parent=parent,
            uuid=f"MIG-{number + 16:08x}-5555-6666-7777-{number + 0x888800000000:012x}".encode(),
            name=f"{self._name} MIG {part.profile}".encode(),
        )

    def close(self) -> None:
        """Release all hung calls and the state. Programs that still run keep their mapping."""
        if self._handle is not None:
            self.release()
            handle, self._handle = self._handle, None
            self._control.emu_control_close(handle)

    def __enter__(self) -> EmulatedNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def environment(self, base: Mapping[str, str] | None = None, **extra: str) -> dict[str, str]:
        """Return `base` (default: the environment of this process) with the variables for programs on this node."""
        joined = dict(os.environ if base is None else base)
        for name, value, sep in (
            ("LD_LIBRARY_PATH", self._search, ":"),
            ("LD_PRELOAD", str(self.libraries / build.RUNTIME), ":"),
        ):
            joined[name] = value + sep + joined[name] if joined.get(name) else value
        joined["EMULATED_NODE"] = str(self.state_file)
        joined.update(extra)
        return joined

    # Accounts

    def books(self) -> Books:
        """Return the accounts of every device and process at one time, read under the node's lock."""
        room = 4096
        devices = (_ControlDevice * self._entries)()
        on, pids, used = (ctypes.c_int32 * room)(), (ctypes.c_int32 * room)(), (ctypes.c_uint64 * room)()
        rows = self._control.emu_control_books(self._handle, devices, on, pids, used, room)
        if rows > room:
            raise RuntimeError(f"{rows} rows in the node's books, room for {room}")
        processes: list[dict[int, int]] = [{} for _ in devices]
        for device, pid, count in itertools.islice(zip(on, pids, used, strict=True), rows):
            processes[device][pid] = processes[device].get(pid, 0) + count
        return Books(
            tuple(
                DeviceBook(
                    index=index if entry.parent < 0 else entry.parent,
                    uuid=entry.uuid.decode(),
                    name=entry.name.decode(),
                    parent_uuid="" if entry.parent < 0 else self._uuids[entry.parent],
                    total_bytes=entry.total,
                    reserved_bytes=entry.reserved,
                    used_bytes=entry.used,
                    unattributed_bytes=entry.unattributed,
                    processes=processes[index],
                )
                for index, entry in enumerate(devices)
            )
        )

    def uuid(self, device: int) -> str:
        """Return the NVML UUID of a device; the MIG devices follow the GPUs."""
        return self._uuids[device]

    # Failures of the driver

    def lose_device(self, device: int) -> None:
        """Make the device fall off the bus: every NVML call on it fails, including that for its handle."""
        self._control.emu_control_set_device_error(self._handle, self._entry(device), NVML_ERROR_GPU_IS_LOST)

    def heal_device(self, device: int) -> None:
        """Restore the device, which stays lost in each open NVML session until the program initializes NVML again."""
        self._control.emu_control_set_device_error(self._handle, self._entry(device), 0)

    def set_init_error(self, code: int) -> None:
        """Make nvmlInit return a code (9: the driver is not loaded; 0: success). Open sessions are not affected."""
        self._control.emu_control_set_init_error(self._handle, code)

    def restart_driver(self) -> None:
        """Invalidate every open NVML session: its calls return UNINITIALIZED until NVML is initialized again."""
        self._control.emu_control_restart_driver(self._handle)

    def restart_driver_reordered(self, order: Sequence[int]) -> None:
        """Restart the driver; its index i is then the device that was created as number `order[i]`."""
        if sorted(order) != list(range(self.device_count)):
            raise ValueError(f"{order} is not an order of {self.device_count} devices")
        self._control.emu_control_restart_reordered(self._handle, (ctypes.c_int32 * len(order))(*order))

    # MIG while programs run. The number of a device is never reused.

    def create_mig(self, device: int, part: MigSlice) -> int:
        """Create a MIG device in the GPU's first free slot and return its number."""
        made = self._mig_device(self._entry(device), part, self._entries)
        number = int(self._control.emu_control_create_mig(self._handle, ctypes.byref(made)))
        _check(max(0, -number), f"device {device}")
        self._uuids.append(made.uuid.decode())
        self._entries = number + 1
        return number

    def destroy_mig(self, number: int) -> None:
        """Destroy a MIG device.

        Raises:
            OSError: EBUSY if a process has a context on it.
        """
        _check(self._control.emu_control_destroy_mig(self._handle, self._entry(number)), f"device {number}")

    @property
    def nvml_device_file(self) -> Path:
        """The file that a program has open during its NVML session, like /dev/nvidiactl on a real node."""
        return self.state_file.with_name(f"{self.state_file.name}.nvidiactl")

    def set_utilization(self, device: int, percent: int | None) -> None:
        """Set the GPU utilization in NVML; None for not supported."""
        self._control.emu_control_set_utilization(self._handle, self._entry(device), -1 if percent is None else percent)

    # Processes

    def set_process(self, pid: int, device: int, nbytes: int) -> None:
        """Add an artificial process (any pid) that uses this number of bytes until it is removed.

        Raises OSError, ENOMEM, if the device does not have enough free memory.
        """
        _check(self._control.emu_control_set_foreign(self._handle, pid, self._entry(device), nbytes), f"process {pid}")

    def remove_process(self, pid: int) -> None:
        """Remove a process of `set_process` from all devices."""
        _check(self._control.emu_control_remove_foreign(self._handle, pid), f"process {pid}")

    def show_pid_as(self, pid: int, shown: int | None) -> None:
        """Make NVML list a running process with another pid, as for another PID namespace; None for its own pid."""
        _check(self._control.emu_control_show_as(self._handle, pid, shown or 0), f"process {pid}")

    # Calls that fail, take longer or hang. `function` is a name or a pattern of names in any of the three libraries:
    # "nvmlDeviceGetMemoryInfo*", "cudaFree", "nvml*". The version is part of the name.

    def fail(self, function: str, code: int, device: int | None = None) -> Rule:
        """Make the call return an error code, of NVML or CUDA depending on the function."""
        return self._rule(function, device, _ERROR, code)

    def slow(self, function: str, milliseconds: int) -> Rule:
        """Make the call take longer."""
        return self._rule(function, None, _DELAY, milliseconds)

    def hang(self, function: str) -> Rule:
        """Make the call hang until the rule is removed, `release()` is called or the node is closed."""
        return self._rule(function, None, _HANG, 0)

    def release(self) -> None:
        """Remove all rules."""
        while self._rules:
            self._rules.pop().remove()

    def _rule(self, function: str, device: int | None, action: int, value: int) -> Rule:
        if len(function) >= 80:
            raise ValueError(f"function name too long: {function}")
        entry = ANY_DEVICE if device is None else self._entry(device)
        number = self._control.emu_control_add_rule(self._handle, function.encode(), entry, action, value)
        if number < 0:
            raise RuntimeError("no room for another rule")
        self._rules.append(Rule(self, number))
        return self._rules[-1]

    def _entry(self, device: int) -> int:
        if not 0 <= device < self._entries:
            raise IndexError(f"device {device} of {self._entries}")
        return device


def _check(code: int, what: object) -> None:
    if code:
        raise OSError(code, os.strerror(code), str(what))


def _load_control(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    node, number, code, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_int32, ctypes.c_char_p
    devices = ctypes.POINTER(_ControlDevice)
    for name, arguments, result in (
        ("create", (text, ctypes.c_uint32, ctypes.c_uint32, devices, ctypes.c_uint64, code, text), number),
        ("open", (text, ctypes.POINTER(node)), number),
        ("close", (node,), None),
        (
            "books",
            (node, devices, ctypes.POINTER(code), ctypes.POINTER(code), ctypes.POINTER(ctypes.c_uint64), number),
            number,
        ),
        ("set_foreign", (node, code, number, ctypes.c_uint64), number),
        ("remove_foreign", (node, code), number),
        ("show_as", (node, code, code), number),
        ("set_device_error", (node, number, code), None),
        ("set_init_error", (node, code), None),
        ("restart_driver", (node,), None),
        ("restart_reordered", (node, ctypes.POINTER(code)), None),
        ("create_mig", (node, devices), number),
        ("destroy_mig", (node, number), number),
        ("set_utilization", (node, number, code), None),
        ("add_rule", (node, text, number, code, code), number),
        ("remove_rule", (node, number), None),
        ("rule_hits", (node, number), ctypes.c_uint32),
        ("rule_waiting", (node, number), ctypes.c_uint32),
    ):
        function = getattr(library, f"emu_control_{name}")
        function.argtypes = arguments
        function.restype = result
    return library
