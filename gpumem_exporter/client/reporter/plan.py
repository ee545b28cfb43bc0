"""The plan of a job (`gpumem-exporter plan`), as the running job is told of it: reports carry what it expects."""

from __future__ import annotations

import contextlib
import json
import operator
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.wire.protocol import MAX_INTEGER, DeviceSample

__all__ = ["AnyPlan", "Planned", "planned_peak_bytes", "told_plan", "with_plan"]

_FIELD = "reserved_peak_bytes"
_FILE_BYTES_MAX = 1 << 20


class Planned(Protocol):
    """What has the figure of a plan, as that of `gpumem_exporter.training` has."""

    @property
    def reserved_peak_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved` will say."""


AnyPlan: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Planned"
"""A file that `gpumem-exporter plan … --json` wrote, what stands in one, or a plan itself."""


def told_plan(plan: AnyPlan | None, environ: Mapping[str, str]) -> AnyPlan | None:
    """What the program says, else GPUMEM_PLAN; a path becomes absolute, since the program may change its folder."""
    if plan is None:
        plan = environ.get("GPUMEM_PLAN", "").strip() or None
    if isinstance(plan, (str, os.PathLike)):
        with contextlib.suppress(Exception):  # the present folder may be gone; what is no path, its reader tells
            return Path(os.fsdecode(plan)).absolute()
    return plan


def planned_peak_bytes(plan: AnyPlan) -> int:
    """The peak of reserved bytes that a plan expects. May wait for a file system.

    Raises:
        ConfigurationError: it is no plan; says where and why.
    """
    where = "the plan"
    if isinstance(plan, (str, os.PathLike)):
        path = Path(os.fsdecode(plan))
        where, plan = f"plan {path}", _read(path)
    value: Any = plan.get(_FIELD) if isinstance(plan, Mapping) else getattr(plan, _FIELD, None)
    if value is None:
        raise ConfigurationError(f"{where} has no {_FIELD}; gpumem-exporter plan … --json prints one that has")
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if isinstance(value, bool) or not 0 < size <= MAX_INTEGER:
        raise ConfigurationError(f"{where}: {_FIELD} must be a whole number from 1 to 2^63 - 1, not {value!r:.40}")
    return size


def with_plan(devices: Sequence[DeviceSample], planned_bytes: int | None) -> tuple[DeviceSample, ...]:
    """The samples of one moment with what was planned.

    A plan is for one device: of several, the one with the highest peak is meant. The others hold what a program has
    left there without being asked to, such as the contexts of all ranks on the first device.
    """
    if planned_bytes is None or not devices:
        return tuple(devices)
    meant = max(devices, key=lambda device: device.reserved_peak_bytes or 0)
    planned = replace(meant, planned_reserved_peak_bytes=planned_bytes)
    return tuple([planned if device is meant else device for device in devices])


def _read(path: Path) -> Any:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would have to be waited for
            raise ConfigurationError(f"plan {path} is no regular file")
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"plan {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > _FILE_BYTES_MAX:
        raise ConfigurationError(f"plan {path} is larger than any plan: over {_FILE_BYTES_MAX} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"plan {path} is not what gpumem-exporter plan … --json prints: {error}") from error
