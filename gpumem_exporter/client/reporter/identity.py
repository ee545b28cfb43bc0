"""The identity of this process in its reports."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from gpumem_exporter import __version__, procfs
from gpumem_exporter.client.process_group import rank_and_size
from gpumem_exporter.client.reporter.settings import ReporterSettings
from gpumem_exporter.wire.protocol import MAX_LABEL_LENGTH, MAX_TEXT_LENGTH, ProcessIdentity

__all__ = ["current_process", "with_rank"]


def current_process(
    settings: ReporterSettings, *, torch_version: str = "", allocator_settings: str = ""
) -> ProcessIdentity:
    """Return the identity of the calling process. Reads /proc, so call it once per session."""
    return ProcessIdentity(
        pid=os.getpid(),
        start_time_ticks=procfs.start_time_ticks(),
        pid_namespace=procfs.pid_namespace(),
        session=os.urandom(8).hex(),
        session_started_seconds=time.monotonic(),
        workload=settings.workload,
        rank=settings.rank,
        # orig_argv still contains the interpreter and its options (3.10 and later), argv only the script.
        command=procfs.describe_command(sys.orig_argv),
        torch_version=torch_version[:MAX_TEXT_LENGTH],
        allocator_settings=allocator_settings[:MAX_TEXT_LENGTH],
        client_version=__version__,
        slurm_job_id=os.environ.get("SLURM_JOB_ID", "")[:MAX_LABEL_LENGTH],
        ray_job_id=os.environ.get("RAY_JOB_ID", "")[:MAX_LABEL_LENGTH],
        world_size=settings.world_size,
    )


def with_rank(identity: ProcessIdentity) -> ProcessIdentity:
    """Return the identity with the rank in torch's process group, if neither the user nor a launcher has set one.

    Lightning, `torch.multiprocessing.spawn` and notebooks' launchers set no variable that `start` can read: the rank is
    known when the process group is initialized.
    """
    group = None if identity.rank else rank_and_size()
    return identity if group is None else replace(identity, rank=str(group[0]), world_size=group[1])
