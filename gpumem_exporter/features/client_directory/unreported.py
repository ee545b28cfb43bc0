"""How many processes do not report, and how jobs on this node get the client, as a finding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpumem_client.wire.units import counted, human_bytes
from gpumem_exporter.core.ledger import DeviceLedger, sum_of_known
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.page.findings import Finding, finding
from gpumem_exporter.page.jobs import Job

INJECTION_LABEL = 'gpumem.io/inject: "true"'
"""The label of pods, or of their namespace, into which the webhook injects the client."""


def unreported(
    _: Snapshot, jobs: Sequence[Job], __: Mapping[str, DeviceLedger], *, client_directory: str
) -> Iterator[Finding]:
    """Yield a finding if processes do not report. `client_directory` is empty without a folder of the client."""
    processes = {process.pid: process for job in jobs for process in job.processes if process.state == "unreported"}
    if not processes:
        return
    sizes = [share.used_bytes for process in processes.values() for share in process.shares.values()]
    known = sum_of_known(sizes or [None])
    least = "at least " if None in sizes else ""
    size = f" ({least}{human_bytes(known)})" if known is not None else ""
    every = counted(sum(len(job.processes) for job in jobs), "process", "processes")
    # Short: the page shows a finding in one line.
    if not client_directory:
        how = "Start PyTorch jobs below gpumem-run, or set --client.directory"
    elif any(process.identity("k8s_pod") for process in processes.values()):
        how = f"The chart's webhook lets pods with the label {INJECTION_LABEL} report"
    else:
        how = f"Start PyTorch jobs with PYTHONPATH={client_directory}"
    do = "does" if len(processes) == 1 else "do"
    sentence = f"{len(processes)} of {every} {do} not report{size}. {how}."
    yield finding("unreported", "", "Not reporting", sentence)
