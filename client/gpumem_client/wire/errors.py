"""The errors that the client and the exporter share.

The tree; the exporter and the toolkit add their own errors below `GpumemError`:

    GpumemError
    ├── ConfigurationError            a flag, an environment variable or a file is invalid (exit code 2)
    ├── WireError                     a message does not follow the protocol; names the field
    ├── StorageError                  stored data cannot be read or written (disk full, read-only, locked)
    ├── CommandRefusedError           a process rejects a command; says why
    └── ExporterError                 a client cannot use its exporter
        ├── ExporterUnreachableError  no exporter answers at the address
        │   └── ExporterUntrustedError   its user or its certificate is not trusted
        └── ExporterAnswerError       the exporter answered with an error; has the status and the problem's detail
"""

from __future__ import annotations


class GpumemError(Exception):
    """Base class of the errors that this project raises on purpose."""


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


class CommandRefusedError(GpumemError):
    """A process rejects a command; the message says why.

    Attributes:
        reason_code: the reason for programs, a `wire.reason_codes.ReasonCode`.
    """

    def __init__(self, message: str, reason_code: str) -> None:
        super().__init__(message)
        self.reason_code = reason_code


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
        super().__init__(detail)
        self.status = status
        self.detail = detail
