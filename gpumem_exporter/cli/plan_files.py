"""`plan --apply` and `--restore`: change configuration files and print the changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from gpumem_exporter.training.planning.plan import Plan

__all__ = ["change_files", "restore_files"]


def change_files(paths: Sequence[Path], maps: Sequence[str], plan: Plan, *, write: bool, file: IO[str]) -> None:
    """Print the changes of each file. If `write` is set, write the files after all of them have been checked.

    Raises:
        ConfigurationError: a file or a key cannot be changed. No file is changed then.
    """
    from gpumem_exporter.training.planning.configuration import apply, backup_of, diff, parse_map, planned_text

    planned = {"batch": plan.batch, "accumulation": plan.accumulation, "effective_batch": plan.effective_batch}
    values = parse_map(maps, planned)
    texts = [(path, *planned_text(path, values)) for path in paths]
    for path, before, after in texts:
        print(diff(path, before, after) or f"{path} already has these values\n", end="", file=file)
    for path, before, after in texts if write else ():
        if before != after:
            apply(path, before, after)
            print(f"changed {path}; the previous version is {backup_of(path)}", file=file)


def restore_files(paths: Sequence[Path]) -> int:
    """Restore files from their backups."""
    from gpumem_exporter.training.planning.configuration import restore

    for path in paths:
        restore(path)
        print(f"restored {path}")
    return 0
