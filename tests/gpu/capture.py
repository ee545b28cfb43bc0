"""Writes down what a real device, its driver and its torch say, for tests on machines without one.

    python -m tests.gpu.capture [--output FOLDER]

Three files, whose names carry model, driver and torch version: the exporter's `/metrics` with one reporting PyTorch
process, that process' `torch.cuda.memory_stats` in both forms, and NVML's answers to every call that the exporter
makes and some that it might. UUIDs, serial numbers and container ids are replaced by numbered ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from tests.emulation.torch_process import TorchProcess
from tests.gpu.driver import anonymous, books, nvml, why_no_device
from tests.support.exporter_process import ExporterProcess
from tests.support.paths import DATA
from tests.support.waiting import wait_for, wait_until_equal

__all__ = ["capture", "main"]


_OF_DEVICE = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetBrand",
)
_OF_SYSTEM = ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion")

_STATS = """
result = {
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "memory_stats": dict(torch.cuda.memory_stats(0)),
    "nested": {str(key): value for key, value in torch._C._cuda_memoryStats(0).items()},
    "host_memory_stats": dict(torch.cuda.host_memory_stats()) if hasattr(torch.cuda, "host_memory_stats") else None,
    "mem_get_info": list(torch.cuda.mem_get_info(0)),
}
nested = result["nested"].get("reserved_bytes_by_private_pools")
if nested is not None:
    result["nested"]["reserved_bytes_by_private_pools"] = {str(pool): value for pool, value in nested.items()}
"""


def capture(folder: Path) -> list[Path]:
    """Capture into a folder and return the files written."""
    with tempfile.TemporaryDirectory() as scratch:
        exporter = ExporterProcess(Path(scratch), "--report.interval", "0.2", "--collect.interval", "0.2")
        try:
            with TorchProcess(None, {"GPUMEM_EXPORTER_URL": exporter.url}) as process:
                metrics, stats = _measure(exporter, process)
                answers = _nvml_answers()
        finally:
            exporter.close()
    names = {
        "metrics.txt": metrics,
        "memory_stats.json": json.dumps(stats, indent=1, sort_keys=True) + "\n",
        "nvml.json": json.dumps(answers, indent=1, sort_keys=True) + "\n",
    }
    stem = "_".join(
        (
            _slug(answers["devices"][0]["nvmlDeviceGetName"]),
            f"driver-{_slug(answers['nvmlSystemGetDriverVersion'])}",
            f"torch-{_slug(stats['torch'])}",
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in names.items():
        path = folder / f"{stem}.{name}"
        path.write_text(anonymous(text, [book.uuid for book in books()]))
        written.append(path)
    return written


def _measure(exporter: ExporterProcess, process: TorchProcess) -> tuple[str, dict[str, Any]]:
    """A heap with tensors, cache and fragments, one OOM behind it; seen from outside and from inside."""
    process.call("start_client", workload="capture", rank=0)
    process.call("random_heap", seed=1, blocks=200)
    process.exec("try:\n    torch.empty(1 << 44, device='cuda')\nexcept torch.OutOfMemoryError: pass")
    process.call("random_heap", seed=2, blocks=100)
    stats: dict[str, Any] = process.exec(_STATS)
    allocated = stats["memory_stats"]["allocated_bytes.all.current"]
    shown = {"pid": str(process.pid)}
    wait_until_equal(
        lambda: exporter.metrics().values("gpumem_torch_allocated_bytes", **shown), [allocated], "a report of the heap"
    )
    polls = exporter.metrics().value("gpumem_poll_timestamp_seconds")
    wait_for(lambda: exporter.metrics().value("gpumem_poll_timestamp_seconds") > polls, "a poll after it")
    metrics = exporter.metrics()
    metrics.assert_ledgers_add_up()
    return metrics.text, stats


def _nvml_answers() -> dict[str, Any]:
    with nvml():
        answers: dict[str, Any] = {name: _ask(getattr(pynvml, name)) for name in _OF_SYSTEM}
        answers["devices"] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            device = {name: _ask(getattr(pynvml, name), handle) for name in _OF_DEVICE}
            device["nvmlDeviceGetMemoryInfo_v2"] = _ask(
                lambda handle=handle: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            )
            answers["devices"].append(device)
    return answers


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """A call's answer as JSON takes it, or the error's number and text."""
    try:
        return _plain(function(*arguments))
    except pynvml.NVMLError as error:
        return {"error": error.value, "text": str(error)}


def _plain(value: Any) -> Any:
    if isinstance(value, ctypes.Structure):
        return {name: _plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {name: _plain(part) for name, part in vars(value).items()}  # pynvml's "friendly" objects


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.capture", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=DATA, metavar="FOLDER", help="default: tests/data")
    folder = parser.parse_args().output
    reason = "must not be the emulated node" if "EMULATED_NODE" in os.environ else why_no_device()
    if reason:
        print(f"nothing to capture: this {reason}", file=sys.stderr)
        return 1
    for path in capture(folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
