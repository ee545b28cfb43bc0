"""A real exporter in its own process: its answers, its metrics and its exit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import Answer, Connection
from gpumem_client.wire.protocol import REPORTS_PATH, Report, to_wire
from tests.support.paths import REPOSITORY
from tests.support.processes.zygote import EXPORTER, ForkedProcess, fork_program
from tests.support.waiting import patient, wait_for

UNLIMITED = ("--action.caller-limit", "1000000", "--action.process-limit", "1000000")
"""Tests request more actions than the default limits allow."""
QUICK = ("--report.interval", "0.2", "--collect.interval", "0.2", *UNLIMITED)
"""Flags of an exporter that shows changes quickly."""


def token_file(folder: Path, token: str) -> str:
    """Write a token to a file that only its owner can read, and return its path."""
    file = folder / "token"
    file.touch(0o600)
    file.write_text(f"{token}\n")
    return str(file)


class ExporterProcess:
    """`gpumem-exporter serve` on a unix socket in `folder`; its flags follow.

    `environment` is complete, by default the environment of the test; this repository is added to PYTHONPATH.
    `launcher` is a command before the interpreter, such as `("unshare", "--pid", "--fork")`. With `fresh`, the process
    is not a fork of another interpreter. The start ends when the route `ready` succeeds: `/-/healthy` for a node
    without a driver.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        fresh: bool = False,
        ready: str = "/-/ready",
    ) -> None:
        self._fresh = fresh
        self._ready_path = ready
        self.socket = folder / "exporter.sock"
        self.url = f"unix://{self.socket}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._flags = flags
        self._launcher = launcher
        self._environment = dict(os.environ if environment is None else environment)
        path = filter(None, (str(REPOSITORY), self._environment.get("PYTHONPATH")))
        self._environment["PYTHONPATH"] = os.pathsep.join(path)
        self._popen: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._connection = Connection(self.url, timeout_seconds=patient(30.0))
        self.start()

    @property
    def pid(self) -> int:
        """The pid."""
        assert self._popen is not None
        return self._popen.pid

    @property
    def tcp_url(self) -> str:
        """The URL of its port on the loopback address, from its log; of the port in its flags if they have one."""
        listening = r"\blistening\b.*(https?://127\.0\.0\.1:\d+)"
        return str(wait_for(lambda: re.search(listening, self.log()), "the exporter's address")[1])

    def start(self) -> None:
        """Start the exporter, and wait until the first poll has ended."""
        sockets = ("--web.listen-address", "127.0.0.1:0", "--web.listen-socket", str(self.socket))
        arguments = ("serve", *sockets, *self._flags)
        log = self._log.fileno()
        forked = None
        if not self._launcher and not self._fresh:
            with Path(os.devnull).open("rb") as nothing:
                forked = fork_program(
                    EXPORTER,
                    "gpumem_exporter",
                    arguments,
                    self._environment,
                    stdin=nothing.fileno(),
                    stdout=log,
                    stderr=log,
                )
        self._popen = forked or subprocess.Popen(
            [*self._launcher, sys.executable, "-m", "gpumem_exporter", *arguments],
            env=self._environment,
            stdout=log,
            stderr=log,
        )
        wait_for(self._ready, "the exporter's first poll", 60.0)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the exporter and return its exit status."""
        self._connection.close()
        assert self._popen is not None
        self._popen.send_signal(number)
        return self._popen.wait(patient(30))

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self._popen is not None
        self._popen.send_signal(number)

    def close(self) -> None:
        """Kill the exporter if it still runs."""
        self._connection.close()
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait(patient(30))
        self._log.close()

    def peak_bytes(self) -> int:
        """Return the most resident memory that the process had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))

    def log(self) -> str:
        """Return the log."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")

    def request(self, method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send one request on a persistent connection; `document` is sent as JSON."""
        body = None if document is None else json.dumps(document).encode()
        sent = {**({} if body is None else {"Content-Type": "application/json"}), **(headers or {})}
        return self._connection.request(method, path, body, sent)

    def get(self, path: str) -> Any:
        """Return the JSON document at a path."""
        answer = self.request("GET", path)
        assert answer.status == 200, answer
        return json.loads(answer.body)

    def report(self, sent: Report) -> None:
        """Send a report, which the exporter accepts."""
        answer = self.request("POST", REPORTS_PATH, to_wire(sent))
        assert answer.status == 200, answer

    def act(self, action: str, *, expect: int = 200, **request: Any) -> Any:
        """Request an action and return the document of the answer."""
        answer = self.request("POST", "/api/v1/actions", {"action": action, **request})
        assert answer.status == expect, answer
        return json.loads(answer.body)

    def metrics(self) -> Metrics:
        """Scrape the metrics."""
        answer = self.request("GET", "/metrics")
        assert answer.status == 200, answer
        return Metrics(answer.body.decode())

    def processes(self) -> dict[int, Any]:
        """Return the reporting processes by pid."""
        return {entry["pid"]: entry for entry in self.get("/api/v1/processes")["processes"] if entry["reporting"]}

    def events(self, **query: Any) -> list[dict[str, Any]]:
        """Return the events that match a query, page by page."""
        after, found = 0, []
        conditions = "".join(f"&{name}={value}" for name, value in query.items())
        while True:
            page = self.get(f"/api/v1/events?limit=1000&after={after}{conditions}")
            found += page["events"]
            if not page["more"]:
                return found
            after = page["next_after"]

    def wait_for_processes(self, *pids: int) -> None:
        """Wait until each of these processes reports."""
        wait_for(lambda: set(pids) <= set(self.processes()), f"reports of {pids}")

    def _ready(self) -> bool:
        assert self._popen is not None
        if self._popen.poll() is not None:
            raise AssertionError(f"the exporter ended with {self._popen.returncode}:\n{self.log()}")
        try:
            return self.request("GET", self._ready_path).status == 200
        except ExporterUnreachableError:
            return False


class Metrics:
    """A scrape: its text, and its samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def samples(self) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
        """All values by name and labels."""
        return _samples(self.text)

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of all series with this name and these labels."""
        lines = [line for line in self.text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        wanted = set(labels.items())
        found = _samples("\n".join(lines)).get(name, {})  # parsing all of the page takes a hundred times longer
        return [value for have, value in found.items() if wanted <= have]

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the values of all series with this name and these labels, by the value of another label."""
        wanted = set(labels.items())
        found = self.samples.get(name, {}).items()
        return {dict(have)[label]: value for have, value in found if wanted <= have}

    def infos(self) -> dict[str, dict[str, str]]:
        """Return the labels of `gpumem_process_info` by pid."""
        return {dict(labels)["pid"]: dict(labels) for labels in self.samples["gpumem_process_info"]}

    def value(self, name: str, **labels: str) -> float:
        """Return the only value of such a series."""
        (value,) = self.values(name, **labels)
        return value

    def ledgers(self) -> dict[str, dict[str, int]]:
        """Return the categories of each ledger by UUID, as exact integers."""
        ledgers: dict[str, dict[str, int]] = {}
        for line in self.text.splitlines():
            if line.startswith("gpumem_ledger_bytes{"):
                labels, _, value = line.rpartition(" ")
                fields = dict(part.split("=", 1) for part in labels[labels.index("{") + 1 : -1].split(","))
                ledgers.setdefault(fields["uuid"].strip('"'), {})[fields["category"].strip('"')] = int(value)
        return ledgers

    def assert_ledgers_add_up(self) -> None:
        """Assert that the categories of each device add up to its total."""
        ledgers = self.ledgers()
        totals = {
            dict(labels)["uuid"]: int(value)
            for labels, value in self.samples.get("gpumem_device_memory_total_bytes", {}).items()
        }
        assert {uuid: sum(ledger.values()) for uuid, ledger in ledgers.items()} == totals


def _samples(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text + "\n"):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples
