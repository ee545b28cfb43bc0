"""The errors that this package raises on purpose.

The tree:

    GpumemError
    ├── ConfigurationError            a flag, an environment variable or a file is invalid (exit code 2)
    ├── WireError                     a message does not follow the protocol; names the field
    ├── StorageError                  stored data cannot be read or written (disk full, read-only, locked)
    ├── NvmlError                     NVML returned an error
    │   ├── NvmlUnavailableError      no driver, no library, or NVML cannot be initialized
    │   ├── NvmlDeviceLostError       the device fell off the bus; it stays lost until NVML is initialized again
    │   ├── NvmlNotSupportedError     the device or the driver does not provide the value
    │   └── NvmlPermissionError       this user may not read the value
    ├── ReportRefusedError            the exporter rejects a valid report
    │   ├── ForeignProcessError       the sender may not report for the process
    │   ├── ReporterSupersededError   a newer reporter represents the same process
    │   ├── TooManyProcessesError     `--report.max-processes` is reached
    │   └── UnknownDeviceError        the driver has none of the devices in the report
    ├── ActionRefusedError            the exporter rejects a valid action request
    │   ├── ActionNotAllowedError     `--action.allow` does not include the action
    │   ├── ActionForbiddenError      the caller may not request the action, or not on these processes
    │   ├── TargetNotFoundError       no reporting process matches the target; lists the processes that report
    │   ├── GroupIncompleteError      not every rank of the group can take part
    │   ├── TooManyActionsError       the rate limit of the caller or of a process is reached
    │   └── IdempotencyConflictError  the Idempotency-Key was used with a different request
    ├── PrometheusError               the Prometheus API that selects a fleet's processes does not answer a query
    ├── CommandRefusedError           a process rejects a command; says why
    ├── NoBatchSizeError              every batch size that was tried runs out of memory
    ├── RankFailedError               another rank of the process group failed, so this rank cannot continue
    └── ExporterError                 a client cannot use its exporter
        ├── ExporterUnreachableError  no exporter answers at the address
        │   └── ExporterUntrustedError   its user or its certificate is not trusted
        └── ExporterAnswerError       the exporter answered with an error; has the status and the problem's detail
"""

from __future__ import annotations

__all__ = [
    "ActionForbiddenError",
    "ActionNotAllowedError",
    "ActionRefusedError",
    "CommandRefusedError",
    "ConfigurationError",
    "ExporterAnswerError",
    "ExporterError",
    "ExporterUnreachableError",
    "ExporterUntrustedError",
    "ForeignProcessError",
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
    """Base class of the errors that this package raises on purpose."""


class ConfigurationError(GpumemError):
    """A flag, an environment variable or a file is invalid; the one-line message says what is accepted."""


class WireError(GpumemError):
    """A message does not follow the protocol.

    Attributes:
        field: the dotted path of the invalid field; empty when the whole message is invalid.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class StorageError(GpumemError):
    """Stored data cannot be read or written; the message names the file and the reason."""


class NvmlError(GpumemError):
    """NVML returned an error."""


class NvmlUnavailableError(NvmlError):
    """There is no driver or no library, or NVML cannot be initialized; no device can be read."""


class NvmlDeviceLostError(NvmlError):
    """The device fell off the bus; it stays lost until NVML is initialized again."""


class NvmlNotSupportedError(NvmlError):
    """The device or the driver does not provide the value."""


class NvmlPermissionError(NvmlError):
    """This user may not read the value."""


class ReportRefusedError(GpumemError):
    """The exporter rejects a valid report."""


class ForeignProcessError(ReportRefusedError):
    """The sender may not report for the process: it belongs to another user, or it is another process."""


class ReporterSupersededError(ReportRefusedError):
    """A newer reporter represents the same process: the program was replaced, or the pid was reused."""


class TooManyProcessesError(ReportRefusedError):
    """`--report.max-processes`, or one user's share of the page, is reached; the report is counted as dropped."""


class UnknownDeviceError(ReportRefusedError):
    """The driver has none of the devices in the report."""


class ActionRefusedError(GpumemError):
    """The exporter rejects a valid action request."""


class ActionNotAllowedError(ActionRefusedError):
    """`--action.allow` does not include the action."""


class ActionForbiddenError(ActionRefusedError):
    """The caller may not request the action, or not on these processes; the message says what it may do."""


class TargetNotFoundError(ActionRefusedError):
    """No reporting process matches the target; the message lists the processes that report."""


class GroupIncompleteError(ActionRefusedError):
    """Not every rank of the group can take part; the message names the ranks that cannot and the reasons."""


class TooManyActionsError(ActionRefusedError):
    """The rate limit of the caller or of a process is reached.

    Attributes:
        retry_seconds: seconds until another action is accepted.
    """

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class IdempotencyConflictError(ActionRefusedError):
    """The Idempotency-Key was used with a different request."""


class PrometheusError(GpumemError):
    """Prometheus cannot be reached, or its answer to a query has no series; the message says why."""


class CommandRefusedError(GpumemError):
    """A process rejects a command; the message says why.

    Attributes:
        reason_code: the reason for programs, a `wire.protocol.ReasonCode`.
    """

    def __init__(self, message: str, reason_code: str) -> None:
        super().__init__(message)
        self.reason_code = reason_code


class NoBatchSizeError(GpumemError):
    """Every batch size that was tried runs out of memory; the message lists them.

    The exception's cause is the error of the last batch size.
    """


class RankFailedError(GpumemError):
    """Another rank of the process group failed or exited, so this rank cannot continue.

    Attributes:
        ranks: the global ranks that failed; empty when unknown.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ExporterError(GpumemError):
    """A client cannot use its exporter."""


class ExporterUnreachableError(ExporterError):
    """No server answers at the exporter's address in time and with HTTP."""


class ExporterUntrustedError(ExporterUnreachableError):
    """The server's user or its certificate is not trusted; the client sends nothing."""


class ExporterAnswerError(ExporterError):
    """The exporter answered with an error.

    Attributes:
        status: the HTTP status.
        detail: the detail of the problem document, or the reason phrase of the status.
    """

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"HTTP {status}: {detail}")
        self.status = status
        self.detail = detail
