"""The memory plan of a job (`gpumem-exporter plan`): the running job's reports contain the planned peak."""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Protocol, Union

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.protocol import MAX_INTEGER, DeviceSample

_FIELD = "reserved_peak_bytes"


class Planned(Protocol):
    """An object with a planned peak, such as a plan of `gpumem_toolkit`."""

    @property
    def reserved_peak_bytes(self) -> int:
        """The planned value of `torch.cuda.max_memory_reserved`."""


AnyPlan = Union[str, "os.PathLike[str]", Mapping[str, Any], Planned]
"""The path of a file that `gpumem-exporter plan --json` wrote, the content of such a file, or a plan itself."""


def chosen_plan(plan: AnyPlan | None, environ: Mapping[str, str]) -> AnyPlan | None:
    """Return the argument, otherwise GPUMEM_PLAN; a path is absolute."""
    if plan is None:
        plan = environ.get("GPUMEM_PLAN", "").strip() or None
    if isinstance(plan, (str, os.PathLike)):
        with contextlib.suppress(Exception):  # an invalid path is reported when it is read
            # The file is read later, and the user's code may change the current folder until then.
            return Path(os.fsdecode(plan)).absolute()
    return plan


def planned_peak_bytes(plan: AnyPlan) -> int:
    """Return the planned peak of reserved bytes. May wait for a file system.

    Raises:
        ConfigurationError: the plan is invalid; the message names the place and the reason.
    """
    where = "the plan"
    if isinstance(plan, (str, os.PathLike)):
        path = Path(os.fsdecode(plan))
        where, plan = f"plan {path}", _read(path)
    value: Any = plan.get(_FIELD) if isinstance(plan, Mapping) else getattr(plan, _FIELD, None)
    if value is None:
        raise ConfigurationError(f"{where} has no {_FIELD}; gpumem-exporter plan … --json writes this field")
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if isinstance(value, bool) or not 0 < size <= MAX_INTEGER:
        raise ConfigurationError(f"{where}: {_FIELD} must be a whole number from 1 to 2^63 - 1, not {value!r:.40}")
    return size


def with_plan(devices: Sequence[DeviceSample], planned_bytes: int | None) -> tuple[DeviceSample, ...]:
    """Return the samples of all devices, with the planned peak in the sample of the device with the highest peak."""
    if planned_bytes is None or not devices:
        return tuple(devices)
    # A plan describes one device. Another one may have memory, too, for example a context on the first device.
    main = max(devices, key=lambda device: device.reserved_peak_bytes or 0)
    planned = replace(main, planned_reserved_peak_bytes=planned_bytes)
    return tuple([planned if device is main else device for device in devices])


def _read(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():  # reading a pipe could wait forever
            raise ConfigurationError(f"plan {path} is not a regular file")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"plan {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"plan {path} is not the output of gpumem-exporter plan … --json: {error}") from error
