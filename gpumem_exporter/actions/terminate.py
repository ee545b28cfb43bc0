"""Terminates processes from outside, because one may hang: SIGTERM, a grace period, SIGKILL.

The kernel decides which processes the exporter's user may signal.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from dataclasses import replace

from gpumem_client.wire.protocol import CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.node.host import Host

# A killed process may stay in the kernel for this time while the kernel releases its memory.
_KILL_SECONDS = 10.0


class Terminator:
    """Terminates processes. Used on the event loop only. `host` finds the start time of a process."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def refusal(self, target: SelectedProcess) -> CommandResult | None:
        """Return the result for a process that must not be terminated; None for any other."""
        # The pid of a report is only a claim, which kernel and driver must confirm.
        if not target.attested:
            reason, code = "its report is not attested: the kernel has not named the sender", ReasonCode.NOT_ATTESTED
        elif not target.used_bytes:
            reason, code = "the driver does not list it on a device", ReasonCode.NOT_LISTED
        elif target.host_pid is None:
            reason, code = "its pid on this host is unknown", ReasonCode.UNKNOWN_HOST_PID
        elif target.host_pid in (1, os.getpid()):
            reason, code = "pid 1 and the exporter itself are never terminated", ReasonCode.PROTECTED_PROCESS
        elif target.start_time_ticks <= 0:
            reason = "its start time is unknown, so another process with its pid could be hit"
            code = ReasonCode.UNKNOWN_START_TIME
        elif not self._host.alive(target.host_pid, target.start_time_ticks):
            reason, code = "it has exited, or this exporter does not see its pid", ReasonCode.PROCESS_EXITED
        else:
            return None
        return CommandResult("", "refused", reason, code)

    async def end(self, target: SelectedProcess, grace_seconds: float) -> CommandResult:
        """Terminate a process that `refusal` permits, with SIGKILL after the grace period, and return the result."""
        clock = asyncio.get_running_loop().time
        started = clock()
        # The pidfd is opened before `refusal` compares the start time, so that no later process with this pid is hit.
        try:
            pidfd = os.pidfd_open(target.host_pid or 0)
        except ProcessLookupError:
            return CommandResult("", "gone", "it had exited", ReasonCode.PROCESS_EXITED)
        except (AttributeError, OSError) as error:
            return CommandResult("", "unsupported", f"pidfd_open: {error}", ReasonCode.PIDFD_UNAVAILABLE)
        try:
            refusal = self.refusal(target)
            if refusal is not None:
                return replace(refusal, outcome="gone")
            for number, wait_seconds, code in (
                (signal.SIGTERM, grace_seconds, ReasonCode.ENDED_BY_SIGTERM),
                (signal.SIGKILL, _KILL_SECONDS, ReasonCode.ENDED_BY_SIGKILL),
            ):
                signal.pidfd_send_signal(pidfd, number)
                if await _exits(pidfd, wait_seconds):
                    return CommandResult("", "done", f"ended by {number.name}", code, clock() - started)
        except ProcessLookupError:
            return CommandResult("", "done", "it exited", ReasonCode.PROCESS_EXITED, clock() - started)
        except OSError as error:
            reason = f"the exporter (uid {os.geteuid()}) cannot signal it: {error}"
            if error.errno == errno.EPERM:
                return CommandResult("", "refused", reason, ReasonCode.NOT_PERMITTED)
            return CommandResult("", "failed", reason, ReasonCode.SIGNAL_FAILED)
        finally:
            os.close(pidfd)
        reason = f"it is still running {_KILL_SECONDS:g} s after SIGKILL"
        return CommandResult("", "failed", reason, ReasonCode.SURVIVED_SIGKILL)


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
