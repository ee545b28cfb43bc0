"""Ends a process: SIGTERM, a grace, SIGKILL. The exporter does it, since a process that hangs would not.

Only this very process: its pid is opened first and its start time compared then, so that no other that has its pid by
now is hit (pidfd_open(2)). What the exporter's user may not signal, it cannot end: the kernel decides.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal

from gpumem_exporter.host import Host
from gpumem_exporter.wire.protocol import CommandResult

__all__ = ["TERMINATE_GRACE_SECONDS", "Terminator"]

TERMINATE_GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
_KILL_SECONDS = 10.0
"""After SIGKILL a process may be in the kernel for a while, giving back what it has mapped."""


class Terminator:
    """Ends processes. For the event loop.

    Args:
        host: says when a process was started.
        grace_seconds: between SIGTERM and SIGKILL.
    """

    def __init__(self, host: Host, *, grace_seconds: float = TERMINATE_GRACE_SECONDS) -> None:
        self._host = host
        self._grace_seconds = grace_seconds

    def objection(self, host_pid: int | None, start_time_ticks: int) -> str:
        """Why this process is not ended, whoever asks; empty where it may be."""
        if host_pid is None:
            return "its pid on this host is not known"
        if host_pid == 1 or host_pid == os.getpid():
            return "neither pid 1 nor the exporter itself is ended"
        if start_time_ticks <= 0:
            return "when it was started is not known, so that another process with its pid could be hit"
        if not self._host.alive(host_pid, start_time_ticks):
            return "it has ended, or its pid is not what this exporter sees"
        return ""

    async def end(self, action_id: str, host_pid: int, start_time_ticks: int) -> CommandResult:
        """End one process and say how it went. Does not raise."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            handle = os.pidfd_open(host_pid)
        except ProcessLookupError:
            return CommandResult(action_id, "gone", "it had ended")
        except (AttributeError, OSError) as error:
            return CommandResult(action_id, "unsupported", f"pidfd_open: {error}")
        try:
            objection = self.objection(host_pid, start_time_ticks)
            if objection:
                return CommandResult(action_id, "gone", objection)
            for number, patience in ((signal.SIGTERM, self._grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
                signal.pidfd_send_signal(handle, number)
                if await _ended(handle, patience):
                    return CommandResult(action_id, "done", f"ended by {number.name}", clock() - begun)
        except ProcessLookupError:
            return CommandResult(action_id, "done", "it ended", clock() - begun)
        except OSError as error:
            refused = "refused" if error.errno == errno.EPERM else "failed"
            return CommandResult(action_id, refused, f"the exporter (uid {os.geteuid()}) may not signal it: {error}")
        finally:
            os.close(handle)
        return CommandResult(action_id, "failed", f"it is still there {_KILL_SECONDS:g} s after SIGKILL")


async def _ended(handle: int, timeout_seconds: float) -> bool:
    """Whether the process ends within that time: its pidfd becomes readable then."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def settle() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(handle, settle)
    try:
        await asyncio.wait_for(ended, timeout_seconds)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(handle)
    return True
