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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The program kubectl, and where it finds exporters."""

    command: tuple[str, ...]
    namespace: str
    selector: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Kubectl:
        """Return what the environment sets."""
        command, namespace, selector = (environ.get(name, "").strip() or default for name, default in _DEFAULTS.items())
        try:
            return cls(tuple(shlex.split(command)), namespace, selector)
        except ValueError as error:
            raise ConfigurationError(f"GPUMEM_KUBECTL {command!r}: {error}") from None

    def words(self, verb: str, *words: str) -> list[str]:
        """Return the words of a command in the namespace."""
        return [*self.command, verb, "--namespace", self.namespace, *words]

    def pods(self) -> list[Pod]:
        """List the exporters' pods.

        Raises ExporterUnreachableError with kubectl's reason, and ConfigurationError if there is no such program.
        """
        timeout = f"--request-timeout={_LIST_SECONDS / 2:g}s"
        words = self.words("get", "pods", "--selector", self.selector, "--output", "json", timeout)
        try:
            ended = subprocess.run(  # noqa: S603 - the user's own command
                words, **_PIPED, stderr=subprocess.PIPE, timeout=_LIST_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise ExporterUnreachableError(f"kubectl did not list pods within {_LIST_SECONDS:g} s") from None
        except OSError as error:
            reason = f"cannot run {self.command[0]!r}: {error.strerror}"
            raise ConfigurationError(f"{reason}; install kubectl, or set GPUMEM_KUBECTL to its command") from None
        if ended.returncode != 0:
            lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            raise ExporterUnreachableError(f"kubectl: {_reason(lines[-1])}")
        try:
            return list(json.loads(ended.stdout)["items"])
        except (ValueError, KeyError, TypeError):
            raise ExporterUnreachableError("kubectl printed no list of pods") from None

    def find(self, target: str, pods: Sequence[Pod]) -> Pod:
        """Return the pod with this name or on this node; raises ExporterUnreachableError if there is none."""
        found = [pod for pod in pods if target in (pod["metadata"]["name"], pod["spec"].get("nodeName"))]
        if found:
            # A pod that is being replaced may still be on the node.
            return min(found, key=lambda pod: "deletionTimestamp" in pod["metadata"])
        where = f"in the namespace {self.namespace!r} with the label {self.selector}"
        if not pods:
            raise ExporterUnreachableError(f"no pod {where}: set GPUMEM_KUBE_NAMESPACE and GPUMEM_KUBE_SELECTOR")
        nodes = sorted({pod["spec"].get("nodeName", "") for pod in pods} - {""})
        listed = ", ".join([*nodes[:_SHOWN_NODES], *(["…"] if len(nodes) > _SHOWN_NODES else ())])
        raise ExporterUnreachableError(f"no node or pod {target!r} {where}; the nodes are {listed}")


class Forward:
    """A port of this machine that leads to the exporter of a node, from `start` until `close` or the end of kubectl."""

    def __init__(self, kubectl: Kubectl, target: str) -> None:
        self._kubectl, self._target = kubectl, target
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name="gpumem-kubectl", daemon=True)
        self._scheme, self._address, self._last = "http", "", ""
        self._started = threading.Event()

    def start(self) -> None:
        """Start kubectl, unless it was started. Raises the errors of `Kubectl.pods` and `Kubectl.find`."""
        if self._process is not None:
            return
        pod = self._kubectl.find(self._target, self._kubectl.pods())
        containers = [*pod["spec"].get("containers", ()), *pod["spec"].get("initContainers", ())]
        ports = [port for each in containers for port in each.get("ports", ()) if port.get("name") == "metrics"]
        probes = [each.get(name, {}) for each in containers for name in ("readinessProbe", "livenessProbe")]
        if any(probe.get("httpGet", {}).get("scheme") == "HTTPS" for probe in probes):
            self._scheme = "https"
        port = ports[0]["containerPort"] if ports else _DEFAULT_PORT
        words = ("--address", "127.0.0.1", f"pod/{pod['metadata']['name']}", f":{port}")
        self._process = subprocess.Popen(  # noqa: S603 - the user's own command
            self._kubectl.words("port-forward", *words),
            **_PIPED,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the command, which ends kubectl afterwards
        )
        self._reader.start()

    @property
    def url(self) -> str:
        """The URL on this machine; waits until kubectl listens. Raises the errors of `start`."""
        self.start()
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

    def _read(self) -> None:
        """Read the output of kubectl until its end."""
        assert self._process is not None  # noqa: S101 - `start` has set it
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
