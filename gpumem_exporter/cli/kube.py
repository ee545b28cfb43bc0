"""`--kube`: reach the exporter of a node of Kubernetes through `kubectl port-forward`, which runs once.

kubectl's own configuration selects the cluster and the user. Kubernetes requires the rights to list pods and to create
`pods/portforward` in the exporter's namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gpumem_client.wire.errors import ConfigurationError, ExporterUnreachableError
from gpumem_exporter.cli.program import one_line

_LIST_SECONDS = 20.0
_START_SECONDS = 30.0
_END_SECONDS = 2.0
_SHOWN_NODES = 8
_DEFAULT_PORT = 9844
_DEFAULTS = {
    "GPUMEM_KUBECTL": "kubectl",
    "GPUMEM_KUBE_NAMESPACE": "gpumem",
    "GPUMEM_KUBE_SELECTOR": "app.kubernetes.io/name=gpumem-exporter",
}
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) -> ")
_PIPED: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True, "errors": "replace"}
_KLOG = re.compile(r"[EWIF]\d{4} [\d:.]+ +\d+ [^]]+\] ")

Pod = Mapping[str, Any]
"""An object of Kubernetes' API."""


class Forward:
    """A port of this machine that leads to the exporter of a node, from the first `url` until `close`.

    `target` is a node or a pod. The environment sets the command kubectl, and where it finds exporters.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        command, self._namespace, self._selector = (
            os.environ.get(name, "").strip() or default for name, default in _DEFAULTS.items()
        )
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise ConfigurationError(f"GPUMEM_KUBECTL {command!r}: {error}") from None
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name="gpumem-kubectl", daemon=True)
        self._scheme, self._address, self._last = "http", "", ""
        self._started = threading.Event()

    @property
    def url(self) -> str:
        """The URL on this machine; waits until kubectl listens.

        Raises ExporterUnreachableError with kubectl's reason, and ConfigurationError if there is no such program.
        """
        if self._process is None:
            self._start(self._find(self._pods()))
        in_time = self._started.wait(_START_SECONDS)
        if self._address:
            return self._address
        late = f"`kubectl port-forward` to {self._target} did not start within {_START_SECONDS:g} s"
        raise ExporterUnreachableError(self.failure if in_time else late)

    @property
    def failure(self) -> str:
        """Why the port leads nowhere: kubectl has ended. Empty while kubectl runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        self._reader.join(_END_SECONDS)
        return f"kubectl port-forward ended: {self._last or f'exit code {self._process.returncode}'}"

    def wait(self) -> None:
        """Wait for the end of kubectl."""
        if self._process is not None:
            self._process.wait()

    def close(self) -> None:
        """End kubectl."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    # Its group: a wrapper such as `sh -c` has kubectl as its child.
                    os.killpg(self._process.pid, number)
                    self._process.wait(_END_SECONDS)

    def _words(self, verb: str, *words: str) -> list[str]:
        return [*self._command, verb, "--namespace", self._namespace, *words]

    def _pods(self) -> list[Pod]:
        """List the exporters' pods."""
        timeout = f"--request-timeout={_LIST_SECONDS / 2:g}s"
        words = self._words("get", "pods", "--selector", self._selector, "--output", "json", timeout)
        try:
            ended = subprocess.run(  # noqa: S603 - the user's own command
                words, **_PIPED, stderr=subprocess.PIPE, timeout=_LIST_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise ExporterUnreachableError(f"kubectl did not list pods within {_LIST_SECONDS:g} s") from None
        except OSError as error:
            reason = f"cannot run {self._command[0]!r}: {error.strerror}"
            raise ConfigurationError(f"{reason}; install kubectl, or set GPUMEM_KUBECTL to its command") from None
        if ended.returncode != 0:
            lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            raise ExporterUnreachableError(f"kubectl: {_reason(lines[-1])}")
        try:
            return list(json.loads(ended.stdout)["items"])
        except (ValueError, KeyError, TypeError):
            raise ExporterUnreachableError("kubectl printed no list of pods") from None

    def _find(self, pods: Sequence[Pod]) -> Pod:
        found = [pod for pod in pods if self._target in (pod["metadata"]["name"], pod["spec"].get("nodeName"))]
        if found:
            # A pod that is being replaced may still be on the node.
            return min(found, key=lambda pod: "deletionTimestamp" in pod["metadata"])
        where = f"in the namespace {self._namespace!r} with the label {self._selector}"
        nodes = sorted({pod["spec"].get("nodeName", "") for pod in pods} - {""})[:_SHOWN_NODES]
        known = f"the nodes are {', '.join(nodes)}" if nodes else "set GPUMEM_KUBE_NAMESPACE and GPUMEM_KUBE_SELECTOR"
        raise ExporterUnreachableError(f"no node or pod {self._target!r} {where}; {known}")

    def _start(self, pod: Pod) -> None:
        containers = [*pod["spec"].get("containers", ()), *pod["spec"].get("initContainers", ())]
        ports = [port for each in containers for port in each.get("ports", ()) if port.get("name") == "metrics"]
        probes = [each.get(name, {}) for each in containers for name in ("readinessProbe", "livenessProbe")]
        if any(probe.get("httpGet", {}).get("scheme") == "HTTPS" for probe in probes):
            self._scheme = "https"
        port = ports[0]["containerPort"] if ports else _DEFAULT_PORT
        words = ("--address", "127.0.0.1", f"pod/{pod['metadata']['name']}", f":{port}")
        self._process = subprocess.Popen(  # noqa: S603 - the user's own command
            self._words("port-forward", *words),
            **_PIPED,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the command, which ends kubectl afterwards
        )
        self._reader.start()

    def _read(self) -> None:
        """Read the output of kubectl until its end."""
        assert self._process is not None  # noqa: S101 - `_start` has set it
        # kubectl prints a line for each connection before it forwards the connection. It would wait for a reader. After
        # SIGKILL to this process, SIGPIPE ends kubectl at that line, so that the port leads nobody to the exporter.
        for line in self._process.stdout or ():
            if found := _FORWARDING.match(line):
                self._address = f"{self._scheme}://127.0.0.1:{found[1]}"
                self._started.set()
            elif line.strip() and not line.startswith("Handling connection"):
                self._last = _reason(line)
        self._process.wait()
        self._started.set()


def _reason(line: str) -> str:
    return one_line(_KLOG.sub("", line.strip())).removeprefix("error: ")
