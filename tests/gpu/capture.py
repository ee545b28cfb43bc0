"""Writes the answers of a real device, its driver and its torch into files, for tests on machines without a GPU.

    python -m tests.gpu.capture [--output FOLDER]

Three files, named after model, driver and torch version: `/metrics` with one reporting PyTorch process, the
`torch.cuda.memory_stats` of that process, and the answers of NVML. UUIDs and container ids are replaced by numbers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from tests.claims.place import Bench, Place
from tests.gpu.driver import anonymous, books, nvml, why_no_device
from tests.support.paths import DATA

__all__ = ["capture", "main"]

_OF_SYSTEM = ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion")
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
_TORCH = """
result = {
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "memory_stats": dict(torch.cuda.memory_stats(0)),
    "host_memory_stats": dict(torch.cuda.host_memory_stats()) if hasattr(torch.cuda, "host_memory_stats") else None,
    "mem_get_info": list(torch.cuda.mem_get_info(0)),
}
"""


def capture(folder: Path) -> list[Path]:
    """Capture into a folder and return the written files."""
    with tempfile.TemporaryDirectory() as scratch, Place(Path(scratch)) as place:
        metrics, torch = _heap(place.process())
        driver, uuids = _nvml_answers(), [book.uuid for book in books()]
    names = (driver["devices"][0]["nvmlDeviceGetName"], driver["nvmlSystemGetDriverVersion"], torch["torch"])
    stem = "{}_driver-{}_torch-{}".format(*(re.sub(r"[^a-z0-9.]+", "-", name.lower()) for name in names))
    texts = {"metrics.txt": metrics}
    for name, answers in (("memory_stats.json", torch), ("nvml.json", driver)):
        texts[name] = json.dumps(answers, indent=1, sort_keys=True, default=_plain) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{stem}.{name}").write_text(anonymous(text, uuids), encoding="utf-8")
    return [folder / f"{stem}.{name}" for name in texts]


def _heap(bench: Bench) -> tuple[str, dict[str, Any]]:
    """Return the scrape and torch's values of a heap with tensors, cache, fragments and one out-of-memory error."""
    bench.process.call("random_heap", seed=1, blocks=200)
    bench.exec("try: torch.empty(1 << 44, device='cuda')\nexcept torch.OutOfMemoryError: pass")
    bench.process.call("random_heap", seed=2, blocks=100)
    metrics, _ = bench.settle()
    return metrics.text, bench.exec(_TORCH)


def _nvml_answers() -> dict[str, Any]:
    with nvml():
        answers: dict[str, Any] = {name: _answer(getattr(pynvml, name)) for name in _OF_SYSTEM}
        answers["devices"] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            device = {name: _answer(getattr(pynvml, name), handle) for name in _OF_DEVICE}
            device["nvmlDeviceGetMemoryInfo_v2"] = _answer(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
            answers["devices"].append(device)
    return answers


def _answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer of a call, or the code and the text of its error."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        return {"error": error.value, "text": str(error)}


def _plain(value: Any) -> Any:
    """Return a value of pynvml for JSON."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, ctypes.Structure):
        return {name: getattr(value, name) for name, *_ in value._fields_}
    return vars(value)


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.capture", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=DATA, metavar="FOLDER", help="default: tests/data")
    folder = parser.parse_args().output
    if reason := why_no_device():
        print(f"nothing to capture: {reason}", file=sys.stderr)
        return 1
    for path in capture(folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
