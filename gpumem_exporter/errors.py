"""Every error this package raises on purpose.

The tree:

    GpumemError
    ├── ConfigurationError            a flag, an environment variable or a file is wrong (exit code 2)
    ├── WireError                     a message does not follow the protocol; names the field
    ├── StorageError                  what is to be kept cannot be written or read (disk full, read-only, locked)
    ├── NvmlError                     the driver's library answered with an error
    │   ├── NvmlUnavailableError      no driver, no library, or it cannot be initialised
    │   ├── NvmlDeviceLostError       the device fell off the bus; it stays lost until NVML is initialised again
    │   ├── NvmlNotSupportedError     this device or this driver does not have the figure
    │   └── NvmlPermissionError       this user may not read the figure
    ├── ReportRefusedError            a well-formed report that the exporter does not take
    │   ├── ReporterSupersededError   a newer reporter speaks for the same process
    │   ├── TooManyProcessesError     `--report.max-processes` is reached
    │   └── UnknownDeviceError        the driver has none of the devices of the report
    ├── ActionRefusedError            a well-formed action that the exporter does not take
    │   ├── ActionNotAllowedError     `--action.allow` leaves it out
    │   ├── TargetNotFoundError       nothing that reports matches the target; says what there is
    │   ├── GroupIncompleteError      not every rank of the group can take part
    │   ├── TooManyActionsError       its caller, or a process, has had its share of this minute
    │   └── IdempotencyConflictError  the same Idempotency-Key came with another request
    ├── PrometheusError               the Prometheus API that chooses a fleet's processes does not answer a query
    ├── CommandRefusedError           a process does not do what it was asked to; says why
    ├── NoBatchSizeError              every batch size that was tried runs out of memory
    ├── RankFailedError               another rank of the process group has failed, so that this one cannot go on
    └── ExporterError                 seen from the client's side of the wire
        ├── ExporterUnreachableError  nobody answers there
        │   └── ExporterUntrustedError   somebody does, whose certificate is not believed
        └── ExporterAnswerError       it answered with an error; carries the status and the problem's detail
"""

from __future__ import annotations

__all__ = [
    "ActionNotAllowedError",
    "ActionRefusedError",
    "CommandRefusedError",
    "ConfigurationError",
    "ExporterAnswerError",
    "ExporterError",
    "ExporterUnreachableError",
    "ExporterUntrustedError",
    "GpumemError",
    "GroupIncompleteError",
    "IdempotencyConflictError",
    "NoBatchSizeError",
    "NvmlDeviceLostError",
    "NvmlError",
    "NvmlNotSupportedError",
    "NvmlPermissionError",
    "NvmlUnavailableError",
    "PrometheusError",
    "RankFailedError",
    "ReportRefusedError",
    "ReporterSupersededError",
    "StorageError",
    "TargetNotFoundError",
    "TooManyActionsError",
    "TooManyProcessesError",
    "UnknownDeviceError",
    "WireError",
]


class GpumemError(Exception):
    """The root: whatever this package raises on purpose."""


class ConfigurationError(GpumemError):
    """A flag, an environment variable or a file is wrong; the message is one line and says what would be right."""


class WireError(GpumemError):
    """A message does not follow the protocol.

    Attributes:
        field: the dotted path of the offending field, empty when the message as a whole is at fault.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class StorageError(GpumemError):
    """What is to be kept cannot be written or read; the message names the file and why."""


class NvmlError(GpumemError):
    """The driver's library answered with an error."""


class NvmlUnavailableError(NvmlError):
    """No driver, no library, or it cannot be initialised: no device can be read."""


class NvmlDeviceLostError(NvmlError):
    """The device fell off the bus; it stays lost until NVML is initialised again."""


class NvmlNotSupportedError(NvmlError):
    """This device or this driver does not have the figure."""


class NvmlPermissionError(NvmlError):
    """This user may not read the figure."""


class ReportRefusedError(GpumemError):
    """A well-formed report that the exporter does not take."""


class ReporterSupersededError(ReportRefusedError):
    """A newer reporter speaks for the same process (the program was replaced, or the pid was used again)."""


class TooManyProcessesError(ReportRefusedError):
    """`--report.max-processes` is reached; the report is counted as dropped."""


class UnknownDeviceError(ReportRefusedError):
    """The report names devices, and the driver has none of them."""


class ActionRefusedError(GpumemError):
    """A well-formed action that the exporter does not take."""


class ActionNotAllowedError(ActionRefusedError):
    """`--action.allow` leaves the action out."""


class TargetNotFoundError(ActionRefusedError):
    """Nothing that reports matches the target; the message says what there is."""


class GroupIncompleteError(ActionRefusedError):
    """Not every rank of the group can take part; the message names those that cannot, and why."""


class TooManyActionsError(ActionRefusedError):
    """A caller, or a process, has had its share of this minute.

    Attributes:
        retry_seconds: when there is one more.
    """

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class IdempotencyConflictError(ActionRefusedError):
    """The same Idempotency-Key came with another request."""


class PrometheusError(GpumemError):
    """Prometheus cannot be reached, or does not answer a query with series; the message says why."""


class CommandRefusedError(GpumemError):
    """A process does not do what it was asked to; the message says why."""


class NoBatchSizeError(GpumemError):
    """Every batch size that was tried runs out of memory; the message names them, its cause is the last one's error."""


class RankFailedError(GpumemError):
    """Another rank of the process group has failed, or has gone, so that this one cannot go on.

    Attributes:
        ranks: which, as global ranks; empty where that is not known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ExporterError(GpumemError):
    """Something went wrong between a client and its exporter."""


class ExporterUnreachableError(ExporterError):
    """Nobody answers at the exporter's address, or not in time, or not in HTTP."""


class ExporterUntrustedError(ExporterUnreachableError):
    """The exporter's certificate is not believed: nothing is sent to whoever it is."""


class ExporterAnswerError(ExporterError):
    """The exporter answered with an error.

    Attributes:
        status: the HTTP status.
        detail: what the problem document says, or the status' own phrase.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"HTTP {status}: {detail}")
        self.status = status
        self.detail = detail
