"""The end of a process from outside: what is signalled, and what is left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_client.wire.procfs import start_time_ticks
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.node.linux import LinuxHost
from tests.support.builders.builders import MIB, UUIDS

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
OBEDIENT = "import time; print(flush=True); time.sleep(600)"


def listed(pid: int, start_time_ticks: int) -> SelectedProcess:
    """Return a process that only the driver lists."""
    return SelectedProcess(pid, facts=ProcessFacts(pid, start_time_ticks), used_bytes={UUIDS[0]: MIB})


@pytest.fixture
def start() -> Iterator[Any]:
    started = []

    def run(code: str) -> tuple[subprocess.Popen[bytes], SelectedProcess]:
        popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(popen)
        assert popen.stdout is not None
        popen.stdout.readline()
        ticks = start_time_ticks(f"/proc/{popen.pid}")
        return popen, listed(popen.pid, ticks)

    yield run
    for popen in started:
        popen.kill()
        popen.communicate()


@pytest.mark.parametrize(
    ("code", "reason"), [(OBEDIENT, ReasonCode.ENDED_BY_SIGTERM), (STUBBORN, ReasonCode.ENDED_BY_SIGKILL)]
)
async def test_a_process_that_ignores_sigterm_is_killed(start: Any, code: str, reason: ReasonCode) -> None:
    popen, target = start(code)
    result = await Terminator(LinuxHost()).end(target, 30.0 if code == OBEDIENT else 0.1)
    assert (result.outcome, result.reason_code) == ("done", reason)
    assert popen.wait(30) < 0


async def test_a_later_process_with_the_pid_and_an_exited_one_get_no_signal(start: Any) -> None:
    popen, target = start(OBEDIENT)
    later = listed(popen.pid, target.start_time_ticks - 1)
    assert (await Terminator(LinuxHost()).end(later, 30.0)).outcome == "gone"
    assert popen.poll() is None
    popen.kill()
    popen.wait()
    assert (await Terminator(LinuxHost()).end(target, 30.0)).reason_code == ReasonCode.PROCESS_EXITED
