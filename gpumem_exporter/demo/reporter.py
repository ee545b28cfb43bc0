"""The reporter of a simulated process: a thread that reports to the exporter like the real one."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.demo.simulation import Simulation
from gpumem_exporter.errors import ExporterAnswerError, ExporterError, WireError
from gpumem_exporter.wire.http import Connection
from gpumem_exporter.wire.protocol import REPORTS_PATH, CommandResult, Reply, reply_from_wire, to_wire

__all__ = ["SimulatedReporter"]

INTERVAL_SECONDS = 1.0
ANSWER_MARGIN_SECONDS = 5.0
RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 5.0


class SimulatedReporter:
    """Reports one simulated process until the process ends or `stop` is called.

    Args:
        simulation: provides the lock for the process.
        process: the process to report.
        exporter_url: `http://host:port` or `unix:///path`.
        headers: additional headers of each request, such as a token.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        simulation: Simulation,
        process: SimulatedProcess,
        exporter_url: str,
        *,
        headers: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.process = process
        self._simulation = simulation
        self._headers = {**headers, "Content-Type": "application/json"}
        self._clock = clock
        self._connection = Connection(exporter_url, timeout_seconds=ANSWER_MARGIN_SECONDS)
        self._stopping = threading.Event()
        self._sequence = 0
        # On a real node, the processes do not report all at the same time.
        self._hold_seconds = random.uniform(0.0, INTERVAL_SECONDS)  # noqa: S311 - spreads load
        self._thread = threading.Thread(target=self._run, name=f"gpumem-demo-{process.pid}", daemon=True)

    def start(self) -> None:
        """Start to report."""
        self._thread.start()

    def stop(self) -> None:
        """Request the end of the thread; `join` waits for it. Thread-safe, and may be called again."""
        self._stopping.set()
        self._connection.interrupt()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the end of the thread; returns False after a timeout."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        results: Sequence[CommandResult] = ()
        retry_seconds = RETRY_SECONDS_MIN
        try:
            while not self._stopping.is_set() and not self.process.ended:
                started = self._clock()
                try:
                    reply = self._report(results)
                except (ExporterError, WireError):
                    self._stopping.wait(retry_seconds * random.uniform(0.75, 1.25))  # noqa: S311 - jitter
                    retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)
                    continue
                retry_seconds = RETRY_SECONDS_MIN
                with self._simulation.lock:
                    results = self.process.run_commands(reply)
                due_seconds = started + self._hold_seconds
                self._hold_seconds = reply.report_interval_seconds
                if not results and not reply.commands:
                    self._stopping.wait(max(0.0, due_seconds - self._clock()))
            if self.process.ended and not self.process.crashed and not self._stopping.is_set():
                self._send_final_report(results)
        finally:
            self._connection.close()

    def _report(self, results: Sequence[CommandResult], *, final: bool = False) -> Reply:
        """Post a report and read the reply.

        Raises:
            ExporterError: the exporter cannot be reached, or it answers with an error.
            WireError: the reply is not valid.
        """
        self._sequence += 1
        hold_seconds = 0.0 if final else self._hold_seconds
        with self._simulation.lock:
            report = self.process.report(self._sequence, results, hold_seconds=hold_seconds, final=final)
        answer = self._connection.request(
            "POST",
            REPORTS_PATH,
            json.dumps(to_wire(report), separators=(",", ":")).encode(),
            self._headers,
            timeout_seconds=hold_seconds + ANSWER_MARGIN_SECONDS,
        )
        if answer.status != 200:
            raise ExporterAnswerError(answer.status, answer.body[:200].decode("utf-8", "replace"))
        try:
            reply = reply_from_wire(json.loads(answer.body))
        except ValueError as error:
            raise WireError(f"the reply is not JSON: {error}") from error
        with self._simulation.lock:
            self.process.acknowledge(report)
        return reply

    def _send_final_report(self, results: Sequence[CommandResult]) -> None:
        try:
            self._report(results, final=True)
        except (ExporterError, WireError):
            return  # the exporter detects the end of the process later
