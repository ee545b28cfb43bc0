"""Terminates processes from outside, because one may hang: SIGTERM, a grace period, SIGKILL.

A pidfd (pidfd_open(2)) makes sure that no later process with the same pid is hit: it is opened before the start time is
compared. The kernel decides which processes the exporter's user may signal.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from dataclasses import replace

from gpumem_client.wire.protocol import CommandResult, ReasonCode
from gpumem_exporter.host import Host

__all__ = ["TERMINATE_GRACE_SECONDS", "Terminator"]

TERMINATE_GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""
_KILL_SECONDS = 10.0
"""A killed process may stay in the kernel for this time while the kernel releases its memory."""


class Terminator:
    """Terminates processes. Used on the event loop only.

    Args:
        host: finds the start time of a process.
        grace_seconds: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, host: Host, *, grace_seconds: float = TERMINATE_GRACE_SECONDS) -> None:
        self._host = host
        self._grace_seconds = grace_seconds

    def refusal(self, action_id: str, host_pid: int | None, start_time_ticks: int) -> CommandResult | None:
        """Return the result for a process that must not be terminated; None for any other."""
        if host_pid is None:
            reason, code = "its pid on this host is unknown", ReasonCode.UNKNOWN_HOST_PID
        elif host_pid == 1 or host_pid == os.getpid():
            reason, code = "pid 1 and the exporter itself are never terminated", ReasonCode.PROTECTED_PROCESS
        elif start_time_ticks <= 0:
            reason = "its start time is unknown, so another process with its pid could be hit"
            code = ReasonCode.UNKNOWN_START_TIME
        elif not self._host.alive(host_pid, start_time_ticks):
            reason, code = "it has exited, or this exporter does not see its pid", ReasonCode.PROCESS_EXITED
        else:
            return None
        return CommandResult(action_id, "refused", reason, code)

    async def end(self, action_id: str, host_pid: int, start_time_ticks: int) -> CommandResult:
        """Terminate one process and return the result. Does not raise."""
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            pidfd = os.pidfd_open(host_pid)
        except ProcessLookupError:
            return CommandResult(action_id, "gone", "it had exited", ReasonCode.PROCESS_EXITED)
        except (AttributeError, OSError) as error:
            return CommandResult(action_id, "unsupported", f"pidfd_open: {error}", ReasonCode.PIDFD_UNAVAILABLE)
        try:
            refusal = self.refusal(action_id, host_pid, start_time_ticks)
            if refusal is not None:
                return replace(refusal, outcome="gone")
            for number, wait_seconds, code in (
                (signal.SIGTERM, self._grace_seconds, ReasonCode.ENDED_BY_SIGTERM),
                (signal.SIGKILL, _KILL_SECONDS, ReasonCode.ENDED_BY_SIGKILL),
            ):
                signal.pidfd_send_signal(pidfd, number)
                if await _exits(pidfd, wait_seconds):
                    return CommandResult(action_id, "done", f"ended by {number.name}", code, clock() - started)
        except ProcessLookupError:
            return CommandResult(action_id, "done", "it exited", ReasonCode.PROCESS_EXITED, clock() - started)
        except OSError as error:
            reason = f"the exporter (uid {os.geteuid()}) cannot signal it: {error}"
            if error.errno == errno.EPERM:
                return CommandResult(action_id, "refused", reason, ReasonCode.NOT_PERMITTED)
            return CommandResult(action_id, "failed", reason, ReasonCode.SIGNAL_FAILED)
        finally:
            os.close(pidfd)
        reason = f"it is still running {_KILL_SECONDS:g} s after SIGKILL"
        return CommandResult(action_id, "failed", reason, ReasonCode.SURVIVED_SIGKILL)


async def _exits(pidfd: int, timeout_seconds: float) -> bool:
    """Return whether the process exits within this time: its pidfd becomes readable then."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pidfd, readable.set)
    try:
        await asyncio.wait_for(readable.wait(), timeout_seconds)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True
