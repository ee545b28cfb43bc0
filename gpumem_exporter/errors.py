"""The errors that only the exporter raises; `gpumem_client.wire.errors` has the errors that the client shares."""

from __future__ import annotations

from gpumem_client.wire.errors import GpumemError


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


class ForeignProcessError(GpumemError):
    """The sender may not report for the process: it belongs to another user, or it is another process."""


class ReporterSupersededError(GpumemError):
    """A newer reporter represents the same process: the program was replaced, or the pid was reused."""


class TooManyProcessesError(GpumemError):
    """`--report.max-processes`, or one user's share of the page, is reached; the report is counted as dropped."""


class UnknownDeviceError(GpumemError):
    """The driver has none of the devices in the report."""


class ActionRefusedError(GpumemError):
    """The exporter rejects a valid action request."""


class ActionNotAllowedError(ActionRefusedError):
    """`--action.allow` does not include the action."""


class ActionForbiddenError(ActionRefusedError):
    """The caller may not request the action, or not on these processes; the message says what it may do."""


class TargetNotFoundError(ActionRefusedError):
    """No reporting process matches the target; the message lists the processes that report."""


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


class ProfileInvalidError(GpumemError):
    """A memory profile is not valid, is too large, or contradicts itself; the message says where."""


class NoPeakError(GpumemError):
    """A profile has no highest moment, because it was taken without a recording."""
