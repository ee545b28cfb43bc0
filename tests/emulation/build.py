"""Build the emulated node's libraries with gcc, once for each version of their sources, torch and pynvml.

`python -m tests.emulation.build` builds them if necessary and prints their folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import REPOSITORY

SOURCES = Path(__file__).parent / "src"
CACHE = REPOSITORY / ".cache" / "emulation"

RUNTIME = "libemucudart.so"
DRIVER = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"
CONTROL = "libemunode.so"

_UNITS = {
    RUNTIME: ("node.c", "runtime_device.c", "runtime_memory.c", "runtime_streams.c", "runtime_kernels.c"),
    DRIVER: ("node.c", "driver.c"),
    NVML: ("node.c", "nvml.c"),
    CONTROL: ("node.c", "control.c"),
}
# The symbols of these units must stay local, because each library has its own mapping of the node.
_PRIVATE = {"node.c", "control.c"}
_NEWEST_NVML = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)
# The library of older drivers, which lacks these functions; each version is in a folder of its name.
_OLD_NVML = {
    "v2": _NEWEST_NVML,
    "v1": (*_NEWEST_NVML, "nvmlDeviceGetMemoryInfo_v2", *(name.replace("_v3", "_v2") for name in _NEWEST_NVML)),
}
_TORCH_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
# The real libraries serve these text lookups, which need no device.
_LEFT_TO_THE_REAL = re.compile(r"cudaGetError(Name|String)|cublas(Lt)?GetStatus(Name|String)")

_UNMET_RUNTIME = """\
void emu_unmet(const char *name, int *printed);
int rt_fail(int error);
#define UNMET(name) int name(void) { static int printed; emu_unmet(#name, &printed); return rt_fail(801); }
"""
_UNMET_DRIVER = """\
void emu_unmet(const char *name, int *printed);
#define UNMET(name) int name(void) { static int printed; emu_unmet(#name, &printed); return 801; }
"""
_SUCCEEDING = "#define UNMET(name) int name(void) { return 0; }\n"
_UNSUPPORTED_NVML = """\
int session_valid(void);
#define UNMET(name) int name(void) { return session_valid() ? 3 : 1; }
"""


class EmulationBuildError(RuntimeError):
    """The libraries cannot be built on this machine; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class _Toolchain:
    gcc: str
    nm: str
    torch: Path
    cuda_include: Path
    pynvml: Path
    versions: str


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise EmulationBuildError(f"the emulated node needs the Python package {name!r}: install the test dependencies")
    return Path(spec.origin)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise EmulationBuildError(
            f"the emulated node is built with {name}, which is not installed: apt-get install gcc"
        )
    return found


def _find_toolchain() -> _Toolchain:
    gcc, nm = _program("gcc"), _program("nm")
    torch, pynvml = _package("torch").parent, _package("pynvml")
    if not (torch / "lib" / "libc10_cuda.so").exists():
        raise EmulationBuildError(f"{torch} is not the CUDA build of PyTorch, whose allocator the emulated node runs")
    triton = importlib.util.find_spec("triton")
    roots = [torch.parent / "nvidia" / "cuda_runtime" / "include", *torch.parent.glob("nvidia/cu[0-9]*/include")]
    if triton is not None and triton.origin is not None:  # comes with every CUDA build of torch, headers included
        roots.insert(0, Path(triton.origin).parent / "backends" / "nvidia" / "include")
    include = next((root for root in roots if (root / "cuda_runtime_api.h").exists()), None)
    if include is None:
        raise EmulationBuildError("no cuda_runtime_api.h beside torch: install triton")
    versions = " ".join(
        (
            f"torch={importlib.metadata.version('torch')}",
            f"pynvml={importlib.metadata.version('nvidia-ml-py')}",
            f"gcc={_run([gcc, '-dumpfullversion']).strip()}",
            f"machine={platform.machine()}",
            f"size={(torch / 'lib' / 'libc10_cuda.so').stat().st_size}",
        )
    )
    return _Toolchain(gcc, nm, torch, include, pynvml, versions)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise EmulationBuildError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _names(tools: _Toolchain, flags: list[str], files: list[Path]) -> set[str]:
    """Return the symbols that nm lists, without their versions."""
    out = _run([tools.nm, *flags, *map(str, files)])
    return {fields[-1].split("@")[0] for line in out.splitlines() if len(fields := line.split()) >= 2}


def _compile(tools: _Toolchain, source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    hidden = ["-fvisibility=hidden"] if source.name in _PRIVATE else []
    includes = [f"-I{SOURCES}", f"-isystem{tools.cuda_include}"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    _run(
        [
            tools.gcc,
            "-std=gnu11",
            "-O2",
            "-g",
            "-fPIC",
            *warnings,
            *hidden,
            *includes,
            "-c",
            str(source),
            "-o",
            str(made),
        ]
    )
    return made


def _generated(tools: _Toolchain, folder: Path, name: str, head: str, missing: set[str]) -> Path:
    source = folder / name
    source.write_text(head + "".join(f"UNMET({symbol})\n" for symbol in sorted(missing)))
    return _compile(tools, source, folder)


def _link(tools: _Toolchain, library: str, made: list[Path], folder: Path, *flags: str) -> None:
    link = ["-shared", f"-Wl,-soname,{library}", "-Wl,-z,defs", *flags, *map(str, made), "-ldl", "-lpthread"]
    _run([tools.gcc, *link, "-o", str(folder / library)])


def _build_into(tools: _Toolchain, folder: Path) -> None:
    units = sorted({unit for units in _UNITS.values() for unit in units})
    compiled = {unit: _compile(tools, SOURCES / unit, folder) for unit in units}
    objects = {library: [compiled[unit] for unit in units] for library, units in _UNITS.items()}
    defined = {library: _names(tools, ["--defined-only"], made) for library, made in objects.items()}

    torch_libraries = [path for name in _TORCH_LIBRARIES if (path := tools.torch / "lib" / name).exists()]
    imported = _names(tools, ["-D", "--undefined-only"], torch_libraries)
    imported = {name for name in imported if not _LEFT_TO_THE_REAL.fullmatch(name)} - defined[RUNTIME]
    runtime = {name for name in imported if re.fullmatch(r"(__)?cuda[A-Z]\w*", name)}
    cublas = {name for name in imported if re.fullmatch(r"cublas(Lt)?[A-Z]\w*", name)}
    objects[RUNTIME].append(_generated(tools, folder, "unmet_runtime.c", _UNMET_RUNTIME, runtime))
    objects[RUNTIME].append(_generated(tools, folder, "cublas.c", _SUCCEEDING, cublas))

    # torch looks up driver functions by name, so the names are in its data.
    named = set(
        re.findall(rb"\0(cu[A-Z][A-Za-z0-9]+(?:_v\d)?)(?=\0)", (tools.torch / "lib" / "libc10_cuda.so").read_bytes())
    )
    driver = {name.decode() for name in named}
    driver |= _names(tools, ["-D", "--undefined-only"], [tools.torch / "lib" / "libcaffe2_nvrtc.so"])
    driver = {name for name in driver if re.fullmatch(r"cu[A-Z]\w*", name)} - defined[DRIVER]
    objects[DRIVER].append(_generated(tools, folder, "unmet_driver.c", _UNMET_DRIVER, driver))

    known = set(re.findall(r'"(nvml[A-Z]\w*)"', tools.pynvml.read_text())) - defined[NVML]
    objects[NVML].append(_generated(tools, folder, "unsupported_nvml.c", _UNSUPPORTED_NVML, known))

    for library, made in objects.items():
        _link(tools, library, made, folder)
    for version, missing in _OLD_NVML.items():
        (folder / version).mkdir()
        script = folder / f"{version}.map"
        script.write_text(f"{{ local: {' '.join(f'{name};' for name in missing)} }};\n")
        _link(tools, NVML, objects[NVML], folder / version, f"-Wl,--version-script={script}")


@functools.cache
def built() -> Path:
    """Return the folder of the four libraries; builds them if necessary.

    Processes may call it concurrently: each builds in a folder of its own, and the first result is kept.
    Raises EmulationBuildError if gcc, torch's CUDA build or pynvml is missing, or the compiler failed.
    """
    tools = _find_toolchain()
    digest = hashlib.sha256(tools.versions.encode())
    for source in (Path(__file__), *sorted(SOURCES.iterdir())):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = CACHE / digest.hexdigest()[:20]
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="building-") as aside:
        _build_into(tools, Path(aside))
        ready = Path(aside) / "ready"
        ready.mkdir()
        for made in (*_UNITS, *_OLD_NVML):
            (Path(aside) / made).rename(ready / made)
        try:
            ready.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


if __name__ == "__main__":
    print(built())
