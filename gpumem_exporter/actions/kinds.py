"""The actions: what each has that the surfaces show and decide by, in one declaration.

The command line, `fleet`, the results, the events and the page read it. `action_options` has the options of an action,
the client what a process does for it. Standard library only, because every command imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PROFILES_PER_MINUTE = 12
"""The maximum number of profiles that are taken of a process, and kept of it, in a minute."""


class Column(NamedTuple):
    """A column of the table of results: a field of a result, as `freed_bytes` or `snapshot.path`."""

    heading: str
    field: str
    minus: str = ""
    """A field that is subtracted; empty for none."""
    side: str = "right"


class ActionKind(NamedTuple):
    """An action, as people see it. `{}` in a deed stands for its processes."""

    would: str
    """The outcome of a dry run in a process that would do it."""
    deed: tuple[str, str] = ("clear {}", "Cleared {}")
    """What it would do, and what it did."""
    command: str = ""
    """The command of the terminal, in the form of `actions`; empty for a command of another form."""
    summary: str = ""
    description: str = ""
    examples: str = ""
    would_columns: tuple[Column, ...] = ()
    """The columns of a dry run besides the names."""
    done_columns: tuple[Column, ...] = (Column("took", "duration_seconds"),)
    by_device: bool = False
    """The action applies to the target devices only. All others apply to every device of a process."""
    releases: bool = True
    """It is for memory that others need. What does not release only looks at memory."""
    outside: bool = False
    """The exporter itself can act, so the action reaches also processes that only the driver lists."""
    per_minute: int | None = None
    """The most of these actions that a process receives in a minute; None for the limit of all actions."""


_FREED = Column("freed", "freed_bytes")
_STAYS_FREE = Column("stays free", "still_free_bytes")
_LIMIT = Column("limit", "limit_bytes")
_RESERVED = Column("reserved", "reserved_before_bytes")
_USED = Column("used now", "driver_before_bytes")
_TOOK = Column("took", "duration_seconds")

KINDS: Mapping[str, ActionKind] = {
    "empty_cache": ActionKind(
        "would_clear",
        command="clear",
        summary="Release cached memory to the driver.",
        description=(
            "Each selected process runs torch.cuda.empty_cache(). No tensor is touched. A process clears all of its "
            "devices: PyTorch has no other way. The next allocations take memory from the driver again, which costs "
            "some milliseconds once."
        ),
        examples="""\
  gpumem-exporter clear --all --dry-run               # how much a clear would free
  gpumem-exporter clear --gpu 0,1                     # as --gpu 0 --gpu 1
  gpumem-exporter clear --workload notebook --gc --reason "make room for the release run"
  gpumem-exporter clear --workload llm-pretrain       # all ranks, after the same step
  gpumem-exporter clear --workload notebook --mode idle --deadline 600
  gpumem-exporter clear --pid 4711 --settle 10 --json | jq .still_free_bytes
""",
        would_columns=(
            Column("reserved now", "reserved_before_bytes"),
            _STAYS_FREE,
            Column("reserved again", "freed_bytes", "still_free_bytes"),
        ),
        done_columns=(_FREED, _STAYS_FREE, Column("reserved after", "reserved_after_bytes"), _TOOK),
    ),
    "collect_garbage": ActionKind(
        "would_collect",
        deed=("collect garbage in {}; a clear frees the memory", "Collected garbage in {}; a clear frees the memory"),
        command="gc",
        summary="Run Python's garbage collector in processes.",
        description=(
            "It frees tensors in reference cycles, and runs finalizers of user code. The memory stays in the "
            "allocator's cache; `clear --gc` also releases it to the driver."
        ),
        examples="""\
  gpumem-exporter gc --pid 4711
  gpumem-exporter gc --workload notebook --reason "tensors in reference cycles"
  gpumem-exporter clear --workload notebook --gc      # collect, then release the cache
""",
        would_columns=(Column("allocated", "allocated_before_bytes"),),
        done_columns=(
            Column("before", "allocated_before_bytes"),
            Column("after", "allocated_after_bytes"),
            Column("collected", "allocated_before_bytes", "allocated_after_bytes"),
            _TOOK,
        ),
    ),
    "reset_peak": ActionKind(
        "would_reset",
        deed=("reset the peaks in {}", "Reset the peaks in {}"),
        command="reset-peak",
        summary="Reset the peak memory statistics of processes.",
        description=(
            "Each selected process runs torch.cuda.reset_peak_memory_stats() for the selected devices. This also "
            "resets what torch.cuda.max_memory_allocated() returns to user code."
        ),
        examples="""\
  gpumem-exporter reset-peak --all
  gpumem-exporter reset-peak --workload llm-pretrain --rank 0 --reason "after the warm-up"
""",
        by_device=True,
        releases=False,
    ),
    "snapshot": ActionKind(
        "would_write",
        deed=("write snapshots of {}", "Wrote snapshots of {}"),
        command="snapshot",
        summary="Write memory snapshots of processes.",
        description=(
            "Each selected process writes PyTorch's own pickle, for https://pytorch.org/memory_viz, into its "
            "GPUMEM_SNAPSHOT_DIR, by default a folder of its user in the temporary directory. The result has the "
            "path. If torch.cuda.memory._record_memory_history() is active in the process, the snapshot also has the "
            "code that allocated each block."
        ),
        examples="""\
  gpumem-exporter snapshot --pid 4711
  gpumem-exporter snapshot --workload llm-pretrain --rank 0 --mode step
""",
        done_columns=(Column("size", "snapshot.size_bytes"), Column("path", "snapshot.path", side="wrap")),
        releases=False,
    ),
    "profile": ActionKind(
        "would_profile",
        deed=("profile {}", "Profiled {}"),
        per_minute=PROFILES_PER_MINUTE,
    ),
    "set_memory_fraction": ActionKind(
        "would_set",
        deed=("limit {}", "Limited {}"),
        command="fraction",
        summary="Cap the memory that processes may reserve.",
        description=(
            "Each selected process runs torch.cuda.set_per_process_memory_fraction(F) for the selected devices. F is "
            "the share of each device's memory, over 0 and at most 1. This frees nothing. An allocation that would "
            "reserve more than the cap raises an out-of-memory error. The cap does not count CUDA contexts, NCCL and "
            "other libraries."
        ),
        examples="""\
  gpumem-exporter fraction 0.5 --workload notebook
  gpumem-exporter fraction 1 --pid 4711               # remove the cap
""",
        would_columns=(_LIMIT, _RESERVED),
        done_columns=(_LIMIT, _RESERVED, _TOOK),
        by_device=True,
    ),
    "terminate": ActionKind(
        "would_terminate",
        deed=("terminate {}", "Terminated {}"),
        command="terminate",
        summary="Terminate processes: SIGTERM, and SIGKILL after --grace.",
        description=(
            "The process must report or be on a device, and `serve --action.allow` must include terminate. The "
            "exporter sends the signals, so it needs the right to signal the process. Only root, the exporter's user, "
            "and clients with the token of --action.token-file may terminate processes. On a terminal, the command "
            "first shows what it would end, and asks. Without a terminal, and with --json, it needs --yes."
        ),
        examples="""\
  gpumem-exporter terminate --orphans --dry-run       # what launchers and servers have left behind
  gpumem-exporter terminate --orphans --yes           # without a question, as for cron
  gpumem-exporter terminate --pid 4711 --grace 120 --reason "left behind by job 17"
""",
        would_columns=(Column("frees", "freed_bytes"),),
        done_columns=(_FREED, _TOOK),
        outside=True,
    ),
    "release_memory": ActionKind(
        "would_release",
        deed=("put {} to sleep", "Put {} to sleep"),
        command="sleep",
        summary="Let vLLM release its memory.",
        description=(
            "The vLLM of each selected process offloads its weights to the host and drops its key-value cache, as a "
            "whole, on all its GPUs. Requests that arrive while it sleeps wait until it wakes. An engine that has "
            "requests is refused, unless --wait-idle or --force is given. What is freed is what the driver no longer "
            "lists, and the rest is what stays resident: CUDA graphs, context, NCCL. `serve --action.allow` must "
            "include release_memory."
        ),
        examples="""\
  gpumem-exporter sleep --workload chat --dry-run
  gpumem-exporter sleep --workload chat --wait-idle 30
  gpumem-exporter sleep --workload chat --keep weights     # only the key-value cache: wakes faster
""",
        would_columns=(_USED, Column("frees", "freed_bytes")),
        done_columns=(_FREED, _STAYS_FREE, Column("resident", "driver_after_bytes"), _TOOK),
        outside=True,
    ),
    "resume_memory": ActionKind(
        "would_resume",
        deed=("wake {}", "Woke {}"),
        command="wake",
        summary="Let vLLM take its memory again.",
        description=(
            "The vLLM of each selected process takes the memory again that it released, and serves. It is refused if "
            "a GPU lacks the memory. `serve --action.allow` must include resume_memory."
        ),
        examples="""\
  gpumem-exporter wake --workload chat --dry-run
  gpumem-exporter wake --workload chat
""",
        would_columns=(_USED,),
        done_columns=(Column("before", "driver_before_bytes"), Column("after", "driver_after_bytes"), _TOOK),
        outside=True,
    ),
}
"""The actions, in the order of the help."""
COMMAND_NAMES: Mapping[str, str] = {action: kind.command or action for action, kind in KINDS.items()}
"""The name of each action on the terminal and in events."""

_DONE = frozenset(("done", *(kind.would for kind in KINDS.values())))


def is_done(outcome: str) -> bool:
    """Return whether an outcome is `done`, or in a dry run would be."""
    return outcome in _DONE
