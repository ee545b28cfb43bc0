"""Measures every claim on an emulated node and on this machine's GPU, and writes where the two disagree.

    python -m tests.gpu.report [--only TEXT] [--output FOLDER]

The report, `gpu-report-<model>-<driver>-<torch>.md`, is written anew after each claim: one that is stopped on its way
holds what was measured until then. Exit codes: 0 all agree, 1 something does not, or nothing could be measured, 2 wrong
usage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import pynvml

from tests.claims.comparison import Compared, Measured, measure
from tests.claims.figures import Claim
from tests.claims.place import Place
from tests.claims.table import CLAIMS
from tests.emulation.build import EmulationBuildError
from tests.emulation.node import GIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.gpu.driver import anonymous, books, nvml, why_no_device
from tests.gpu.report_page import file_name, markdown
from tests.support.paths import DATA, REPOSITORY
from tests.support.waiting import patient

__all__ = ["Device", "Report", "main"]


@dataclass(frozen=True, slots=True)
class Device:
    """The machine that a report is about."""

    model: str
    driver: str
    cuda_driver: int
    torch: str
    torch_cuda: str
    python: str = platform.python_version()

    @classmethod
    def of_this_machine(cls) -> Device:
        """By its driver, and by a process with its torch."""
        with nvml(), TorchProcess(None) as process:
            return cls(
                model=pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
                driver=pynvml.nvmlSystemGetDriverVersion(),
                cuda_driver=pynvml.nvmlSystemGetCudaDriverVersion(),
                torch=process.exec("result = torch.__version__"),
                torch_cuda=process.exec("result = str(torch.version.cuda)"),
            )


class Report:
    """What has been measured so far, kept in a file.

    Args:
        path: where it is written after each claim; None: nowhere.
        title: its heading.
        about: what its head says beside the number of claims.
        notes: what must be known of it before all else.
        asked: how many claims it is to have.
        uuids: of devices, which are nobody else's business.
    """

    def __init__(
        self,
        path: Path | None,
        title: str,
        about: Mapping[str, str],
        notes: Sequence[str],
        asked: int,
        uuids: Sequence[str] = (),
    ) -> None:
        self._path, self._title, self._about, self._notes = path, title, about, notes
        self._asked, self._uuids = asked, uuids
        self.compared: list[Compared] = []

    @property
    def text(self) -> str:
        """As Markdown."""
        disagree = sum(not each.agrees for each in self.compared)
        claims = f"{len(self.compared)} measured of {self._asked}; {disagree} disagree"
        text = markdown(self._title, {**self._about, "claims": claims}, self._notes, self.compared)
        return anonymous(text, self._uuids).replace(f"{REPOSITORY}{os.sep}", "")

    def run(self, claims: Sequence[Claim], emulated: Place | None, real: Place | None) -> bool:
        """Measures each claim in either place, one after the other; False where anything disagrees."""
        for number, claim in enumerate(claims, start=1):
            columns = []
            for place in (emulated, real):
                if claim.alone:
                    for each in filter(None, (emulated, real)):
                        each.rest()
                columns.append(None if place is None else measure(claim, place))
            self.compared.append(Compared(claim.name, *columns))
            self._write()
            _progress(f"{number}/{len(claims)}", self.compared[-1])
        return all(each.agrees for each in self.compared)

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside = self._path.with_name(f".{self._path.name}")
            aside.write_text(self.text, encoding="utf-8")
            aside.replace(self._path)


def _progress(number: str, compared: Compared) -> None:
    def took(measured: Measured | None) -> str:
        return "" if measured is None else f" {measured.seconds:.1f} s"

    verdict = "agrees" if compared.agrees else "DISAGREES"
    print(f"{number} {compared.claim}: {verdict}{took(compared.emulated)}{took(compared.real)}", file=sys.stderr)


def _chosen(texts: Sequence[str]) -> tuple[Claim, ...]:
    """The claims whose names contain any of these; all where there are none."""
    return tuple(claim for claim in CLAIMS if not texts or any(text in claim.name for text in texts))


@contextlib.contextmanager
def _emulated(folder: Path, device: Device | None) -> Iterator[Place]:
    """A place on a node of as many GPUs as there are here, each as large as the first, or one of 80 GiB.

    Raises:
        EmulationBuildError: it cannot be built here.
    """
    if device is None:
        node = EmulatedNode(folder / "node", 1, 80 * GIB)
    else:
        seen = books()
        node = EmulatedNode(
            folder / "node",
            len(seen),
            [book.total_bytes for book in seen],
            reserved_bytes=seen[0].reserved_bytes,
            name=device.model,
            driver_version=device.driver,
            cuda_version=device.cuda_driver,
        )
    with node, Place(folder / "emulated", node) as place:
        yield place


def _commit() -> str:
    """Of the working tree, and whether it has changes; what is known of it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(30)).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (", with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown: no git, or no repository, here"


def _about(device: Device) -> dict[str, str]:
    major, minor = divmod(device.cuda_driver // 10, 100)
    return {
        "GPU": device.model,
        "driver": f"{device.driver}, CUDA {major}.{minor}",
        "torch": f"{device.torch}, CUDA {device.torch_cuda}",
        "Python": device.python,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "commit": _commit(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    description, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.report",
        description=description,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: tests/data; with --only, the report is printed instead"
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="claims whose name contains it")
    parser.add_argument("--list", action="store_true", help="name the claims and measure nothing")
    parser.add_argument("--emulated-only", action="store_true", help="print the emulated figures; needs no GPU")
    parser.add_argument(
        "--device-is-emulated",
        action="store_true",
        help="the device is an emulated node that this program was started on: a report that tests the report",
    )
    options = parser.parse_args(arguments)
    claims = _chosen(options.only)
    if not claims:
        parser.error(f"no claim's name contains {' or '.join(map(repr, options.only))}: --list names them all")
    if options.list:
        print("\n".join(claim.name for claim in claims))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpumem-report-") as folder:
        if options.emulated_only:
            return _emulated_only(Path(folder), claims)
        return _both(Path(folder), claims, options)


def _emulated_only(folder: Path, claims: Sequence[Claim]) -> int:
    report = Report(None, "GPU report", {"commit": _commit()}, ["The emulated figures alone."], len(claims))
    try:
        with _emulated(folder, None) as place:
            held = report.run(claims, place, None)
    except EmulationBuildError as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    print(report.text, end="")
    return int(not held)


def _both(scratch: Path, claims: Sequence[Claim], options: argparse.Namespace) -> int:
    reason = why_no_device()
    if not reason and "EMULATED_NODE" in os.environ and not options.device_is_emulated:
        reason = "needs a real device, and this is the emulated node (--device-is-emulated, to test the report)"
    if reason:
        print(f"no report: {reason}\n--emulated-only prints the emulated node's figures anywhere", file=sys.stderr)
        return 1
    device = Device.of_this_machine()
    notes = ["The device is an emulated node, too: this says nothing of any GPU."] if options.device_is_emulated else []
    with contextlib.ExitStack() as stack:
        emulated = None
        try:
            emulated = stack.enter_context(_emulated(scratch, device))
        except EmulationBuildError as error:
            notes.append(f"No emulated figures, nothing was compared: {error}")
            print(notes[-1], file=sys.stderr)
        real = stack.enter_context(Place(scratch / "real"))
        folder = options.output or (None if options.only else DATA)
        path = None if folder is None else folder / file_name(device.model, device.driver, device.torch)
        uuids = [book.uuid for book in books()]
        report = Report(path, f"GPU report: {device.model}", _about(device), notes, len(claims), uuids)
        agree = report.run(claims, emulated, real)
    print(report.text if path is None else path)
    return int(not agree or emulated is None)


if __name__ == "__main__":
    sys.exit(main())
