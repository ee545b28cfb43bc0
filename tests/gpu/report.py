"""Measures every claim on an emulated node and on this machine's GPU, and writes a page that compares the values.

    python -m tests.gpu.report [--only TEXT] [--output FOLDER]

The page `gpu-report-<model>-<driver>-<torch>.md` is rewritten after each claim, so that an interrupted run keeps what
it measured. Exit codes: 0 all values agree; 1 some disagree, or there is no GPU; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import enum
import itertools
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.claims.place import Place
from tests.claims.table import CLAIMS
from tests.claims.values import Claim, NotAvailableError, Scalar, Value, Values
from tests.emulation.node import GIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.gpu.driver import anonymous, books, why_no_device
from tests.support.paths import DATA, REPOSITORY

__all__ = ["Report", "Verdict", "compare", "main"]

LONGEST_CELL = 200

_READING = """\
Values are bytes unless their name says otherwise. A value agrees if it has its
expected value in each place, and is the same in both places unless it depends on the device. If the places disagree,
correct the emulated node."""

Result = Values | Exception
"""The values of a claim in one place, or the exception that it raised there."""


class Verdict(enum.Enum):
    """The result of a comparison, in the order of the page. The values are the headings."""

    NO = "Disagreements"
    YES = "Agreements"
    NOT_COMPARED = "Not compared"


Row = tuple[Verdict, tuple[str, ...]]
"""One value of a claim: the claim, the name of the value, and its text in each place."""


def compare(claim: str, results: Sequence[Result]) -> Iterator[Row]:
    """Yield the rows of a claim from its result in each place."""
    raised = [result for result in results if isinstance(result, Exception)]
    if raised:
        skipped = all(isinstance(error, NotAvailableError) for error in raised)
        yield Verdict.NOT_COMPARED if skipped else Verdict.NO, (claim, "the claim", *map(_summary, results))
    columns: list[Values] = [{} if isinstance(result, Exception) else result for result in results]
    for name in dict.fromkeys(itertools.chain.from_iterable(columns)):
        values = [column.get(name) for column in columns]
        yield _verdict(values, comparable=not raised), (claim, name, *map(_text, values))


def _verdict(values: Sequence[Value | None], *, comparable: bool) -> Verdict:
    present = [value for value in values if value is not None]
    if any(value.wrong for value in present):
        return Verdict.NO
    if not comparable:
        return Verdict.NOT_COMPARED
    same = all(value.per_device or value.value == present[0].value for value in present)
    return Verdict.YES if same and len(present) == len(values) else Verdict.NO


def _text(value: Value | None) -> str:
    if value is None:
        return "–"
    return f"{_scalar(value.value)} instead of {_scalar(value.expected)}" if value.wrong else _scalar(value.value)


def _scalar(value: Scalar) -> str:
    if value is None:
        return "absent"
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _summary(result: Result) -> str:
    if isinstance(result, NotAvailableError):
        return str(result)
    return f"{type(result).__name__}: {result}".splitlines()[0] if isinstance(result, Exception) else "measured"


class Report:
    """The values measured so far, and the page that shows them.

    Args:
        path: the file that receives the page after each claim; None for no file.
        about: describes the machine at the top of the page.
        places: the places by the titles of their columns.
        uuids: UUIDs that the page must not show.
    """

    def __init__(
        self, path: Path | None, about: Mapping[str, str], places: Mapping[str, Place], uuids: Sequence[str] = ()
    ) -> None:
        self._path, self._about, self._places, self._uuids = path, about, places, uuids
        self._rows: list[Row] = []

    @property
    def agrees(self) -> bool:
        """Whether no value disagrees."""
        return all(verdict is not Verdict.NO for verdict, _ in self._rows)

    def measure(self, claims: Sequence[Claim]) -> None:
        """Measure each claim in all places, and write the page after each."""
        for number, claim in enumerate(claims, start=1):
            print(f"{number}/{len(claims)} {claim.name}", file=sys.stderr)
            self._rows += compare(claim.name, [self._measured(claim, title) for title in self._places])
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(self.page(), encoding="utf-8")

    def _measured(self, claim: Claim, title: str) -> Result:
        """Return the result of a claim; after an error, the next claim starts with new processes."""
        try:
            return claim.measure(self._places[title])
        except NotAvailableError as reason:
            return reason
        except Exception as error:  # noqa: BLE001 - the other claims must still run
            self._places[title].rest()
            traceback.print_exc()
            return error

    def page(self) -> str:
        """Return the page as Markdown."""
        lines = ["# GPU report", "", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {_cell(text)} |" for name, text in self._about.items()]
        lines += ["", _READING]
        for verdict in Verdict:
            rows = [cells for found, cells in self._rows if found is verdict]
            lines += ["", f"## {verdict.value}", "", *(self._table(rows) if rows else ["None."])]
        return anonymous("\n".join(lines) + "\n", self._uuids)

    def _table(self, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
        yield f"| claim | value | {' | '.join(self._places)} |"
        yield f"| --- | --- |{' ---: |' * len(self._places)}"
        for cells in rows:
            yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return textwrap.shorten(text, LONGEST_CELL, placeholder=" …").replace("|", "\\|")


_DESCRIBE = """
import platform, time, pynvml
pynvml.nvmlInit()
result = {
    "GPU": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
    "driver": pynvml.nvmlSystemGetDriverVersion(),
    "CUDA of the driver": str(pynvml.nvmlSystemGetCudaDriverVersion()),
    "torch": torch.__version__.partition("+")[0],
    "CUDA of torch": str(torch.version.cuda),
    "Python": platform.python_version(),
    "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
}
"""


def _describe(node: EmulatedNode | None) -> dict[str, str]:
    """Describe an emulated node or this machine, and the commit."""
    with TorchProcess(node) as process:
        about: dict[str, str] = process.exec(_DESCRIBE)
    git = "git describe --always --dirty || echo unknown"
    commit = subprocess.run(git, shell=True, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {**about, "commit": commit.stdout.strip()}


def _node_like_this_machine(folder: Path, about: Mapping[str, str]) -> EmulatedNode:
    """Return an emulated node with the GPUs and the driver version of this machine."""
    return EmulatedNode(
        folder,
        len(books()),
        [book.total_bytes for book in books()],
        reserved_bytes=books()[0].reserved_bytes,
        name=about["GPU"],
        driver_version=about["driver"],
        cuda_version=int(about["CUDA of the driver"]),
    )


def _run(claims: Sequence[Claim], scratch: Path, output: Path | None, *, emulated_only: bool) -> bool:
    """Measure the claims and write or print the page. Return whether all values agree."""
    if emulated_only:
        node = EmulatedNode(scratch / "node", 1, 80 * GIB, name="emulated node")
        about, uuids = _describe(node), []
    else:
        about, uuids = _describe(None), [book.uuid for book in books()]
        node = _node_like_this_machine(scratch / "node", about)
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", about[part]) for part in ("GPU", "driver", "torch"))
    path = None if output is None else output / f"gpu-report-{name}.md"
    with node, Place(scratch / "emulated", node) as emulated, Place(scratch / "real") as real:
        places = {"emulated": emulated} if emulated_only else {"emulated": emulated, "real": real}
        report = Report(path, about, places, uuids)
        report.measure(claims)
    print(report.page() if path is None else path)
    return report.agrees


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.report",
        description=(__doc__ or "").partition("\n")[0],
        epilog="With --only or --emulated-only, the page is printed unless --output is given.",
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write the page (default: tests/data)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="measure claims with TEXT in their name; repeatable"
    )
    parser.add_argument("--emulated-only", action="store_true", help="measure the emulated node alone; needs no GPU")
    options = parser.parse_args()
    claims = [claim for claim in CLAIMS if not options.only or any(text in claim.name for text in options.only)]
    if not claims:
        names = "\n".join(claim.name for claim in CLAIMS)
        parser.error(f"no claim has {' or '.join(map(repr, options.only))} in its name; the claims are\n{names}")
    if not options.emulated_only and (reason := why_no_device()):
        print(f"no report: {reason}; --emulated-only measures the emulated node alone", file=sys.stderr)
        return 1
    output = options.output or (None if options.only or options.emulated_only else DATA)
    with tempfile.TemporaryDirectory(prefix="gpumem-report-") as scratch:
        return 0 if _run(claims, Path(scratch), output, emulated_only=options.emulated_only) else 1


if __name__ == "__main__":
    sys.exit(main())
