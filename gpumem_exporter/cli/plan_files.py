"""`plan --apply` and `--restore`: what they show, and the order in which they write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from gpumem_exporter.training.planning.plan import Plan

__all__ = ["change_files", "restore_files"]


def change_files(paths: Sequence[Path], maps: Sequence[str], plan: Plan, *, write: bool, file: IO[str]) -> None:
    """Show the differences; write them once all files are known to take them.

    Raises:
        ConfigurationError: a file or a key cannot be changed; no file is then.
    """
    from gpumem_exporter.training.planning.configuration import apply, backup_of, diff, parse_map, planned_text

    planned = {"batch": plan.batch, "accumulation": plan.accumulation, "effective_batch": plan.effective_batch}
    values = parse_map(maps, planned)
    texts = [(path, *planned_text(path, values)) for path in paths]
    for path, before, after in texts:
        print(diff(path, before, after) or f"{path} says so already\n", end="", file=file)
    for path, before, after in texts if write else ():
        if before != after:
            apply(path, before, after)
            print(f"{path} is changed; what it was is in {backup_of(path)}", file=file)


def restore_files(paths: Sequence[Path]) -> int:
    """Put back what the files were."""
    from gpumem_exporter.training.planning.configuration import restore

    for path in paths:
        restore(path)
        print(f"{path} is as it was")
    return 0
