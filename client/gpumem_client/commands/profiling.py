"""Takes the profile of a command: at once, or with a recording that ends later, while reports and commands go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpumem_client.allocator.sampler import Sampler
from gpumem_client.guest_safety import log
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.profile_types import Profile
from gpumem_client.profile.profiler import Recording, live_profile
from gpumem_client.profile.recorder import Recorder
from gpumem_client.torch_access import in_torch
from gpumem_client.wire.errors import CommandRefusedError, GpumemError
from gpumem_client.wire.protocol import Command, CommandResult
from gpumem_client.wire.reason_codes import ReasonCode

_DURATION_SECONDS_MAX = 3600.0
# The bounds of the time between two looks at the length of the history.
_CHECK_SECONDS_MIN, _CHECK_SECONDS_MAX = 0.1, 5.0
# The longest that a recording waits for the end of a CUDA graph capture.
_CAPTURE_SECONDS = 10.0


class Profiling:
    """The profile that is being taken, at most one. For the reporter's thread. `failed` gets unexpected errors."""

    def __init__(
        self,
        heap: HeapReader,
        recorder: Recorder,
        sampler: Sampler,
        *,
        capturing: Callable[[], bool],
        send: Callable[[Profile], str],
        failed: Callable[[Exception], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.heap = heap
        self.recorder = recorder
        self._sampler = sampler
        self._capturing = capturing
        self.send = send
        self._failed = failed
        self._clock = clock
        self._command: Command | None = None
        self._started_seconds = 0.0
        self._recording: Recording | None = None
        self._check_seconds = 0.0

    @property
    def ids(self) -> tuple[str, ...]:
        """The id of the command whose profile is being taken."""
        return () if self._command is None else (self._command.id,)

    def start(self, command: Command) -> None:
        """Accept a command; `run_due` starts its profile.

        Raises:
            CommandRefusedError: another profile is being taken.
        """
        if self._command is None:
            self._command, self._started_seconds = command, self._clock()
        elif self._command.id != command.id:
            raise CommandRefusedError("another profile of this process is being taken", ReasonCode.QUEUE_FULL)

    def next_due_seconds(self) -> float | None:
        """Return when to call `run_due`; None if nothing is being taken."""
        return None if self._recording is None else self._check_seconds

    def run_due(self) -> CommandResult | None:
        """Start the profile of a command, or end its recording if it is time. Returns its result, if it has one."""
        command = self._command
        if command is None:
            return None
        try:
            with in_torch():  # the sending below waits for the network
                profile = self._profile(command)
            if profile is None:
                return None
            sent_id = self.send(replace(profile, step=self._sampler.step))
        except CommandRefusedError as error:
            return self._end(command, "refused", str(error), error.reason_code)
        except (GpumemError, ValueError, OSError) as error:
            return self._end(command, "failed", f"the profile was not sent: {error}", ReasonCode.PROFILE_NOT_SENT)
        except Exception as error:  # noqa: BLE001 - an error of torch is this command's result
            self._failed(error)
            return self._end(command, "failed", f"{type(error).__name__}: {error}"[:500], ReasonCode.EXCEPTION)
        return self._end(command, "done", "", None, sent_id)

    def cancel(self, ids: Iterable[str]) -> CommandResult | None:
        """Stop the profile of one of these commands, and return its result."""
        command = self._command
        if command is None or command.id not in ids:
            return None
        return self._end(command, "refused", "the exporter withdrew the command", ReasonCode.CANCELLED)

    def close(self) -> None:
        """Stop the recording without a profile."""
        recording, self._recording, self._command = self._recording, None, None
        if recording is not None:
            recording.cancel()

    def _profile(self, command: Command) -> Profile | None:
        """Return the profile; None while its recording goes on."""
        records = command.duration_seconds > 0
        if self._recording is None:
            if not command.force:
                self.heap.require_short_pause(searches=command.search_seconds > 0)
            if not records:
                return live_profile(self.heap, command.id, "action", search_seconds=command.search_seconds)
            enough = self.heap.entries_enough()
            self._recording = Recording(self.heap, self.recorder, entries_enough=enough, clock=self._clock)
            self._recording.name()
        if not self._ends(self._recording, command):
            return None
        recording, self._recording = self._recording, None
        if self._capturing():
            recording.cancel()
            raise CommandRefusedError("a CUDA graph is being captured", ReasonCode.CUDA_GRAPH_CAPTURE)
        return recording.finish(command.id, "action", search_seconds=command.search_seconds)

    def _ends(self, recording: Recording, command: Command) -> bool:
        """Whether the recording ends now."""
        now = self._clock()
        end_seconds = recording.started_seconds + min(command.duration_seconds, _DURATION_SECONDS_MAX)
        left = recording.full_seconds()
        if now < end_seconds and left > 0:
            # The next look is before the history can be full.
            self._check_seconds = min(now + min(max(0.8 * left, _CHECK_SECONDS_MIN), _CHECK_SECONDS_MAX), end_seconds)
            return False
        # A snapshot may disturb a capture.
        if self._capturing() and now < end_seconds + _CAPTURE_SECONDS:
            self._check_seconds = now + _CHECK_SECONDS_MIN
            return False
        return True

    def _end(self, command: Command, outcome: str, reason: str, code: str | None, profile: str = "") -> CommandResult:
        with in_torch():
            self.close()
        log.debug("profile %s: %s %s", command.id, outcome, reason)
        return CommandResult(
            command.id,
            outcome,
            reason,
            code,
            duration_seconds=self._clock() - self._started_seconds,
            step=self._sampler.step,
            thread_id=threading.get_native_id(),
            profile=profile,
        )
