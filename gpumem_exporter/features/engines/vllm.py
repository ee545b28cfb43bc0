"""vLLM through its development routes, for servers whose process does not report or that have several workers.

Source: vllm 0.32.0, vllm/entrypoints/serve/dev/sleep/api_router.py and vllm/v1/metrics/loggers.py. The routes exist
with VLLM_SERVER_DEV_MODE=1 only, and have no authentication of their own.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

from gpumem_client.wire.errors import ExporterUnreachableError, ExporterUntrustedError
from gpumem_client.wire.http import Answer, Connection
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.features.engines.engine_listeners import Listener, ListenerTrust

MAX_ANSWER_BYTES = 2 << 20
"""The metrics of an engine with many ranks have some 100 KiB."""
QUESTION_SECONDS = 5.0
CHANGE_SECONDS = 150.0
"""How long vLLM may take to release or resume its memory: it may copy 100 GiB between the device and the host."""
_METRICS_SECONDS = 1.0
_FLAGS = (
    "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, or with --enable-sleep-mode below gpumem-run, which needs no "
    "development mode for an engine on one GPU"
)
_MAX_REASON_LENGTH = 500
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class EngineRefusedError(Exception):
    """An engine cannot do what is requested, or does not do it; the result gets `code` and `outcome`."""

    def __init__(self, code: str | None, reason: str, *, outcome: str = "refused") -> None:
        super().__init__(reason[:_MAX_REASON_LENGTH])  # it may have what a server of any user says
        self.code = code
        self.outcome = outcome


class Activity(NamedTuple):
    """What an engine does."""

    asleep: bool
    """Whether it has released memory that it has not resumed."""
    requests: int | None
    """The number of running and queued requests; None if the engine does not show it."""


class Vllm:
    """A server. The methods block for a bounded time and raise EngineRefusedError."""

    name = "vLLM"

    def __init__(self, argv: Sequence[str], listener: Listener, key: Hashable) -> None:
        self._argv = argv
        self.listener = listener
        self.key = key
        """The same for all processes that release their memory together."""

    def activity(self) -> Activity:
        """Return whether the engine sleeps, and its requests from its own metrics."""
        argv, path = self._argv, "/is_sleeping"
        if "--port" in argv and not {"--enable-sleep-mode", "--enable_sleep_mode", "--config"} & set(argv):
            raise _not_enabled(f"vLLM: it was started without {_FLAGS}")
        asleep = _document(self._ask("GET", path, flag=_FLAGS), path).get("is_sleeping")
        if not isinstance(asleep, bool):
            raise _failed("does not say whether it sleeps")
        return Activity(asleep, sum_of_metrics(self._ask("GET", "/metrics").body, _REQUESTS))

    def cache_use(self) -> float | None:
        """Return the part of the key-value cache that requests use; None with several engines behind the port."""
        values = values_of_metric(self._ask("GET", "/metrics", _METRICS_SECONDS).body, "vllm:kv_cache_usage_perc")
        return values[0] if len(values) == 1 and 0 <= values[0] <= 1 else None

    def release(self, keep: str | None, force: bool, /) -> None:
        """Offload the weights to the host and drop the key-value cache, or with `keep` drop the cache only."""
        # A request that has arrived since the last look ends first. New ones wait until the engine wakes.
        mode = "abort" if force else "wait"
        if keep is None:
            self._ask("POST", f"/sleep?level=1&mode={mode}", CHANGE_SECONDS)
            return
        self._ask("POST", f"/sleep?level=0&mode={mode}", CHANGE_SECONDS)
        try:
            flag = "vLLM 0.32 or newer, which can keep the weights"
            self._ask("POST", "/release_kv_cache_memory", CHANGE_SECONDS, flag=flag)
        except EngineRefusedError:
            with contextlib.suppress(EngineRefusedError):
                # Otherwise its requests would wait forever.
                self._ask("POST", "/wake_up?tags=scheduling", CHANGE_SECONDS)
            raise

    def resume(self) -> None:
        """Take the memory again, and continue with the requests that waited."""
        path = "/wake_up"
        woken = _document(self._ask("POST", path, CHANGE_SECONDS), path)
        if woken.get("status", "awake") != "awake":
            raise _failed("is not fully awake")

    def _ask(self, method: str, path: str, seconds: float | None = None, *, flag: str = "") -> Answer:
        """Send one request on a connection of its own, and return the answer with the status 200.

        `flag` is what vLLM must be started with to have the route. Raises EngineRefusedError: another status, no answer
        in time and within the limits, or another process listens now.
        """
        # Another process may listen on the port by now. So the kernel is asked again after the connection, before
        # anything is sent.
        seconds = QUESTION_SECONDS if seconds is None else seconds
        host, port = self.listener.address
        connection = Connection(
            f"http://{f'[{host}]' if ':' in host else host}:{port}",
            timeout_seconds=min(seconds, QUESTION_SECONDS),
            trust=ListenerTrust(frozenset(), inode=self.listener.inode),
            trusted_only=True,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )
        try:
            answer = connection.request(method, path, b"" if method == "POST" else None, {}, timeout_seconds=seconds)
        except ExporterUntrustedError:
            reason = f"another process listens on port {port} now"
            raise EngineRefusedError(ReasonCode.ENGINE_UNREACHABLE, reason) from None
        except ExporterUnreachableError as error:
            raise _failed(f"on port {port} does not answer {method} {path}: {error.__cause__}") from None
        finally:
            connection.close()
        if answer.status == 200:
            return answer
        if answer.status in (401, 403):
            reason = f"vLLM requires a key for {path} (status {answer.status}), which the exporter does not have"
            raise EngineRefusedError(ReasonCode.ENGINE_DENIED, reason)
        if answer.status in (404, 405, 501) and flag:
            raise _not_enabled(f"vLLM has no route {path} (status {answer.status}); start it with {flag}")
        said = answer.body[:200].decode("utf-8", "replace").replace("\n", " ").strip()
        raise _failed(f"answers {path} with status {answer.status}{f': {said}' if said else ''}")


def _document(answer: Answer, path: str) -> dict[str, Any]:
    """Return the JSON object of an answer; raise EngineRefusedError if it is something else."""
    try:
        read = json.loads(answer.body)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise _failed(f"answers {path} with something else than a JSON object")
    return read


def _failed(what: str) -> EngineRefusedError:
    """Return the error of an engine that does not do what it should."""
    return EngineRefusedError(ReasonCode.ENGINE_FAILED, f"vLLM {what}", outcome="failed")


def _not_enabled(reason: str) -> EngineRefusedError:
    """Return the error of an engine that cannot do it as it was started."""
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
