"""The reporter's settings: the labels of `run`, otherwise the arguments of `start()`, otherwise the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumem_client.reporter.planned_peak import AnyPlan, chosen_plan
from gpumem_client.wire.http import exporter_urls
from gpumem_client.wire.protocol import ACTION_OF_COMMAND, COMMAND_ACTIONS, MAX_LABEL_LENGTH
from gpumem_client.wire.trust import Trust

# Variables with a rank and with the number of ranks. Only srun sets SLURM_STEP_NUM_TASKS.
_RANKS = (("GPUMEM_RANK", ""), ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))


@dataclass(frozen=True)
class ReporterSettings:
    """The settings of one reporter: argument, otherwise environment, otherwise default."""

    urls: tuple[str, ...]
    workload: str
    rank: str
    token: str
    token_file: str
    disabled: bool
    trust: Trust
    plan: AnyPlan | None = None
    world_size: int | None = None
    """The number of ranks, if `rank` comes from a launcher."""
    default_rank: str = ""
    """The rank until torch's process group has one, if `rank` is empty."""
    oom_profile: bool = False
    """Whether to record allocations from the start, for a profile of out-of-memory errors."""
    denied_actions: tuple[str, ...] = ()
    """The actions that no exporter may request of this process."""
    ignored: tuple[str, ...] = ()
    """What has no effect and why, for the log."""

    @classmethod
    def resolve(
        cls,
        *,
        workload: str | None = None,
        rank: str | int | None = None,
        url: str | None = None,
        plan: AnyPlan | None = None,
        oom_profile: bool | None = None,
        actions: str | Iterable[str] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> ReporterSettings:
        """Combine arguments and environment. Labels are cut to `MAX_LABEL_LENGTH` characters.

        Raises:
            ConfigurationError: GPUMEM_EXPORTER_USER is not a user of this machine.
        """
        world_size = None
        ignored = []
        if environ.get("GPUMEM_INJECT") == "1":
            # Below `gpumem-exporter run`, the operator who starts the job names it, not the script.
            for name, argument in (("workload", workload), ("rank", rank)):
                label = environ.get(f"GPUMEM_{name.upper()}")
                if label and argument is not None and str(argument) != label:
                    ignored.append(f"{name}={argument!r} has no effect: `gpumem-exporter run` has set it to {label!r}")
            workload, rank = environ.get("GPUMEM_WORKLOAD") or workload, environ.get("GPUMEM_RANK") or rank
        if rank is None:
            name, size = next((names for names in _RANKS if environ.get(names[0])), ("", ""))
            rank, world_size = environ.get(name, ""), _count(environ.get(size, ""))
        if oom_profile is None:
            oom_profile = _is_on(environ.get("GPUMEM_OOM_PROFILE", ""))
        # Each of the three takes actions away and gives none, so none takes precedence.
        denied = {
            *_denied(actions, "actions", ignored),
            *_denied(environ.get("GPUMEM_ACTIONS"), "GPUMEM_ACTIONS", ignored),
        }
        if not _is_on(environ.get("GPUMEM_PROFILE") or "1"):
            denied.add("profile")
            if oom_profile:
                ignored.append("out-of-memory errors get no profile: GPUMEM_PROFILE turns profiles off")
                oom_profile = False
        workload = workload if workload is not None else environ.get("GPUMEM_WORKLOAD", "")
        return cls(
            urls=(url,) if url else exporter_urls(environ),
            # A platform sets the defaults for every job. What the job or its launcher sets comes first.
            workload=(workload or environ.get("GPUMEM_DEFAULT_WORKLOAD", ""))[:MAX_LABEL_LENGTH],
            rank=str(rank)[:MAX_LABEL_LENGTH],
            token=environ.get("GPUMEM_REPORT_TOKEN", "").strip(),
            token_file=environ.get("GPUMEM_REPORT_TOKEN_FILE", "").strip(),
            disabled=_is_on(environ.get("GPUMEM_DISABLED", "")),
            trust=Trust.from_environment(environ),
            plan=chosen_plan(plan, environ),
            world_size=world_size,
            default_rank="" if rank != "" else environ.get("GPUMEM_DEFAULT_RANK", "")[:MAX_LABEL_LENGTH],
            oom_profile=oom_profile,
            denied_actions=tuple(action for action in COMMAND_ACTIONS if action in denied),
            ignored=tuple(ignored),
        )

    def authorization(self) -> dict[str, str]:
        """Return the header with the report token.

        Raises:
            OSError: the token file cannot be read.
        """
        # The file is read for each report: its token may be rotated.
        token = self.token or (Path(self.token_file).read_text().strip() if self.token_file else "")
        return {"Authorization": f"Bearer {token}"} if token else {}


def _denied(allowed: str | Iterable[str] | None, source: str, ignored: list[str]) -> Iterator[str]:
    """Yield the actions that a list leaves out; none without a list. An unknown name in it allows nothing."""
    if allowed is None:
        return
    names = allowed.split(",") if isinstance(allowed, str) else allowed
    actions = {ACTION_OF_COMMAND.get(name, name) for name in map(str.strip, map(str, names))} - {"", "none"}
    unknown = sorted(actions.difference(COMMAND_ACTIONS))
    ignored += [f"{source}: {name!r} allows nothing: expected {', '.join(COMMAND_ACTIONS)}" for name in unknown]
    yield from (action for action in COMMAND_ACTIONS if action not in actions)


def _is_on(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "on")


def _count(text: str) -> int | None:
    """Return a number of ranks, or None if the text is not a positive number."""
    return int(text) or None if text.isascii() and text.isdecimal() and len(text) < 10 else None
