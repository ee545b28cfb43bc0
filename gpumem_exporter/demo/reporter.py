"""The reports of all simulated processes, sent over one connection."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gpumem_client.wire.errors import ExporterAnswerError, ExporterError, WireError
from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import REPORTS_PATH, CommandResult, reply_from_wire, to_wire
from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.demo.simulation import Simulation

__all__ = ["NodeReporter"]

ANSWER_TIMEOUT_SECONDS = 5.0
LONGEST_INTERVAL_SECONDS = 1.0
"""The longest time between two reports, so that commands run soon whatever the exporter's report interval."""


@dataclass(slots=True)
class _Reporter:
    """The state of one process's reporter."""

    process: SimulatedProcess
    due_seconds: float
    sequence: int = 0
    results: tuple[CommandResult, ...] = ()


class NodeReporter:
    """Reports every process of a simulation and runs the commands of the replies.

    One thread calls `report_due` and `close`. Any thread may call `interrupt`.

    Args:
        simulation: the node.
        exporter_url: `http://host:port` or `unix:///path`.
        report_token: the token for reports, if the exporter requires one.
    """

    def __init__(self, simulation: Simulation, exporter_url: str, *, report_token: str | None = None) -> None:
        self._simulation = simulation
        self._connection = Connection(exporter_url, timeout_seconds=ANSWER_TIMEOUT_SECONDS)
        self._headers = {"Content-Type": "application/json"}
        if report_token is not None:
            self._headers["Authorization"] = f"Bearer {report_token}"
        self._reporters: dict[int, _Reporter] = {}

    def report_due(self, now: float) -> None:
        """Report each process whose report is due at `now`; stop at the first report that fails."""
        with self._simulation.lock:
            for process in self._simulation.processes():
                if process.reports:
                    self._reporters.setdefault(process.pid, _Reporter(process, due_seconds=now))
        try:
            for pid, reporter in tuple(self._reporters.items()):
                if reporter.process.ended:
                    del self._reporters[pid]
                    if not reporter.process.crashed:
                        self._report(reporter, now)
                elif now >= reporter.due_seconds:
                    self._report(reporter, now)
                    if reporter.results:
                        self._report(reporter, now)
        except (ExporterError, WireError):
            return  # the next call retries

    def interrupt(self) -> None:
        """End a request that waits for the exporter."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _report(self, reporter: _Reporter, now: float) -> None:
        """Post one report, and run the commands of the reply.

        Raises:
            ExporterError: the exporter cannot be reached, or it answers with an error.
            WireError: the reply is not valid.
        """
        process = reporter.process
        reporter.sequence += 1
        with self._simulation.lock:
            report = process.report(reporter.sequence, reporter.results, final=process.ended)
        body = json.dumps(to_wire(report), separators=(",", ":")).encode()
        answer = self._connection.request(
            "POST", REPORTS_PATH, body, self._headers, timeout_seconds=ANSWER_TIMEOUT_SECONDS
        )
        if answer.status != 200:
            raise ExporterAnswerError(answer.status, answer.body[:200].decode("utf-8", "replace"))
        try:
            reply = reply_from_wire(json.loads(answer.body))
        except ValueError as error:
            raise WireError(f"the reply is not JSON: {error}") from error
        reporter.due_seconds = now + min(reply.report_interval_seconds, LONGEST_INTERVAL_SECONDS)
        with self._simulation.lock:
            process.acknowledge(report)
            reporter.results = process.run_commands(reply)
