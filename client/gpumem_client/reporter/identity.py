"""The identity of this process in its reports."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from gpumem_client import __version__
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.torch_access import rank_and_size
from gpumem_client.wire import procfs
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH, MAX_TEXT_LENGTH, ProcessIdentity

_RAY_TITLE = "ray::"
_ACTOR_ID_SHOWN = 8


def current_process(settings: ReporterSettings, torch_version: str = "") -> ProcessIdentity:
    """Return the identity of the calling process, without the allocator's settings, which reports add.

    Reads /proc, so call it once per session.
    """
    return ProcessIdentity(
        pid=os.getpid(),
        start_time_ticks=procfs.start_time_ticks(),
        pid_namespace=procfs.pid_namespace(),
        session=os.urandom(8).hex(),
        session_started_seconds=time.monotonic(),
        workload=settings.workload,
        rank=settings.rank or settings.default_rank,
        command=_command(),
        torch_version=torch_version[:MAX_TEXT_LENGTH],
        client_version=__version__,
        slurm_job_id=os.environ.get("SLURM_JOB_ID", "")[:MAX_LABEL_LENGTH],
        slurm_account=os.environ.get("SLURM_JOB_ACCOUNT", "")[:MAX_LABEL_LENGTH],
        ray_job_id=procfs.known_ray_job_id(os.environ.get("RAY_JOB_ID", ""))[:MAX_LABEL_LENGTH],
        world_size=settings.world_size,
        nvml_interceptor=procfs.nvml_interceptor(),
    )


def with_rank(identity: ProcessIdentity, default_rank: str = "") -> ProcessIdentity:
    """Return the identity with the rank in torch's process group, if neither the user nor a launcher has set one.

    `default_rank` is the rank until there is a group: see `ReporterSettings`.
    """
    # Lightning, `torch.multiprocessing.spawn` and notebooks' launchers set no variable that `start` can read: the rank
    # is known when the process group is initialized.
    group = rank_and_size() if identity.rank == default_rank else None
    return identity if group is None else replace(identity, rank=str(group[0]), world_size=group[1])


def with_ray(identity: ProcessIdentity) -> ProcessIdentity | None:
    """Return the identity with what Ray knows of this process; None before Ray is initialized here.

    Calls Ray, so use it once per session: Ray ends a process that asks it during its shutdown.
    """
    ray: Any = sys.modules.get("ray")
    if not hasattr(ray, "is_initialized") or not ray.is_initialized():  # missing while another thread imports Ray
        return None
    context = ray.get_runtime_context()
    # The environment has the nil job id in workers that Ray started in advance.
    job_id = procfs.known_ray_job_id(context.get_job_id()) or identity.ray_job_id
    actor_id = context.get_actor_id()
    title = " ".join(_cmdline())  # setproctitle may have changed it
    command = identity.command
    if actor_id and title.startswith(_RAY_TITLE):
        # Ray gives the processes of all actors of a class one title, so the command also names the actor.
        actor_class = title[len(_RAY_TITLE) :].partition(".")[0]  # the title also has the method while one runs
        name = context.get_actor_name() or actor_id[:_ACTOR_ID_SHOWN]
        command = procfs.label_text(f"{_RAY_TITLE}{actor_class}({name})")
    return replace(identity, ray_job_id=job_id[:MAX_LABEL_LENGTH], command=command)


def _command() -> str:
    """Return the program and the script of this process; in a worker of `multiprocessing`, the parent's script."""
    # Since 3.10, orig_argv contains the interpreter and its options; argv contains only the script.
    arguments: list[str] = getattr(sys, "orig_argv", None) or _cmdline()
    if not procfs.started_by_multiprocessing(arguments):
        return procfs.describe_command(arguments)
    # multiprocessing has set argv to the parent's, and imported the parent's main module under another name, unless it
    # is the __main__ of a package.
    module = getattr(getattr(sys.modules.get("__mp_main__"), "__spec__", None), "name", None)
    if isinstance(module, str):
        return procfs.describe_command([arguments[0], "-m", module])
    script = str(sys.argv[0]) if sys.argv else ""
    if script.endswith("/__main__.py"):
        script = os.path.dirname(script)  # noqa: PTH120 - pathlib takes longer to import
    return procfs.describe_command([arguments[0], script])


def _cmdline() -> list[str]:
    try:
        with open("/proc/self/cmdline", "rb") as cmdline:  # noqa: PTH123 - pathlib takes ten times as long
            return procfs.split_cmdline(cmdline.read())
    except OSError:
        return []
