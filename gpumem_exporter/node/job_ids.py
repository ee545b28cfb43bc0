"""The ids of jobs in URLs and documents, which differ from boot to boot."""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path

from gpumem_exporter.core.samples import JobKey, ReportingProcess

# What a URL would have to escape.
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_ID_CHARACTERS = 64


def job_id(job: JobKey) -> str:
    """Return the id of a job with a workload: the same after a restart of the job or of the exporter.

    It fits into a URL, and shows nothing about the owner.
    """
    workload, slurm_job_id, uid, place = job
    text = f"{uid} {place!r} {workload}" + (f"\0{slurm_job_id}" if slurm_job_id else "")
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6, key=_key())
    return f"{_UNSAFE.sub('-', workload)[:_ID_CHARACTERS]}~{digest.hexdigest()}"


def job_of_process(process: ReportingProcess) -> str:
    """Return the id of the job of a process that reports."""
    return job_id(process.job) if process.job is not None else f"pid~{process.name}"


@cache
def _key() -> bytes:
    # Without a key, any client could find the uid by hashing all of them. Each boot has another id, which is the same
    # in all containers of the node and is never sent.
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return os.urandom(16)
