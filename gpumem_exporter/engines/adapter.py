"""What the modules of engines have in common: the engine's processes, and its HTTP interface."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

from gpumem_client.wire.errors import ExporterUnreachableError, ExporterUntrustedError
from gpumem_client.wire.http import Answer, Connection
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.engines.listeners import Listener, ListenerTrust

MAX_ANSWER_BYTES = 2 << 20
"""The metrics of an engine with many ranks have some 100 KiB."""
QUESTION_SECONDS = 5.0
CHANGE_SECONDS = 150.0
"""How long an engine may take to release or resume its memory: it may copy 100 GiB between the device and the host."""


class Program(NamedTuple):
    """A process of an engine: the one on the device, or one of its ancestors."""

    pid: int
    argv: tuple[str, ...]
    """Empty or a title, if the program has replaced it."""
    listeners: tuple[Listener, ...]
    variable: Callable[[str], str]
    """Returns a variable of its environment; empty if it is not set or not readable."""

    def option(self, *names: str) -> str:
        """Return the value of an option of its command line, `--name VALUE` or `--name=VALUE`; empty without it."""
        for position, argument in enumerate(self.argv):
            name, equals, value = argument.partition("=")
            if name in names:
                return value if equals else "".join(self.argv[position + 1 : position + 2])
        return ""


class Engine:
    """One engine behind its HTTP interface. The methods block for a bounded time and raise EngineRefusedError."""

    name: str
    """Of the product."""
    titles: tuple[str, ...]
    """Parts of the titles or commands of its processes on a device."""
    port: int
    """The port without an option."""
    workers: tuple[str, ...] = ()
    """The starts of the titles of processes that are not the server."""
    alone = False
    """Whether each process on a device is an engine of its own, which releases its memory without the others."""

    def __init__(
        self, program: Program, worker: Program, listener: Listener, reporter: ReportingProcess | None, key: Hashable
    ) -> None:
        self.program = program
        """The process that listens."""
        self.worker = worker
        """The process on the device; the same one if it listens itself."""
        self.listener = listener
        self.reporter = reporter
        """The process on the device, if it reports."""
        self.key = key
        # Read now, because the finder then checks that the process is still the same one.
        self.headers = self.authorize()

    def authorize(self) -> Mapping[str, str]:
        """Return the headers for each request, from what the engine was started with."""
        return {}

    def activity(self) -> Activity:
        """Return whether the engine sleeps, and the number of its requests."""
        raise NotImplementedError

    def cache_use(self) -> float | None:
        """Return the part of the key-value cache that requests use; None if the engine does not show it."""
        return None

    def release(self, keep: str | None, force: bool, /) -> None:
        """Release the memory of the engine except the component `keep`. With `force`, its requests may be aborted."""
        raise NotImplementedError

    def resume(self) -> None:
        """Take the memory again."""
        raise NotImplementedError

    def get(self, path: str, *, flag: str = "") -> Answer:
        """Return the answer to a question: see `expect`."""
        return self.expect(self.exchange("GET", path, None, QUESTION_SECONDS, self.headers), path, flag)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = CHANGE_SECONDS, flag: str = ""
    ) -> Answer:
        """Return the answer to a request that may change something: see `expect`."""
        content = b"" if body is None else json.dumps(body).encode()
        headers = self.headers if body is None else {**self.headers, "Content-Type": "application/json"}
        return self.expect(self.exchange("POST", path, content, seconds, headers), path, flag)

    def exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        seconds: float,
        headers: Mapping[str, str],
        listener: Listener | None = None,
    ) -> Answer:
        """Send one request on a connection of its own, and return the answer with any status.

        Raises EngineRefusedError: no answer in time and within the limits, or another process listens now.
        """
        # Another process may listen on the port by now. So the kernel is asked again after the connection, before
        # anything is sent: the request may have a key.
        listener = listener or self.listener
        host, port = listener.address
        connection = Connection(
            f"http://{f'[{host}]' if ':' in host else host}:{port}",
            timeout_seconds=min(seconds, QUESTION_SECONDS),
            trust=ListenerTrust(frozenset(), inode=listener.inode),
            trusted_only=True,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )
        try:
            return connection.request(method, path, body, headers, timeout_seconds=seconds)
        except ExporterUntrustedError:
            reason = f"another process listens on port {port} now"
            raise EngineRefusedError(ReasonCode.ENGINE_UNREACHABLE, reason) from None
        except ExporterUnreachableError as error:
            raise self.failed(f"on port {port} does not answer {method} {path}: {error.__cause__}") from None
        finally:
            connection.close()

    def expect(self, answer: Answer, path: str, flag: str = "") -> Answer:
        """Return an answer with the status 200, and raise EngineRefusedError for any other.

        `flag` is what the engine must be started with to have the route.
        """
        if answer.status == 200:
            return answer
        if answer.status in (401, 403):
            reason = (
                f"{self.name} requires a key for {path} (status {answer.status}), which the exporter cannot read from "
                "the command line or the environment of the process"
            )
            raise EngineRefusedError(ReasonCode.ENGINE_DENIED, reason)
        if answer.status in (404, 405, 501) and flag:
            raise not_enabled(f"{self.name} has no route {path} (status {answer.status}); start it with {flag}")
        said = answer.body[:200].decode("utf-8", "replace").replace("\n", " ").strip()
        raise self.failed(f"answers {path} with status {answer.status}{f': {said}' if said else ''}")

    def document(self, answer: Answer, path: str) -> dict[str, Any]:
        """Return the JSON object of an answer; raise EngineRefusedError if it is something else."""
        try:
            read = json.loads(answer.body)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise self.failed(f"answers {path} with something else than a JSON object")
        return read

    def failed(self, what: str) -> EngineRefusedError:
        """Return the error of an engine that does not do what it should."""
        return EngineRefusedError(ReasonCode.ENGINE_FAILED, f"{self.name} {what}", outcome="failed")


def not_enabled(reason: str) -> EngineRefusedError:
    """Return the error of an engine that cannot do it, or not as it was started."""
    return EngineRefusedError(ReasonCode.ENGINE_NOT_ENABLED, reason, outcome="unsupported")


def sum_of_metrics(body: bytes, names: Sequence[str]) -> int | None:
    """Return the sum of the samples of some metrics; None if one of the metrics is missing or invalid."""
    found = [values_of_metric(body, name) for name in names]
    total = sum(map(sum, found))
    return int(total) if all(found) and isfinite(total) else None


def values_of_metric(body: bytes, wanted: str) -> list[float]:
    """Return the values of the samples of a metric; NaN for an invalid one."""
    values = []
    for line in body.decode("utf-8", "replace").splitlines():
        name, brace, rest = line.partition("{")
        name, _, value = (name, "", rest.rpartition("}")[2]) if brace else line.partition(" ")
        if name == wanted:
            try:
                values.append(float(value.split()[0]))
            except (ValueError, IndexError):
                values.append(nan)
    return values
