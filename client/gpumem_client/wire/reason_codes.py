"""Why a command ended as it did, for programs."""

from __future__ import annotations

from enum import Enum


class ReasonCode(str, Enum):
    """The reason for a command's outcome, for programs. The text beside it is for people.

    A reader accepts other codes as well: another version may send them.
    """

    # From the process that received the command.
    CUDA_GRAPH_CAPTURE = "cuda_graph_capture"
    DEADLINE_PASSED = "deadline_passed"
    NO_STEP_ENDED = "no_step_ended"
    NOT_IDLE = "not_idle"
    STEP_PASSED = "step_passed"
    QUEUE_FULL = "queue_full"
    UNKNOWN_ACTION = "unknown_action"
    DENIED_BY_OWNER = "denied_by_owner"
    UNKNOWN_MODE = "unknown_mode"
    NOT_SUPPORTED_BY_ALLOCATOR = "not_supported_by_allocator"
    INVALID_FRACTION = "invalid_fraction"
    RESERVED_EXCEEDS_FRACTION = "reserved_exceeds_fraction"
    SNAPSHOT_NOT_WRITTEN = "snapshot_not_written"
    HISTORY_RECORDED = "history_recorded"
    TOO_MANY_BLOCKS = "too_many_blocks"
    TOO_MANY_OBJECTS = "too_many_objects"
    NO_DEVICE = "no_device"
    PROFILE_NOT_SENT = "profile_not_sent"
    EXCEPTION = "exception"
    SIGNAL_HANDLER = "signal_handler"

    # From an engine, in its process or through its routes.
    NO_ENGINE = "no_engine"
    ENGINE_BUSY = "engine_busy"
    ENGINE_ASLEEP = "engine_asleep"
    ENGINE_AWAKE = "engine_awake"
    ENGINE_NOT_ENABLED = "engine_not_enabled"
    ENGINE_FAILED = "engine_failed"
    HOST_MEMORY_SHORT = "host_memory_short"

    # From the process or from the exporter.
    CANCELLED = "cancelled"
    PROCESS_EXITED = "process_exited"

    # From the exporter.
    GROUP_INCOMPLETE = "group_incomplete"
    GROUP_RANK_LATE = "group_rank_late"
    NOT_FETCHED = "not_fetched"
    NO_RESULT = "no_result"
    EXPORTER_RESTARTED = "exporter_restarted"
    WOULD_TERMINATE = "would_terminate"
    ENDED_BY_SIGTERM = "ended_by_sigterm"
    ENDED_BY_SIGKILL = "ended_by_sigkill"
    SURVIVED_SIGKILL = "survived_sigkill"
    UNKNOWN_HOST_PID = "unknown_host_pid"
    NOT_ATTESTED = "not_attested"
    NOT_LISTED = "not_listed"
    UNKNOWN_START_TIME = "unknown_start_time"
    PROTECTED_PROCESS = "protected_process"
    NOT_PERMITTED = "not_permitted"
    SIGNAL_FAILED = "signal_failed"
    PIDFD_UNAVAILABLE = "pidfd_unavailable"
    ENGINE_STARTING = "engine_starting"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_DENIED = "engine_denied"
    DEVICE_MEMORY_SHORT = "device_memory_short"

    def __str__(self) -> str:
        return str(self.value)
