"""`report`: the memory of a job, even after it has ended."""

from __future__ import annotations

import pwd
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import UNKNOWN, counted, human_bytes, human_seconds
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.options import api_options, job_option
from gpumem_exporter.cli.render.columns import local_time
from gpumem_exporter.cli.render.terminal import plain, print_result, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_EXAMPLES = """\b
Examples:
  gpumem-exporter report --job 4711
  gpumem-exporter report --job 4711 --user alice
  gpumem-exporter report --job llm-pretrain
  gpumem-exporter report --job 4711 --json
"""
_COLUMNS = (
    *(("gpu", "left"), ("pid", "right"), ("uid", "right"), ("workload", "cut"), ("rank", "right"), ("time", "right")),
    *((name, "right") for name in ("peak", "mean", "reserved peak", "mean idle cache")),
)
_SIZES = ("used_peak_bytes", "used_mean_bytes", "reserved_highest_bytes", "idle_cache_mean_bytes")


@click.command(epilog=_EXAMPLES)
@job_option("The job", required=True)
@click.option("--user", metavar="USER", help="Only processes of this user: a name or a uid.")
@api_options
def report(api: ExporterApi, job: str, user: str | None, as_json: bool) -> int:
    """Show the memory of a job, even after it has ended.

    The exporter records the values of each reporting process, from its first report or from the exporter's start if
    that is later. With --storage.path, the values of ended processes survive a restart of the exporter. Peak and mean
    are the driver's values, read once a second. The reserved peak is PyTorch's own, which is exact.
    """
    query = "" if user is None else f"?uid={_uid(user)}"
    document = api.get(f"/api/v1/jobs/{quote(job, safe='')}{query}")
    print_result(document, _shown(document), as_json=as_json)
    return 0


def _uid(user: str) -> int:
    if user.isascii() and user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, OSError):
        raise ConfigurationError(f"invalid --user {user!r}: this machine has no such user; give the uid") from None


def _shown(job: Mapping[str, Any]) -> Iterator[RenderableType]:
    processes = job["processes"]
    rows = [(process, device) for process in processes for device in process["devices"]]
    yield table(f"Job {job['job_id']}", _COLUMNS, (_row(process, device) for process, device in rows))
    peaks = [device["used_peak_bytes"] for _, device in rows if device["used_peak_bytes"] is not None]
    yield plain("")
    yield plain(f"Highest peak of a process on a device: {human_bytes(max(peaks, default=None))}.", "bold")
    if job.get("more"):
        yield plain("The job has more ended processes than a reply may have; the latest ones are missing.")
    for profile in job.get("profiles", ()):
        moment = local_time(profile["unix_seconds"], time.time())
        rank = f"rank {profile['rank']}, " if profile["rank"] else ""
        command = f"gpumem-exporter profile show {profile['id'][:8]}"
        yield plain(f"Out of memory at {moment} in {rank}pid {profile['pid']}. What held the memory: {command}")
    # A process that did not report for a while and reports again appears twice.
    pids = {process["pid"] for process in processes}
    if running := len({process["pid"] for process in processes if process["end_unix_seconds"] is None}):
        yield plain(f"Still running: {running} of {counted(len(pids), 'process', 'processes')}.")


def _row(process: Mapping[str, Any], device: Mapping[str, Any]) -> tuple[str, ...]:
    started, ended = process["first_report_unix_seconds"], process["end_unix_seconds"]
    seconds = None if started is None else (time.time() if ended is None else ended) - started
    return (
        device["gpu"] or device["uuid"],
        str(process["pid"]),
        UNKNOWN if process["uid"] is None else str(process["uid"]),
        process["workload"] or UNKNOWN,
        process["rank"] or UNKNOWN,
        human_seconds(seconds),
        *(human_bytes(device[name]) for name in _SIZES),
    )
