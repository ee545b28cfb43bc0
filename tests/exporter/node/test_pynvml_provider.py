"""The provider with the real pynvml, and its structures and errors, on a scripted libnvidia-ml."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpumem_exporter import errors
from gpumem_exporter.core.readings import DeviceMemory, DeviceReading
from gpumem_exporter.node import driver_library as library_module
from gpumem_exporter.node.driver_library import open_driver_files
from gpumem_exporter.node.pynvml_provider import RETURN_CODES, PynvmlProvider

GIB = 1 << 30
NOT_AVAILABLE = (1 << 64) - 1


class Gpu:
    """A scripted GPU or MIG device."""

    def __init__(self, uuid: str, *, name: str = "NVIDIA H100 80GB HBM3", migs: list[Gpu | None] | None = None) -> None:
        self.uuid = uuid
        self.name = name
        self.migs = migs
        self.total, self.reserved, self.free, self.used = 80 * GIB, GIB, 60 * GIB, 19 * GIB
        self.percent = 50
        self.processes: list[tuple[int, int]] = []
        self.utilization: list[tuple[int, int, int]] = []
        """Of processes: pid, the percentage of the multiprocessors, and of the encoder."""
        self.codes: dict[str, int] = {}


class Library:
    """A scripted libnvidia-ml.so.1. `codes` makes a function fail for all GPUs, a GPU's `codes` for that GPU."""

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = list(gpus)
        self.codes: dict[str, int] = {}
        self.missing: set[str] = set()
        self.calls: list[str] = []
        self._handle = 4711

    def __getattr__(self, name: str) -> Any:
        function = None if name in self.missing else getattr(type(self), f"_{name.removeprefix('nvml')}", None)
        if function is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.codes:
                return self.codes[name]
            if arguments and isinstance(arguments[0], ctypes._Pointer):
                gpu = self._gpu(arguments[0])
                if name in gpu.codes or "*" in gpu.codes:
                    return gpu.codes.get(name, gpu.codes.get("*", 0))
                arguments = (gpu, *arguments[1:])
            return function(self, *arguments) or 0

        call.__name__ = name
        return call

    def _all(self) -> list[Gpu]:
        return [part for gpu in self.gpus for part in (gpu, *(mig for mig in gpu.migs or () if mig))]

    def _gpu(self, handle: Any) -> Gpu:
        address = ctypes.cast(handle, ctypes.c_void_p).value
        return next(gpu for gpu in self._all() if id(gpu) == address)

    def _point(self, handle: Any, gpu: Gpu) -> None:
        ctypes.memmove(handle, struct.pack("@P", id(gpu)), struct.calcsize("@P"))

    def _InitWithFlags(self, flags: int) -> None: ...  # noqa: N802 - NVML's own names, here and below

    def _Shutdown(self) -> None: ...  # noqa: N802

    def _SystemGetDriverVersion(self, text: Any, size: Any) -> None:  # noqa: N802
        text.value = b"580.159.04"

    def _DeviceGetCount_v2(self, count: Any) -> None:  # noqa: N802
        count._obj.value = len(self.gpus)

    def _DeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        gpu = self.gpus[index.value]
        self._point(handle, gpu)
        return gpu.codes.get("handle", 0)

    def _DeviceGetUUID(self, gpu: Gpu, text: Any, size: Any) -> None:  # noqa: N802
        text.value = gpu.uuid.encode()

    def _DeviceGetName(self, gpu: Gpu, text: Any, size: Any) -> None:  # noqa: N802
        text.value = gpu.name.encode()

    def _DeviceGetPciInfo_v3(self, gpu: Gpu, info: Any) -> None:  # noqa: N802
        info._obj.busId = f"00000000:{self.gpus.index(gpu) + 1:02X}:00.0".encode()

    def _DeviceGetMinorNumber(self, gpu: Gpu, minor: Any) -> None:  # noqa: N802
        minor._obj.value = 4 - self.gpus.index(gpu)

    def _DeviceGetMemoryInfo_v2(self, gpu: Gpu, info: Any) -> None:  # noqa: N802
        memory = info._obj
        memory.total, memory.reserved, memory.free, memory.used = gpu.total, gpu.reserved, gpu.free, gpu.used

    def _DeviceGetMemoryInfo(self, gpu: Gpu, info: Any) -> None:  # noqa: N802
        memory = info._obj
        memory.total, memory.free, memory.used = gpu.total, gpu.free, gpu.used + gpu.reserved

    def _DeviceGetComputeRunningProcesses_v3(self, gpu: Gpu, count: Any, buffer: Any) -> None:  # noqa: N802
        data = b"".join(struct.pack("@IQII", pid, used, 0, 0) for pid, used in gpu.processes)
        count._obj.value = len(gpu.processes)
        ctypes.memmove(buffer, data, len(data))

    def _DeviceGetUtilizationRates(self, gpu: Gpu, rates: Any) -> None:  # noqa: N802
        rates._obj.gpu = gpu.percent

    def _DeviceGetProcessUtilization(self, gpu: Gpu, samples: Any, count: Any, since_us: Any) -> int:  # noqa: N802
        assert 0 < since_us.value <= time.time_ns() // 1000
        if not gpu.utilization:
            return 6  # NVML_ERROR_NOT_FOUND
        count._obj.value = len(gpu.utilization)
        if samples is None:
            return 7  # NVML_ERROR_INSUFFICIENT_SIZE
        for sample, (pid, percent, encoder) in zip(samples, gpu.utilization, strict=True):
            sample.pid, sample.smUtil, sample.encUtil = pid, percent, encoder
        return 0

    def _DeviceGetMigMode(self, gpu: Gpu, current: Any, pending: Any) -> int:  # noqa: N802
        current._obj.value = gpu.migs is not None
        return 0

    def _DeviceGetMaxMigDeviceCount(self, gpu: Gpu, count: Any) -> None:  # noqa: N802
        count._obj.value = 7

    def _DeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: Any, handle: Any) -> int:  # noqa: N802
        slots = [*(gpu.migs or ()), *[None] * 7]
        mig = slots[index.value]
        if mig is None:
            return 6
        self._point(handle, mig)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    scripted = Library(Gpu("GPU-0"), Gpu("GPU-1"))
    monkeypatch.setattr(pynvml, "nvmlLib", scripted)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return scripted


@pytest.fixture
def provider(library: Library) -> PynvmlProvider:
    opened = PynvmlProvider()
    opened.open()
    return opened


def uuids(provider: PynvmlProvider) -> list[str]:
    return [identity.uuid for identity in provider.devices()]


@pytest.mark.parametrize("mig_mode", [0, 3, 4, 13])
def test_devices_are_in_the_drivers_order_with_their_identity(
    provider: PynvmlProvider, library: Library, mig_mode: int
) -> None:
    if mig_mode:
        library.codes["nvmlDeviceGetMigMode"] = mig_mode
    assert (
        provider.devices()
        == provider.devices()
        == (
            DeviceReading("0", "GPU-0", "NVIDIA H100 80GB HBM3", "00000000:01:00.0", 4),
            DeviceReading("1", "GPU-1", "NVIDIA H100 80GB HBM3", "00000000:02:00.0", 3),
        )
    )


@pytest.mark.parametrize("how", ["missing", 13])
def test_without_the_second_version_reserved_is_unknown_and_counts_as_used(
    provider: PynvmlProvider, library: Library, how: str | int
) -> None:
    if how == "missing":
        library.missing.add("nvmlDeviceGetMemoryInfo_v2")
    else:
        library.codes["nvmlDeviceGetMemoryInfo_v2"] = int(how)
    provider.devices()
    assert provider.read_memory("GPU-0") == DeviceMemory(80 * GIB, 20 * GIB, 60 * GIB, None)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((80, 1, 60, 20), DeviceMemory(80, 19, 60, 1)),
        ((80, 1, 60, NOT_AVAILABLE), DeviceMemory(80, 19, 60, 1)),
        ((80, NOT_AVAILABLE, 60, 19), DeviceMemory(80, 20, 60, None)),
        ((80, 30, 60, 19), DeviceMemory(80, 20, 60, None)),
        ((80, 20, 60, 0), DeviceMemory(80, 0, 60, 20)),
        ((0, 0, 0, 0), None),
        ((80, 0, 81, 0), None),
        ((NOT_AVAILABLE,) * 4, None),
    ],
)
def test_inconsistent_values_are_computed_from_total_and_free_or_rejected(
    provider: PynvmlProvider, library: Library, values: tuple[int, int, int, int], expected: DeviceMemory | None
) -> None:
    provider.devices()
    gpu = library.gpus[0]
    gpu.total, gpu.reserved, gpu.free, gpu.used = values
    if expected is None:
        with pytest.raises(errors.NvmlNotSupportedError):
            provider.read_memory("GPU-0")
    else:
        assert provider.read_memory("GPU-0") == expected


def test_a_utilization_that_is_not_a_percentage_is_rejected(provider: PynvmlProvider, library: Library) -> None:
    provider.devices()
    library.gpus[0].percent = 101
    with pytest.raises(errors.NvmlNotSupportedError):
        provider.read_utilization_ratio("GPU-0")


def test_nvml_unavailable_for_one_device_affects_that_device_only(provider: PynvmlProvider, library: Library) -> None:
    library.gpus[0].codes = {"handle": 4}
    assert uuids(provider) == ["GPU-1"], "this user may not get the handle of the other one"
    with pytest.raises(errors.NvmlDeviceLostError):
        provider.read_memory("GPU-0")
    library.gpus[0].codes = {"*": 1}
    assert uuids(provider) == ["", "GPU-1"]
    library.gpus[1].codes = {"handle": 1}
    with pytest.raises(errors.NvmlUnavailableError):
        provider.devices()


def test_a_gpu_with_mig_on_and_no_mig_device_is_listed_with_an_error(
    provider: PynvmlProvider, library: Library
) -> None:
    library.gpus[1].migs = []
    first, second = provider.devices()
    assert (first.uuid, first.error) == ("GPU-0", "")
    assert (second.gpu, second.uuid, second.name) == ("1", "GPU-1", library.gpus[1].name)
    assert "MIG is on" in second.error
    library.gpus[1].migs = [Gpu("MIG-a")]
    assert uuids(provider) == ["GPU-0", "MIG-a"]


HOST = DeviceMemory(9 << 10, 2 << 10, 7 << 10, None, of_host=True)


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("NVIDIA GB10", 3, HOST),
        ("Orin (nvgpu)", None, HOST),  # all values are 0
        ("NVIDIA Jetson AGX Orin", 3, HOST),
        ("NVIDIA GB10", 0, DeviceMemory(80 * GIB, 19 * GIB, 60 * GIB, GIB)),
        ("NVIDIA H100 80GB HBM3", 3, errors.NvmlNotSupportedError),
        ("NVIDIA GB100", 3, errors.NvmlNotSupportedError),
        ("NVIDIA GB10", 4, errors.NvmlPermissionError),
    ],
)
def test_an_integrated_gpu_without_memory_values_and_no_other_has_those_of_the_host(
    library: Library, tmp_path: Path, name: str, code: int | None, expected: Any
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:  7 kB\nCached:  7 kB\n")
    gpu = Gpu("GPU-0", name=name)
    library.gpus = [gpu]
    provider = PynvmlProvider(meminfo=meminfo)
    provider.open()
    provider.devices()
    if code is None:
        gpu.total = gpu.free = gpu.used = gpu.reserved = 0
    elif code:
        gpu.codes = {"nvmlDeviceGetMemoryInfo": code, "nvmlDeviceGetMemoryInfo_v2": code}
    if isinstance(expected, DeviceMemory):
        assert provider.read_memory("GPU-0") == expected
    else:
        with pytest.raises(expected):
            provider.read_memory("GPU-0")
    if expected is HOST:
        meminfo.write_text("MemTotal:  9 kB\n")  # an old kernel
        with pytest.raises(errors.NvmlNotSupportedError):
            provider.read_memory("GPU-0")


def test_the_active_processes_are_those_with_a_percentage(provider: PynvmlProvider, library: Library) -> None:
    provider.devices()
    gpu = library.gpus[0]
    gpu.percent = 0
    assert provider.read_active_pids("GPU-0") == frozenset(), "no entry and an idle device"
    gpu.percent = 50
    with pytest.raises(errors.NvmlNotSupportedError):
        provider.read_active_pids("GPU-0")  # it has never shown a process of this device, which is in use
    # Drivers return entries that they have not set.
    gpu.utilization = [(30, 37, 0), (31, 0, 0), (32, 37100, 50), (33, 0, 2)]
    assert provider.read_active_pids("GPU-0") == {30, 33}
    gpu.utilization = []
    assert provider.read_active_pids("GPU-0") == frozenset(), "another process than the listed ones uses the device"
    for code in RETURN_CODES:
        gpu.codes = {"nvmlDeviceGetProcessUtilization": code}
        with pytest.raises(RETURN_CODES[code][0]):
            provider.read_active_pids("GPU-0")


def test_every_call_raises_only_errors_of_this_package(provider: PynvmlProvider, library: Library) -> None:
    provider.devices()
    for code in RETURN_CODES:
        library.codes = {
            "nvmlDeviceGetCount_v2": code,
            "nvmlDeviceGetMemoryInfo": code,
            "nvmlDeviceGetMemoryInfo_v2": code,
            "nvmlDeviceGetUtilizationRates": code,
            "nvmlSystemGetDriverVersion": code,
            "nvmlDeviceGetComputeRunningProcesses_v3": code,
        }
        for call in (
            provider.devices,
            provider.driver_version,
            lambda: provider.read_processes("GPU-0"),
            lambda: provider.read_memory("GPU-0"),
            lambda: provider.read_utilization_ratio("GPU-0"),
        ):
            with pytest.raises(RETURN_CODES[code][0]):
                call()


def test_open_and_mapped_device_files_and_the_library_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "fd").mkdir()
    for number, target in enumerate(["/dev/null", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia0", "socket:[4711]"]):
        (tmp_path / "fd" / str(number)).symlink_to(target)
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04"
    lines = [
        "00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/python3",
        "7f0c1a000000-7f0c1a021000 rw-p 00000000 00:00 0",
        f"7f0c1b000000-7f0c1b021000 r-xp 00000000 08:02 99 {library}",
        f"7f0c1b021000-7f0c1b022000 rw-p 00000000 08:02 99 {library}",
        f"7f0c1b023000-7f0c1b024000 rw-p 00000000 08:02 98 {library} (deleted)",
        "7f0c1c000000-7f0c1c001000 rw-s 00000000 00:06 12 /dev/nvidia-uvm",
    ]
    (tmp_path / "maps").write_text("\n".join(lines))
    assert open_driver_files(tmp_path) == (
        *("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"),
        *(library, f"{library} (deleted)"),  # replaced on disk
    )


def test_a_library_with_another_version_than_the_driver_is_loaded_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloaded: list[int] = []
    monkeypatch.setattr(library_module, "_dlclose", unloaded.append)
    provider = PynvmlProvider()
    for code in (4, 18):
        library.codes["nvmlInitWithFlags"] = code
        with pytest.raises(errors.NvmlUnavailableError, match=r"nvmlInit: .*NVML_ERROR_"):
            provider.open()
        assert unloaded == [4711] * (code == 18)
    replaced = Library(Gpu("GPU-9"))
    monkeypatch.setattr(pynvml, "CDLL", lambda name: replaced)
    provider.open()
    assert uuids(provider) == ["GPU-9"]


def test_a_failing_mig_device_does_not_affect_its_siblings(provider: PynvmlProvider, library: Library) -> None:
    broken = Gpu("MIG-a")
    broken.codes = {"*": 15}
    library.gpus[1].migs = [broken, None, Gpu("MIG-b")]
    assert [(identity.gpu, identity.uuid, bool(identity.error)) for identity in provider.devices()] == [
        ("0", "GPU-0", False),
        ("1:0", "", True),
        ("1:2", "MIG-b", False),
    ]
